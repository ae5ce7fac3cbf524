"""An unmodified CLI agent on one GPU: SmolLM2-135M learns tasks on files through mini-swe-agent, a program per attempt.

`cli_agent_tasks.py` writes the tasks, `cli_agent_model.py` fine-tunes the model on a few demonstrations of those for
training. Then `m2forge rl configs/rl/smollm2-mini-swe.toml` runs as a user would run it; `mini` (2.4.6) is searched
beside this interpreter, then in PATH. A second call with the same folder resumes the run. Measured on held-out tasks at
temperature 1, with the program that training uses: success before the first step and every few steps after it. The
minutes of training are those of all commands after the first evaluation, the start of a resumed command included, less
the time of evaluations, during which training waits.

    python benchmarks/cli_agent.py --folder DIR --prepare           write the tasks and make the model, into DIR
    python benchmarks/cli_agent.py --folder DIR --limit-s 400       the run, or more of it; ends after so many seconds
    python benchmarks/cli_agent.py --quick                          a random network of one layer, one step
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cli_agent_model import make_file_model, make_random_model
from cli_agent_tasks import write_tasks
from forge_split import print_trainer_split
from forge_watch import ROOT, Watched, run
from report import Bar, arguments, finish, print_table

from m2forge.files import append_line
from m2forge.rl.eval import EvalResult

CONFIG, NAME = ROOT / "configs" / "rl" / "smollm2-mini-swe.toml", "smollm2-mini-swe"
LIMIT_S = 600.0
MIN_START, MAX_START, MIN_GAIN, MIN_TASKS = 0.10, 0.40, 2.0, 200
FAMILIES = "curriculum.stages.0.domains.agent.families"
QUICK = (
    "num_steps=1",
    "group_size=2",
    "curriculum.batch_groups=1",
    "eval.num_tasks=4",
    "eval.every_steps=0",
    "agent.max_concurrent=2",
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
    options = make_parser(__doc__).parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as name:
        folder = (options.folder or Path(name)).absolute()
        tasks = write_tasks(folder / "tasks")
        if options.quick:
            model = make_random_model(folder, tasks)
        else:
            model = make_file_model(options.gguf, folder, tasks, options.shown)
        print(f"the model is {model}", flush=True)
        if options.prepare:
            return
        families = ", ".join(f'{{source = "{path}"}}' for path in tasks)
        sets = [f"model={model}", f"{FAMILIES}=[{families}]", *(QUICK if options.quick else ()), *options.set]
        started_s = time.time()
        watched = run(CONFIG, folder, NAME, sets, options.limit_s, lambda start: options.quick or fits(start))
        commands = note_command(folder / "commands.jsonl", started_s)
        bars = report(watched, commands, options)
    finish(bars, options.json)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark that prepares a model and trains it, over several commands if need be."""
    parser = arguments(doc or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, help="where the model and the run go, best in memory; kept")
    parser.add_argument(
        "--gguf", type=Path, nargs="+", default=[], help="the model's file, or its parts in their order"
    )
    parser.add_argument("--shown", type=int, nargs="+", default=[], help="numbers of demonstrations to try")
    parser.add_argument("--prepare", action="store_true", help="only make the model, and what it needs")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="the command is stopped after so long")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run's")
    parser.add_argument("--out", type=Path, help="where the run's small files are copied")
    return parser


def note_command(path: Path, started_s: float) -> list[tuple[float, float]]:
    """Append when this command ran; returns when each did, in seconds since the epoch."""
    append_line(path, json.dumps([started_s, time.time()]))
    return [(first, last) for first, last in map(json.loads, path.read_text().splitlines())]


def training_s(commands: Sequence[tuple[float, float]], evaluations: Sequence[EvalResult]) -> list[float]:
    """Seconds of training before the end of each evaluation; see the module."""
    spent = []
    for index, result in enumerate(evaluations):
        ran_s = sum(max(0.0, min(last, result.at_s) - first) for first, last in commands)
        spent.append(ran_s - sum(done.seconds for done in evaluations[: index + 1]))
    return [seconds - spent[0] for seconds in spent]


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
    gain = last.success / max(start.success, 1 / start.num_tasks)
    return [
        *bars,
        Bar.at_least("held-out tasks", start.num_tasks, MIN_TASKS),
        Bar.at_least("success at the start", start.success, MIN_START),
        Bar.at_most("success at the start", start.success, MAX_START),
        Bar.at_least("last success in 10 minutes of training over that at the start", gain, MIN_GAIN),
    ]


def fits(start: EvalResult) -> bool:
    """Whether there is anything to measure: a run that starts outside this range is skipped."""
    return MIN_START <= start.success <= MAX_START


def print_curve(results: Sequence[EvalResult], spent_s: Sequence[float]) -> None:
    families = list(results[0].by_family)
    print_table(
        f"Success on {results[0].num_tasks} held-out tasks, at temperature 1",
        ("step", "minutes of training", "all", "±", *families, "evaluation took, s"),
        [
            (
                str(result.step),
                f"{seconds / 60:.2f}",
                f"{result.success:.1%}",
                f"{result.margin:.1%}",
                *(f"{result.by_family[family]:.1%}" for family in families),
                f"{result.seconds:.1f}",
            )
            for result, seconds in zip(results, spent_s, strict=True)
        ],
    )


def keep(run_dir: Path, results: Sequence[EvalResult], spent_s: Sequence[float], out: Path) -> None:
    """Files that are small, in one folder."""
    out.mkdir(parents=True, exist_ok=True)
    curve = [asdict(result) | {"training_s": s} for result, s in zip(results, spent_s, strict=True)]
    (out / "cli_agent.json").write_text(json.dumps(curve), encoding="utf-8")
    for path in (run_dir / "metrics.jsonl", run_dir / "config.toml", *(run_dir / "kept").glob("*.json")):
        if path.exists():
            shutil.copy(path, out)
    shutil.make_archive(str(out / "log"), "gztar", run_dir, "log")


if __name__ == "__main__":
    main()
