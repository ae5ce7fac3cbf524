"""A newcomer's tour in minutes: a small network learns three skills, and an agent program, untouched, makes it better.

    python examples/demo.py [--runs runs/demo] [--seed 0] [--control] [--scale 1.0 | --smoke]

    text       pages of digits, which the network learns to copy, and a tokenizer
    pretrain   a narrow m2-nano from random weights, with one prediction module
    sft        demonstrations of three families of tasks (`tasks/puzzle.py`) at all levels; most of them are wrong
    rl         the agent program of examples/task_agent.py, by OpenAI's SDK, through the gateway: prefix trees, CISPO,
               windowed FIFO, the module trained along; first tasks without tools, then all
    report     what happened, in one HTML file

    replies    agent      follow links with the tools `look`, which asks the source, or `recall`, which asks a copy that
                          may be out of date; reply with the end
    raises     reasoning  add one to every digit of a list
    joins      general    write the digits of a list with a separator between them

The demonstrator makes each family's mistake at some of the steps: uses the copy, writes a digit as it was, leaves a
separator out. So two of three demonstrations end with a wrong answer, and so do the attempts of a network that
imitates them; the exact shares are printed, and stand in the report. No message says what was wrong: in the rl stage
only the verifier's verdict tells. `--control` hands the rewards of a group to its attempts at random: nothing can be
learnt then.

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
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from m2forge.records import JsonValue, Submission, Task
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import EvalResult
from m2forge.rl.loop import run_rl
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import run_sft
from m2forge.tasks.catalog import family_of, find_family
from m2forge.tasks.demonstration import demonstrations
from m2forge.tasks.puzzle import DIGITS
from m2forge.tasks.task_set import TaskSet
from m2forge.text.format import MINIMAX_M2_SPECIALS, make_format
from m2forge.text.message import message_from_openai, tool_from_openai
from m2forge.text.tokenizer import train_tokenizer

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
BARE, WHOLE, SHARES = "bare.jsonl", "whole.jsonl", "wrong.json"
VOCAB_SIZE, TOKENIZER_TEXTS = 512, 300
SMOKE_SCALE = 0.001
SMOKE_SETTINGS = {
    "group_size": 2,
    "curriculum__batch_groups": 4,
    "pool__window__queue": 8,
    "agent__budget__max_calls": 1,
    "agent__budget__max_tokens": 16,
}
"""RL settings of `--smoke`, keys joined by __."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Lesson:
    """The demonstrations of one family."""

    family: str
    levels: tuple[int, int]
    num_bare: int
    num_whole: int
    """Demonstrations without and with the description of the tools."""
    mistake_rate: float = 0.0
    """How often the demonstrator makes the family's mistake where a step allows it."""

    def tasks(self, num: int, seed: int) -> list[Task]:
        tasks = TaskSet(find_family(self.family), "train", seed)
        return [tasks.next(*self.levels) for _ in range(num)]


@dataclass(frozen=True)
class Pages:
    """Pages of one line of items, written several times."""

    items: Sequence[str]
    num_items: tuple[int, int]
    num_lines: tuple[int, int]
    num_pages: int


@dataclass(frozen=True)
class Course:
    """What a network is taught before RL."""

    pages: Pages
    lessons: tuple[Lesson, ...]
    config: str
    """Name of the files in configs/pretrain and configs/sft."""


COURSE = Course(
    Pages(DIGITS, num_items=(3, 5), num_lines=(3, 5), num_pages=8000),
    (
        Lesson("replies", (1, 3), num_bare=450, num_whole=400, mistake_rate=0.46),
        Lesson("raises", (1, 3), num_bare=0, num_whole=2400, mistake_rate=0.22),
        Lesson("joins", (1, 3), num_bare=0, num_whole=2400, mistake_rate=0.35),
    ),
    "demo.toml",
)


def make_pages(folder: Path, seed: int, pages: Pages, num_pages: int) -> Path:
    rng = random.Random(seed)
    texts = []
    for _ in range(num_pages):
        line = " ".join(rng.choice(pages.items) for _ in range(rng.randint(*pages.num_items)))
        texts.append(f"{line}\n" * rng.randint(*pages.num_lines))
    path = folder / "pages.jsonl"
    write_atomic(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_demonstrations(folder: Path, seed: int, lessons: Sequence[Lesson], scaled: Callable[[int], int]) -> None:
    """With the description of the tools, as the agent sends them, and without; and how many of them are wrong."""
    bare: list[str] = []
    whole: list[str] = []
    shares: dict[str, float] = {}
    for lesson in lessons:
        num_bare = scaled(lesson.num_bare) if lesson.num_bare else 0
        tasks = lesson.tasks(num_bare + scaled(lesson.num_whole), seed)
        made = list(demonstrations(tasks[:num_bare], seed, system="", mistake_rate=lesson.mistake_rate))
        bare += [json.dumps(item | {"tools": []}) for item in made]
        made += demonstrations(tasks[num_bare:], seed, mistake_rate=lesson.mistake_rate)
        whole += [json.dumps(item) for item in made[num_bare:]]
        shares[lesson.family] = sum(is_wrong(*pair) for pair in zip(tasks, made, strict=True)) / len(made)
    for name, lines in ((BARE, bare), (WHOLE, whole)):
        write_atomic(folder / name, "".join(f"{line}\n" for line in lines))
    write_atomic(folder / SHARES, json.dumps(shares) + "\n")


def is_wrong(task: Task, demonstration: Mapping[str, JsonValue]) -> bool:
    """Whether the verifier rejects the answer of a demonstration."""
    messages = demonstration["messages"]
    assert isinstance(messages, list)
    answer = message_from_openai(messages[-1]).content
    return family_of(task).verify(task, Submission(answer)).perf < 1


def tokenizer_texts(seed: int, lessons: Sequence[Lesson]) -> Iterator[Mapping[str, JsonValue]]:
    for lesson in lessons:
        yield from demonstrations(lesson.tasks(TOKENIZER_TEXTS // len(lessons), seed), seed)


def make_tokenizer(folder: Path, conversations: Iterable[Mapping[str, JsonValue]]) -> Path:
    """Trained on conversations as the network will read them."""
    plain = make_format("minimax_m2", train_tokenizer(["a b"], 300, MINIMAX_M2_SPECIALS))
    texts = []
    for item in conversations:
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
        course: Course = COURSE,
    ) -> None:
        """`is_smoke`: replaces `scale`."""
        self.runs, self.seed, self.is_control = runs, seed, is_control
        self._scale, self._settings = (SMOKE_SCALE, SMOKE_SETTINGS) if is_smoke else (scale, {})
        self._course = course
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        agent = self.make_agent()
        results = self._timed("rl", lambda: self._rl(agent))
        name = "control" if self.is_control else "rl"
        report = self.runs / ("control.html" if self.is_control else "report.html")
        self._timed("report", lambda: write_report(self.runs / name, report, [self.note()]))
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
        pages = self._course.pages
        make_demonstrations(data, self.seed, self._course.lessons, self._scaled)
        tokenizer = make_tokenizer(data / "tokenizer", tokenizer_texts(self.seed, self._course.lessons))
        return make_corpus(folder, make_pages(data, self.seed, pages, self._scaled(pages.num_pages)), tokenizer)

    def _pretrain(self, corpus: Path) -> Path:
        path = CONFIGS / "pretrain" / self._course.config
        steps = self._scaled(load(PretrainConfig, path).phases[0].steps)
        settings = set_options(corpus=str(corpus), seed=self.seed, phases__0__steps=steps)
        settings += set_options(phases__0__warmup_steps=min(steps, 30))
        return run_pretrain(load(PretrainConfig, path, settings), self.runs)

    def _sft(self, base: Path, data: Path) -> Path:
        paths = {f"data__sources__{n}__path": str(data / name) for n, name in enumerate((BARE, WHOLE))}
        settings = set_options(model=str(base), seed=self.seed, **paths)
        return run_sft(load(SFTConfig, CONFIGS / "sft" / self._course.config, settings), self.runs)

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

    def _wrong_shares(self) -> dict[str, float]:
        """Share of each family's demonstrations with a wrong answer."""
        shares: dict[str, float] = json.loads((self.runs / "data" / SHARES).read_text())
        return shares

    def note(self) -> str:
        """What the report says of the network that RL began with."""
        shares = ", ".join(f"{share:.0%} of {family}" for family, share in self._wrong_shares().items())
        dealt = " Rewards were dealt at random within each group: the control." if self.is_control else ""
        return f"Before RL the network was fine-tuned on demonstrations; with a wrong answer: {shares}.{dealt}"

    def _summarise(self, results: list[EvalResult], run: Path, report: Path) -> None:
        steps = [step.values for step in read_metrics(run / FILE_NAME)]
        before, after = results[0], results[-1]
        total_s = sum(self.seconds.values())
        waited_s, trained_s = (sum(step[name] for step in steps) for name in ("waited_s", "trained_s"))
        wrong = self._wrong_shares()
        summary = {"seconds": self.seconds, "before": before.success, "after": after.success, "tasks": after.num_tasks}
        summary |= {"before_by_family": before.by_family, "after_by_family": after.by_family, "wrong": wrong}
        write_atomic(run / "summary.json", json.dumps(summary) + "\n")
        stages = ", ".join(f"{name} {passed_s:.0f}" for name, passed_s in self.seconds.items())
        print(
            f"network    {self.runs / 'sft' / 'model'}: pre-trained from random weights, fine-tuned on demonstrations"
        )
        for family in after.by_family:
            example = TaskSet(find_family(family), "held_out", 1).next(1, 1)
            tools = ", ".join(tool.name for tool in family_of(example).tools(example)) or "none"
            print(f"{family:10} {example.instruction} Tools: {tools}. The answer: {_answer(example)}")
            print(
                f"           {wrong[family]:.0%} of its demonstrations are wrong; held-out success "
                f"{before.by_family[family]:.1%} before, {after.by_family[family]:.1%} after"
            )
        print(f"before     {before.success:.1%} of {before.num_tasks} held-out tasks (± {before.margin:.1%})")
        print(f"after      {after.success:.1%} after {len(steps)} steps of CISPO (± {after.margin:.1%})")
        print("agent      examples/task_agent.py, unmodified, by OpenAI's SDK through the gateway")
        print(f"trees      each token computed once stood for {mean(steps, 'token_ratio'):.1f} in the calls")
        lag, staleness = (max(step[name] for step in steps) for name in ("lag", "staleness"))
        print(f"window     groups at most {lag:.0f} positions out of order, {staleness:.0f} versions old")
        print(f"trainer    {trained_s:.0f} s training, {waited_s:.0f} s waiting for agents")
        print(f"seconds    {stages}: {total_s:.0f} in all")
        command = "m2forge" if shutil.which("m2forge") else f"{os.path.relpath(sys.executable)} -m m2forge"
        print(f"look       open {report}, or `{command} page {run}`")


def mean(steps: list[dict[str, float]], name: str) -> float:
    return sum(step[name] for step in steps) / len(steps)


def _answer(task: Task) -> str:
    return str(family_of(task).verify(task, Submission("")).evidence["expected"])


def main() -> None:
    parser = argparse.ArgumentParser(description="A small network learns three skills from verdicts alone.")
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
