"""SmolLM2-135M learns to repair bugs on one GPU, with the tools read, edit and test, in functions of real packages.

`examples/bug_tasks.py` writes tasks and demonstrations, 400 tasks of other packages held out. The imported model is
fine-tuned on demonstrations of training tasks, more of them each time, until it solves `ENOUGH` of other training tasks
(`prepare`). Then `m2forge rl configs/rl/smollm2-bugs.toml` runs as a user would run it; a second call with the same
folder resumes the run. Measured on the held-out tasks at temperature 1: success before the first step and every few
steps after it. The minutes of training are those of `cli_agent.py`.

    python benchmarks/bug_fix.py --folder DIR --tasks TASKS --prepare       make the model, into DIR
    python benchmarks/bug_fix.py --folder DIR --tasks TASKS --limit-s 400   the run, or more of it
    python benchmarks/bug_fix.py --quick                                    a random network of one layer, one step
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli_agent import keep, make_parser, note_command, print_curve, training_s
from forge_model import make_base, random_network
from forge_probe import Attempt, Probe
from forge_split import print_trainer_split
from forge_watch import ROOT, Watched, run
from report import Bar, finish

sys.path.insert(0, str(ROOT))  # where examples/ lies

from examples.bug_agent import CODE, MAX_TURNS, TESTS, TOOLS, edit, first_messages, number_lines
from examples.bug_tasks import Lab, test_output, write_tasks
from m2forge.config import load
from m2forge.records import JsonValue, Task
from m2forge.rl.eval import EvalResult
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import run_sft
from m2forge.tasks.task_file import JsonlFamily
from m2forge.text.message import Message, Tool, tool_from_openai
from m2forge.text.parser import Completion

CONFIG, NAME = ROOT / "configs" / "rl" / "smollm2-bugs.toml", "smollm2-bugs"
SFT_CONFIG = ROOT / "configs" / "sft" / "smollm2-bugs.toml"
LIMIT_S = 600.0
MIN_START, MAX_START, MIN_GAIN, MIN_TASKS = 0.10, 0.40, 0.15, 400
SIZES = (200, 400, 800, 1500, 3000)
"""Numbers of demonstrations that are tried, each from the model as it comes."""
ENOUGH, NUM_PROBED, NUM_SANDBOXES = 0.18, 192, 12
FAMILIES = "curriculum.stages.0.domains.coding.families"
QUICK_PACKAGES = (("inflection", "0.5.1"), ("haversine", "2.9.0"), ("stringcase", "1.2.0"))
QUICK = (
    "num_steps=1",
    "group_size=2",
    "curriculum.batch_groups=1",
    "eval.num_tasks=4",
    "eval.every_steps=0",
    "agent.num_workers=1",
    "agent.jobs_per_worker=4",
    "engine.num_threads=1",
    "engine.dtype=float32",
    "engine.rollout.num_blocks=256",
    "engine.rollout.step_tokens=512",
    "engine.rollout.max_running=8",
    "pool.window.queue=2",
    # A random policy solves nothing, and groups are trained as they are.
    "pool.window.no_signal=train",
    "train.machine.num_threads=1",
)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = (options.folder or Path(name)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        tasks = (options.tasks or folder / "tasks").absolute()
        if not tasks.is_dir():
            write_tasks(tasks, QUICK_PACKAGES, seed=0, num_held_out=8)
        model = make_random(folder, tasks) if options.quick else prepare(options.gguf, folder, tasks, options.shown)
        print(f"the model is {model}", flush=True)
        if options.prepare:
            return
        sets = [f"model={model}", f'agent.command=["{sys.executable}", "-m", "examples.bug_agent"]']
        sets += [f'{FAMILIES}=[{{source = "{tasks / "bugs.jsonl"}"}}]']
        sets += [*(QUICK if options.quick else ()), *options.set]
        started_s = time.time()
        watched = run(CONFIG, folder, NAME, sets, options.limit_s, lambda start: options.quick or fits(start))
        commands = note_command(folder / "commands.jsonl", started_s)
        bars = report(watched, commands, options)
    finish(bars, options.json)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--tasks", type=Path, help="what examples/bug_tasks.py wrote")
    return parser.parse_args()


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass
class RepairAttempt(Attempt):
    """As `examples/bug_agent.py` works, in this process; tests wait for `settle`."""

    given: str = field(kw_only=True)
    examples: list[tuple[str, str]] = field(kw_only=True)
    source: str = field(kw_only=True)
    waiting: list[int] = field(default_factory=list)
    """Messages whose content is the output of the tests."""

    @property
    def tools(self) -> Sequence[Tool]:
        return [tool_from_openai(tool) for tool in TOOLS]

    def take(self, completion: Completion) -> None:
        message = completion.message()
        self.messages.append(message)
        self.is_over = not message.tool_calls
        for call in message.tool_calls:
            content = f"error: no tool {call.name!r}; use read, edit or test"
            if call.name == "read":
                content = number_lines(self.given)
            elif call.name == "edit":
                changed = edit(self.given, call.arguments.get("line"), call.arguments.get("text"))
                content = "edited" if changed else "error: expected the number of a line, and its text"
                self.source = changed or self.source
            elif call.name == "test":
                self.waiting.append(len(self.messages))
            self.messages.append(Message("tool", content, tool_call_id=call.id))

    def settle(self, results: JsonValue) -> None:
        output = test_output(self.examples, results)
        for index in self.waiting:
            self.messages[index] = Message("tool", output, tool_call_id=self.messages[index].tool_call_id)
        if self.waiting:
            self.is_solved = output.startswith("passed")
            self.is_over = self.is_over or self.is_solved
        self.waiting = []


def prepare(gguf: Sequence[Path], folder: Path, tasks: Path, sizes: Sequence[int]) -> Path:
    """The model that solves enough, in `folder/model`; one that is there is taken. One size is taken as it is."""
    dest = folder / "model"
    if dest.is_dir():
        return dest
    base = make_base(gguf, folder)
    lines = (tasks / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    train = [task for task in JsonlFamily(tasks / "bugs.jsonl").tasks if task.metadata["split"] == "train"]
    tried = sizes or SIZES
    probe = Probe(base) if len(tried) > 1 else None
    for num in tried:
        part = folder / f"sft-{num}"
        part.mkdir(parents=True, exist_ok=True)
        (part / "demonstrations.jsonl").write_text("".join(lines[:num]), encoding="utf-8")
        settings = [f"model={base}", f'data.sources=[{{path = "{part / "demonstrations.jsonl"}"}}]']
        started_s = time.monotonic()
        made = run_sft(load(SFTConfig, SFT_CONFIG, settings), part)
        trained_s = time.monotonic() - started_s
        if probe is None:
            break
        probe.load(made, num)
        probed = other_tasks(train, lines[:num])
        success = share_solved(probe, probed)
        spent = f"SFT {trained_s:.0f} s, probe {time.monotonic() - started_s - trained_s:.0f} s"
        print(f"{num} demonstrations: {success:.1%} of {len(probed)} training tasks; {spent}", flush=True)
        if success >= ENOUGH:
            break
    made.rename(dest)
    return dest


def other_tasks(tasks: Sequence[Task], shown: Sequence[str]) -> list[Task]:
    """Tasks on functions that occur in no demonstration; a sample."""
    instructions = {json.loads(line)["messages"][1]["content"] for line in shown}
    others = [task for task in tasks if task.instruction not in instructions]
    return random.Random(0).sample(others, min(len(others), NUM_PROBED))


def share_solved(probe: Probe, tasks: Sequence[Task]) -> float:
    """The share whose shown tests pass at the end."""
    attempts, lab = [_attempt(task) for task in tasks], Lab(NUM_SANDBOXES)
    for _ in range(MAX_TURNS):
        pending = [attempt for attempt in attempts if not attempt.is_over]
        for attempt, completion in zip(pending, probe.complete(pending), strict=True):
            attempt.take(completion)
        results = lab.run([{"source": each.source, "calls": [call for call, _ in each.examples]} for each in pending])
        for attempt, result in zip(pending, results, strict=True):
            attempt.settle(result)
    return sum(attempt.is_solved for attempt in attempts) / len(attempts)


def _attempt(task: Task) -> RepairAttempt:
    files = task.metadata["files"]
    assert isinstance(files, dict)
    messages = [Message(each["role"], each["content"]) for each in first_messages(task.instruction)]
    examples = [(call, result) for call, result in json.loads(str(files[TESTS]))]
    source = str(files[CODE])
    return RepairAttempt(task, messages, given=source, examples=examples, source=source)


def make_random(folder: Path, tasks: Path) -> Path:
    """A network that has learnt nothing, with a tokenizer of the tasks."""
    return random_network(folder, [str(task.metadata["files"]) for task in JsonlFamily(tasks / "bugs.jsonl").tasks])


# -- the figures ------------------------------------------------------------------------------------------------------


def fits(start: EvalResult) -> bool:
    """Whether there is anything to measure: a run that starts outside this range is skipped."""
    return MIN_START <= start.success <= MAX_START


def report(watched: Watched, commands: Sequence[tuple[float, float]], options: argparse.Namespace) -> list[Bar]:
    results = [result for _, result in watched.evaluations]
    if not results:
        raise SystemExit(f"the run ended before its first evaluation; see {watched.run_dir / 'log'}")
    spent_s = training_s(commands, results)
    if options.out is not None:
        keep(watched.run_dir, results, spent_s, options.out)
    print_curve(results, spent_s)
    print_trainer_split(watched.run_dir)
    broken = sum(result.num_broken for result in results) / sum(result.num_tasks for result in results)
    bars = [Bar.at_most("held-out attempts that broke", broken, 0.0)]
    if options.quick:
        return bars
    start = results[0]
    last = [result for result, seconds in zip(results, spent_s, strict=True) if seconds <= LIMIT_S][-1]
    return [
        *bars,
        Bar.at_least("held-out tasks", start.num_tasks, MIN_TASKS),
        Bar.at_least("success at the start", start.success, MIN_START),
        Bar.at_most("success at the start", start.success, MAX_START),
        Bar.at_least("gain in 10 minutes of training", last.success - start.success, MIN_GAIN),
    ]


if __name__ == "__main__":
    main()
