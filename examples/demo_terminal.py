"""A small network learns to use a shell: 600 task folders, one tool, verdicts from the folders' own tests.

    python -m examples.demo_terminal [--runs runs/demo-terminal] [--seed 0] [--control | --rejection] [--scale 1.0]

    text       task folders of questions on small tables (`table_tasks.py`), demonstrations, pages to copy, a tokenizer
    pretrain   a narrow m2-nano from random weights
    sft        demonstrations; of those where `sort -n`, or `sort` before `uniq`, matters one in three is right
    rl         examples/task_agent.py --shell, by OpenAI's SDK through the gateway; each attempt has a namespace sandbox
               of its folder's image, and the folder's tests decide in a fresh one
    report     what happened, in one HTML file

The 200 held-out questions occur neither in demonstrations nor in RL. `--control` hands the rewards of a group to its
attempts at random. `--rejection` does without RL: the fine-tuned network attempts every training task eight times
(`m2forge pipeline`, the table `distill`), is fine-tuned again on what the tests accepted, and both networks are
evaluated. A stage that was killed goes on where it stopped; one that is complete is not repeated.
"""

import os

# torch's CPU allocator reads this when it is loaded: keep freed memory for a second, for the next training step.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from examples.demo import (
    BARE,
    CONFIGS,
    ROOT,
    WHOLE,
    Course,
    Demo,
    Pages,
    make_corpus,
    make_pages,
    make_tokenizer,
    mean,
    set_options,
)
from examples.table_tasks import ANIMALS, COLOURS, Question, demonstrated_steps, questions, write_folders
from examples.task_agent import SHELL
from m2forge.config import TomlValue, build, load
from m2forge.errors import ConfigError, M2ForgeError
from m2forge.files import write_atomic
from m2forge.observe.metrics import FILE_NAME, read_metrics
from m2forge.pipelines.config import PipelineConfig
from m2forge.pipelines.run import run_pipeline
from m2forge.records import JsonValue
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import EvalResult
from m2forge.rl.loop import run_rl
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import run_sft
from m2forge.tasks.puzzle import DIGITS
from m2forge.tasks.task_set import Split
from m2forge.text.message import Message, ToolCall, message_to_openai
from m2forge.trials.config import TrialEvalConfig
from m2forge.trials.run import TrialsReport, run_trials

NUM_TRAIN, NUM_HELD_OUT = 400, 200
NUM_BARE, NUM_WHOLE = 1500, 1500
"""Demonstrations without and with the description of the tool."""
NUM_TOKENIZER_TEXTS = 300
RIGHT_SHARE = 1 / 3
NUM_DRAWS, NUM_EPOCHS = 8, 4
"""Rejection sampling: attempts at each task, and passes over what was accepted."""
ENGINE: dict[str, TomlValue] = {"num_blocks": 4096, "step_tokens": 1024, "max_running": 32, "max_context": 1024}
DONE = "Done."
COURSE = Course(
    Pages((*DIGITS, *ANIMALS, *COLOURS), num_items=(3, 5), num_lines=(3, 5), num_pages=6000), (), "demo-terminal.toml"
)


def demonstration(question: Question, steps: tuple[str, ...]) -> dict[str, JsonValue]:
    call = ToolCall("shell", {"command": question.command(steps)}, "call_1")
    messages = (
        Message("user", question.instruction() + "\n"),
        Message("assistant", tool_calls=(call,)),
        Message("tool", "", tool_call_id="call_1"),
        Message("assistant", DONE),
    )
    return {"messages": [message_to_openai(message) for message in messages], "tools": [SHELL]}


def demonstrations(asked: Iterable[Question], seed: int) -> Iterator[dict[str, JsonValue]]:
    rng = random.Random(f"{seed}/demonstrations")
    for question in asked:
        yield demonstration(question, demonstrated_steps(question, rng, RIGHT_SHARE))


def make_tasks(
    folders: Path, data: Path, seed: int, scaled: Callable[[int], int] = lambda number: number
) -> list[dict[str, JsonValue]]:
    """Write task folders, and demonstrations of other questions for training; returns the demonstrations."""
    held_out, others = questions(seed, NUM_HELD_OUT)
    asked: list[tuple[Question, Split]] = [(question, "held_out") for question in held_out]
    asked += [(question, "train") for question in itertools.islice(others, scaled(NUM_TRAIN))]
    if not folders.exists():
        write_folders(folders, asked, seed)
    num_bare, num_whole = scaled(NUM_BARE), scaled(NUM_WHOLE)
    made = list(demonstrations(itertools.islice(others, num_bare + num_whole), seed))
    bare = [item | {"tools": []} for item in made[:num_bare]]
    for name, items in ((BARE, bare), (WHOLE, made[num_bare:])):
        write_atomic(data / name, "".join(json.dumps(item) + "\n" for item in items))
    return made


class TerminalDemo(Demo):
    def __init__(self, runs: Path, seed: int, *, is_control: bool = False, scale: float = 1.0) -> None:
        super().__init__(runs, seed, is_control=is_control, scale=scale, course=COURSE)
        self._folders = runs / "folders"

    def _text(self, data: Path) -> Path:
        corpus = self.runs / "pages"
        if corpus.exists():
            return corpus
        made = make_tasks(self.runs / "folders", data, self.seed, self._scaled)
        tokenizer = make_tokenizer(data / "tokenizer", made[-NUM_TOKENIZER_TEXTS:])
        pages = COURSE.pages
        return make_corpus(corpus, make_pages(data, self.seed, pages, self._scaled(pages.num_pages)), tokenizer)

    def _rl(self, agent: Path) -> list[EvalResult]:
        path = CONFIGS / "rl" / "demo-terminal.toml"
        config = load(RLConfig, path)
        command = [sys.executable, str(ROOT / "examples" / "task_agent.py"), "--shell"]
        num_steps = self._scaled(config.num_steps)
        settings = set_options(model=str(agent), agent__command=command, curriculum__seed=self.seed)
        settings += set_options(num_steps=num_steps, warmup_steps=min(config.warmup_steps, num_steps))
        settings += set_options(eval__num_tasks=self._scaled(config.eval.num_tasks))
        families = f'[{{source = "folders:{self._folders}"}}]'
        settings.append(f"curriculum.stages.0.domains.agent.families={families}")
        if self.is_control:
            settings += set_options(name="control", reward__shuffled=True)
        return run_rl(load(RLConfig, path, settings), self.runs)[1]

    def reject(self) -> None:
        """Rejection sampling: the network's own attempts that the tests accepted become demonstrations."""
        agent = self.make_agent()
        before = self._timed("before", lambda: self._trials(agent, "before"))
        corpus = self._timed("sample", lambda: self._sample(agent))
        again = self._timed("sft again", lambda: self._tune(agent, corpus))
        after = self._timed("after", lambda: self._trials(again, "after"))
        num_lines = len(corpus.read_text().splitlines())
        summary = {"seconds": self.seconds, "before": before.all.solved, "after": after.all.solved}
        write_atomic(self.runs / "rejection.json", json.dumps(summary | {"accepted": num_lines}) + "\n")
        for name, rate in (("before", before.all), ("after", after.all)):
            print(f"{name:10} {rate.solved:.1%} of {rate.num_tasks} held-out tasks (± {rate.solved_margin:.1%})")
        num_tasks = self._scaled(NUM_TRAIN)
        print(f"sampled    {NUM_DRAWS} attempts at each of {num_tasks} tasks, {num_lines} accepted and distinct")
        print(f"seconds    {', '.join(f'{name} {passed_s:.0f}' for name, passed_s in self.seconds.items())}")

    def _trials(self, model: Path, name: str) -> TrialsReport:
        agent: dict[str, TomlValue] = {
            "kind": "worker",
            "command": [sys.executable, str(ROOT / "examples" / "task_agent.py"), "--shell"],
            "budget": {"max_calls": 3},
        }
        trials: dict[str, TomlValue] = {
            "tasks": [f"folders:{self._folders}"],
            "num_tasks": self._scaled(NUM_HELD_OUT),
            "num_trials": 1,
            "agent": agent,
            "verify": {"base_image": "host"},
            "engine": {"num_threads": 1, "rollout": dict(ENGINE)},
        }
        data: dict[str, TomlValue] = {"model": str(model), "output": str(self.runs / name), "trials": trials}
        return run_trials(build(TrialEvalConfig, data))

    def _sample(self, model: Path) -> Path:
        serve: list[TomlValue] = [f"rollout.{key}={value}" for key, value in ENGINE.items()]
        policy: dict[str, TomlValue] = {
            "folder": str(model),
            "model": "policy",
            "temperature": 1.0,
            "max_tokens": 96,
            "serve": serve,
        }
        distill: dict[str, TomlValue] = {
            "folders": str(self._folders),
            "teachers": ["policy"],
            "num_draws": NUM_DRAWS,
            "max_turns": 3,
            "max_per_task": 1,
            "base_image": "host",
        }
        shared: dict[str, TomlValue] = {"name": "distill", "seed": self.seed, "workers": 16}
        data: dict[str, TomlValue] = {**shared, "models": {"policy": policy}, "distill": distill}
        return run_pipeline(build(PipelineConfig, data), self.runs) / "trajectories.jsonl"

    def _tune(self, model: Path, corpus: Path) -> Path:
        settings = set_options(name="sft-again", model=str(model), seed=self.seed, lr__start=1e-3)
        settings.append(f'data.sources=[{{path = "{corpus}", weight = {NUM_EPOCHS}}}]')
        return run_sft(load(SFTConfig, CONFIGS / "sft" / COURSE.config, settings), self.runs)

    def note(self) -> str:
        dealt = " Rewards were dealt at random within each group: the control." if self.is_control else ""
        return (
            "Before RL the network was fine-tuned on demonstrations; where `sort -n` or sorting before `uniq` matters, "
            f"{RIGHT_SHARE:.0%} of them are right.{dealt}"
        )

    def _summarise(self, results: list[EvalResult], run: Path, report: Path) -> None:
        steps = [step.values for step in read_metrics(run / FILE_NAME)]
        before, after = results[0], results[-1]
        summary = {"seconds": self.seconds, "before": before.success, "after": after.success, "tasks": after.num_tasks}
        write_atomic(run / "summary.json", json.dumps(summary) + "\n")
        waited_s, trained_s = (sum(step[name] for step in steps) for name in ("waited_s", "trained_s"))
        stages = ", ".join(f"{name} {passed_s:.0f}" for name, passed_s in self.seconds.items())
        print(f"tasks      {self._folders}: look with `m2forge tasks show {self._folders}/table-000`")
        print(f"before     {before.success:.1%} of {before.num_tasks} held-out tasks (± {before.margin:.1%})")
        print(f"after      {after.success:.1%} after {len(steps)} steps of CISPO (± {after.margin:.1%})")
        print("agent      examples/task_agent.py --shell; each attempt in a namespace sandbox of its own")
        print(f"trees      each token computed once stood for {mean(steps, 'token_ratio'):.1f} in the calls")
        print(f"trainer    {trained_s:.0f} s training, {waited_s:.0f} s waiting for agents")
        print(f"seconds    {stages}: {sum(self.seconds.values()):.0f} in all")
        print(f"look       open {report}, or `m2forge page {run}`")


def main() -> None:
    parser = argparse.ArgumentParser(description="A small network learns to use a shell from verdicts alone.")
    parser.add_argument("--runs", type=Path, default=Path("runs/demo-terminal"))
    parser.add_argument("--seed", type=int, default=0)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--control", action="store_true", help="rewards are dealt at random")
    ways.add_argument("--rejection", action="store_true", help="rejection sampling instead of RL")
    parser.add_argument("--scale", type=float, default=1.0, help="do less of everything: 0.1 is a tenth")
    args = parser.parse_args()
    if not 0 < args.scale <= 1:
        parser.error(f"--scale {args.scale}: give a number above 0, at most 1")
    try:
        demo = TerminalDemo(args.runs, args.seed, is_control=args.control, scale=args.scale)
        demo.reject() if args.rejection else demo.run()
    except ConfigError as error:
        sys.exit(f"demo-terminal: error: {error}; --runs names another folder")
    except M2ForgeError as error:
        sys.exit(f"demo-terminal: error: {error}")
    except KeyboardInterrupt:
        sys.exit("demo-terminal: interrupted; the same command resumes it")


if __name__ == "__main__":
    main()
