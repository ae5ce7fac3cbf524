"""A newcomer's tour in minutes: a small network learns to use tools, then an agent program, untouched, makes it better.

    python examples/demo.py [--runs runs/demo] [--seed 0] [--control] [--scale 1.0 | --smoke]

    text       pages of keys, which the network learns to copy, and a tokenizer
    pretrain   a narrow m2-nano from random weights, with one prediction module
    sft        demonstrations: follow links with `look`, which asks the source, or `recall`, which asks a copy
    rl         the agent program of examples/task_agent.py, by OpenAI's SDK, through the gateway: prefix trees, CISPO,
               windowed FIFO, the module trained along
    report     what happened, in one HTML file

Demonstrations were made where the copy is right, so the network trusts it. The tasks of the rl stage are harder: the
copy is out of date at one to three of their links. No message says so; only the verifier's verdict tells. `--control`
hands the rewards of a group to its attempts at random: which tool to trust cannot be learnt then.

A stage that was killed goes on where it stopped, and one that is complete is not repeated. `--scale 0.1` does a tenth
of everything, which is enough to see that it works and too little to learn. `--smoke` does one step of each stage, with
two short attempts, which shows in seconds that an installation is complete.
"""

import os

# torch's CPU allocator reads this when it is loaded: keep freed memory for a second, for the next training step.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from m2forge.config import load
from m2forge.corpus.build import build_corpus
from m2forge.corpus.config import CorpusConfig
from m2forge.errors import ConfigError, M2ForgeError
from m2forge.files import write_atomic
from m2forge.observe.metrics import FILE_NAME, read_metrics
from m2forge.page.report import write_report
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.stage import run_pretrain
from m2forge.records import Submission, Task
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import EvalResult
from m2forge.rl.loop import run_rl
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import run_sft
from m2forge.tasks.agent import KEYS
from m2forge.tasks.catalog import family_of, find_family
from m2forge.tasks.demonstration import demonstrations, write_demonstrations
from m2forge.tasks.task_set import TaskSet
from m2forge.text.format import MINIMAX_M2_SPECIALS, make_format
from m2forge.text.message import message_from_openai, tool_from_openai
from m2forge.text.tokenizer import train_tokenizer

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
FAMILY = "copies"
BARE, WHOLE = "bare.jsonl", "whole.jsonl"
NUM_PAGES = 4000
VOCAB_SIZE, TOKENIZER_TEXTS = 512, 300
SMOKE_SCALE = 0.001
SMOKE_SETTINGS = {
    "group_size": 2,
    "curriculum__batch_groups": 1,
    "pool__window__queue": 2,
    "agent__budget__max_calls": 1,
    "agent__budget__max_tokens": 16,
}
"""RL settings of `--smoke`, keys joined by __."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Lesson:
    """What is demonstrated to the network."""

    family: str = FAMILY
    difficulty: int = 0
    num_bare: int = 1000
    num_whole: int = 440
    """Demonstrations without and with the description of the tools."""

    def tasks(self, num: int, seed: int) -> list[Task]:
        tasks = TaskSet(find_family(self.family), "train", seed)
        return [tasks.next(self.difficulty, self.difficulty) for _ in range(num)]


def make_pages(folder: Path, seed: int, num_pages: int) -> Path:
    """Pages of a few keys, each written two to four times."""
    rng = random.Random(seed)
    pages = []
    for _ in range(num_pages):
        line = " ".join(rng.choice(KEYS) for _ in range(rng.randint(2, 10)))
        pages.append(f"{line}\n" * rng.randint(2, 4))
    path = folder / "pages.jsonl"
    write_atomic(path, "".join(json.dumps({"text": page}) + "\n" for page in pages))
    return path


def make_demonstrations(folder: Path, seed: int, bare: list[Task], whole: list[Task]) -> None:
    """With the description of the tools, as the agent sends them, and without."""
    write_demonstrations(folder / WHOLE, whole, seed)
    lines = (json.dumps(item | {"tools": []}) for item in demonstrations(bare, seed, system=""))
    write_atomic(folder / BARE, "".join(f"{line}\n" for line in lines))


def make_tokenizer(folder: Path, seed: int, tasks: list[Task]) -> Path:
    """Trained on conversations as the network will read them."""
    plain = make_format("minimax_m2", train_tokenizer(["a b"], 300, MINIMAX_M2_SPECIALS))
    texts = []
    for item in demonstrations(tasks, seed):
        messages, tools = item["messages"], item["tools"]
        assert isinstance(messages, list)
        assert isinstance(tools, list)
        rendered = plain.render([message_from_openai(m) for m in messages], [tool_from_openai(t) for t in tools])
        texts.append(plain.tokenizer.decode(rendered.ids))
    train_tokenizer(texts, VOCAB_SIZE, MINIMAX_M2_SPECIALS).save(folder)
    return folder


def make_corpus(folder: Path, pages: Path, tokenizer: Path) -> Path:
    settings = set_options(sources__0__path=str(pages), tokenizer__path=str(tokenizer))
    config = load(CorpusConfig, CONFIGS / "corpus" / "demo.toml", settings)
    build_corpus(config, folder, num_workers=1)
    return folder


def set_options(**settings: object) -> list[str]:
    return [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]


class Demo:
    def __init__(
        self,
        runs: Path,
        seed: int,
        *,
        is_control: bool = False,
        scale: float = 1.0,
        is_smoke: bool = False,
        lesson: Lesson | None = None,
    ) -> None:
        """`is_smoke`: replaces `scale`."""
        self.runs, self.seed, self.is_control = runs, seed, is_control
        self._scale, self._settings = (SMOKE_SCALE, SMOKE_SETTINGS) if is_smoke else (scale, {})
        self._lesson = lesson or Lesson()
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        agent = self.make_agent()
        results = self._timed("rl", lambda: self._rl(agent))
        name = "control" if self.is_control else "rl"
        report = self.runs / ("control.html" if self.is_control else "report.html")
        self._timed("report", lambda: write_report(self.runs / name, report))
        self._summarise(results, self.runs / name, report)

    def make_agent(self) -> Path:
        """The folder of a model that has seen demonstrations and no reward."""
        data = self.runs / "data"
        data.mkdir(parents=True, exist_ok=True)
        corpus = self._timed("text", lambda: self._text(data))
        base = self._timed("pretrain", lambda: self._pretrain(corpus))
        return self._timed("sft", lambda: self._sft(base, data))

    def _timed(self, name: str, stage: Callable[[], Result]) -> Result:
        started_s = time.monotonic()
        result = stage()
        self.seconds[name] = time.monotonic() - started_s
        return result

    def _scaled(self, number: int) -> int:
        return max(1, round(number * self._scale))

    def _text(self, data: Path) -> Path:
        folder = self.runs / "pages"
        if folder.exists():
            return folder
        num_bare, num_whole = self._scaled(self._lesson.num_bare), self._scaled(self._lesson.num_whole)
        tasks = self._lesson.tasks(num_bare + num_whole, self.seed)
        make_demonstrations(data, self.seed, tasks[:num_bare], tasks[num_bare:])
        tokenizer = make_tokenizer(data / "tokenizer", self.seed, self._lesson.tasks(TOKENIZER_TEXTS, self.seed))
        return make_corpus(folder, make_pages(data, self.seed, self._scaled(NUM_PAGES)), tokenizer)

    def _pretrain(self, corpus: Path) -> Path:
        path = CONFIGS / "pretrain" / "demo.toml"
        steps = self._scaled(load(PretrainConfig, path).phases[0].steps)
        settings = set_options(corpus=str(corpus), seed=self.seed, phases__0__steps=steps)
        settings += set_options(phases__0__warmup_steps=min(steps, 30))
        return run_pretrain(load(PretrainConfig, path, settings), self.runs)

    def _sft(self, base: Path, data: Path) -> Path:
        paths = {f"data__sources__{n}__path": str(data / name) for n, name in enumerate((BARE, WHOLE))}
        settings = set_options(model=str(base), seed=self.seed, **paths)
        return run_sft(load(SFTConfig, CONFIGS / "sft" / "demo.toml", settings), self.runs)

    def _rl(self, agent: Path) -> list[EvalResult]:
        command = [sys.executable, str(ROOT / "examples" / "task_agent.py")]
        path = CONFIGS / "rl" / "demo.toml"
        config = load(RLConfig, path)
        settings = set_options(model=str(agent), agent__command=command, curriculum__seed=self.seed)
        settings += set_options(
            num_steps=self._scaled(config.num_steps), warmup_steps=min(3, self._scaled(config.num_steps))
        )
        settings += set_options(eval__num_tasks=self._scaled(config.eval.num_tasks))
        settings += set_options(**self._settings)
        if self.is_control:
            settings += set_options(name="control", reward__shuffled=True)
        return run_rl(load(RLConfig, path, settings), self.runs)[1]

    def _summarise(self, results: list[EvalResult], run: Path, report: Path) -> None:
        steps = [step.values for step in read_metrics(run / FILE_NAME)]
        before, after = results[0], results[-1]
        total_s = sum(self.seconds.values())
        waited_s, trained_s = (sum(step[name] for step in steps) for name in ("waited_s", "trained_s"))
        example = TaskSet(find_family(FAMILY), "held_out", 1).next(1, 2)
        summary = {"seconds": self.seconds, "before": before.success, "after": after.success, "tasks": after.num_tasks}
        write_atomic(run / "summary.json", json.dumps(summary) + "\n")
        stages = ", ".join(f"{name} {passed_s:.0f}" for name, passed_s in self.seconds.items())
        print(f"task       {example.instruction} Tools: {_tools(example)}. The answer: {_answer(example)}")
        print(
            f"network    {self.runs / 'sft' / 'model'}: pre-trained from random weights, fine-tuned on demonstrations"
        )
        print(f"before     {before.success:.1%} of {before.num_tasks} held-out tasks (± {before.margin:.1%})")
        print(f"after      {after.success:.1%} after {len(steps)} steps of CISPO (± {after.margin:.1%})")
        print("agent      examples/task_agent.py, unmodified, by OpenAI's SDK through the gateway")
        print(f"trees      each token computed once stood for {_mean(steps, 'token_ratio'):.1f} in the calls")
        lag, staleness = (max(step[name] for step in steps) for name in ("lag", "staleness"))
        print(f"window     groups at most {lag:.0f} positions out of order, {staleness:.0f} versions old")
        print(f"trainer    {trained_s:.0f} s training, {waited_s:.0f} s waiting for agents")
        print(f"seconds    {stages}: {total_s:.0f} in all")
        print(f"look       open {report}, or `m2forge page {run}`")


def _mean(steps: list[dict[str, float]], name: str) -> float:
    return sum(step[name] for step in steps) / len(steps)


def _tools(task: Task) -> str:
    return ", ".join(tool.name for tool in family_of(task).tools(task))


def _answer(task: Task) -> str:
    return str(family_of(task).verify(task, Submission("")).evidence["expected"])


def main() -> None:
    parser = argparse.ArgumentParser(description="A small network learns to use tools, and which of them to trust.")
    parser.add_argument("--runs", type=Path, help="default: runs/demo, or runs/smoke with --smoke")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="rewards are dealt at random")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--scale", type=float, default=1.0, help="do less of everything: 0.1 is a tenth")
    sizes.add_argument("--smoke", action="store_true", help="one step of each stage, to test an installation")
    args = parser.parse_args()
    if not 0 < args.scale <= 1:
        parser.error(f"--scale {args.scale}: give a number above 0, at most 1")
    try:
        runs = args.runs or Path("runs") / ("smoke" if args.smoke else "demo")
        Demo(runs, args.seed, is_control=args.control, scale=args.scale, is_smoke=args.smoke).run()
    except ConfigError as error:
        sys.exit(f"demo: error: {error}; --runs names another folder")
    except M2ForgeError as error:
        sys.exit(f"demo: error: {error}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted; the same command resumes it")


if __name__ == "__main__":
    main()
