"""The whole ring on one GPU: SmolLM2-135M learns a family of reasoning-gym's and one with a tool, through the gateway.

The model is imported from a GGUF file and fine-tuned on a few demonstrations (`forge_model.py` says why). Then
`m2forge rl configs/rl/smollm2-gym.toml` runs as a user would run it: sampler and trainer on the same device, the
gateway, and processes of examples/task_agent.py, which use OpenAI's SDK. Measured on held-out tasks, whose instructions
training never gives, at temperature 1 as in training: success before the first step and every few steps after it, by
the clock that began with the command. `forge_split.py` says what counts as work of the device.

    python benchmarks/forge.py --folder DIR --prepare      import and fine-tune, into DIR
    python benchmarks/forge.py --folder DIR [--json]       the run, which makes the model first if it is not there
    python benchmarks/forge.py --folder DIR --rate         attempts per second, with and without agent hosts
    python benchmarks/forge.py --quick                     a random network of one layer, three steps: that it runs
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from forge_model import SIZES, Shown, make_model, make_random
from forge_rate import rates
from forge_split import device_split, print_device_split, print_trainer_split
from forge_watch import ROOT, Watched, run
from report import Bar, arguments, finish, print_table

from m2forge.rl.eval import EvalResult

NAME = "smollm2-gym"
CONFIG = ROOT / "configs" / "rl" / f"{NAME}.toml"
AGENT = ROOT / "examples" / "task_agent.py"
FAMILIES = (Shown("reasoning-gym:family_relationships", (0, 2), (0, 2), 5), Shown("chain", (1, 4), (1, 2), 2))
LIMIT_S = 600.0
MIN_START, MAX_START, MIN_GAIN, MAX_IDLE, MIN_TASKS = 0.10, 0.45, 2.0, 0.15, 400
QUICK = (
    "num_steps=3",
    "group_size=2",
    "curriculum.batch_groups=2",
    "eval.num_tasks=4",
    "eval.every_steps=0",
    "agent.num_workers=1",
    "agent.budget.max_calls=2",
    "agent.budget.max_tokens=32",
    "engine.num_threads=1",
    "engine.dtype=float32",
    "engine.rollout.num_blocks=256",
    "engine.rollout.step_tokens=512",
    "engine.rollout.max_running=16",
    "engine.rollout.max_context=512",
    "pool.window.queue=8",
    # A random policy solves nothing, and groups are trained as they are.
    "pool.window.no_signal=train",
    "train.machine.num_threads=1",
)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        sizes = options.steps or SIZES
        model = make_random(folder, FAMILIES) if options.quick else make_model(options.gguf, folder, FAMILIES, sizes)
        print(f"the model is {model}", flush=True)
        if options.prepare:
            return
        sets = [f"model={model}", f"agent.command={json.dumps([sys.executable, str(AGENT)])}"]
        sets += [*(QUICK if options.quick else ()), *options.set]
        if options.rate:
            bars = rates(folder, sets, options.limit_s)
        else:
            watched = run(CONFIG, folder, NAME, sets, options.limit_s, lambda start: options.quick or fits(start))
            bars = report(watched, options)
    finish(bars, options.json)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, help="where the model and the run go, best in memory; kept")
    parser.add_argument(
        "--gguf", type=Path, nargs="+", default=[], help="the model's file, or its parts in their order"
    )
    parser.add_argument("--steps", type=int, nargs="+", help="steps of fine-tuning to try, instead of all")
    parser.add_argument("--prepare", action="store_true", help="only make the model")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="the run is stopped after so long")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run's")
    parser.add_argument("--rate", action="store_true", help="attempts per second alone, with and without agent hosts")
    parser.add_argument("--out", type=Path, help="where the run's small files are copied")
    return parser.parse_args()


def report(watched: Watched, options: argparse.Namespace) -> list[Bar]:
    if options.out is not None:
        keep(watched, options.out)
    if not watched.evaluations:
        raise SystemExit(f"the run ended before its first evaluation; see {watched.run_dir / 'log'}")
    print_curve(watched)
    print_trainer_split(watched.run_dir)
    split = device_split(watched)
    if split is not None:
        print_device_split(split)
    results = [result for _, result in watched.evaluations]
    broken = sum(result.num_broken for result in results) / sum(result.num_tasks for result in results)
    bars = [Bar.at_most("held-out attempts that broke", broken, 0.0)]
    if options.quick:
        return bars
    start = watched.evaluations[0][1]
    last = [result for at_s, result in watched.evaluations if at_s - watched.started_s <= LIMIT_S][-1]
    gain = last.success / max(start.success, 1 / start.num_tasks)
    bars += [
        Bar.at_least("held-out tasks", start.num_tasks, MIN_TASKS),
        Bar.at_least("success at the start", start.success, MIN_START),
        Bar.at_most("success at the start", start.success, MAX_START),
        Bar.at_least("last success in 10 minutes over that at the start", gain, MIN_GAIN),
    ]
    if split is not None:
        bars.append(Bar.at_most("share of time with neither rollout nor training", split.idle_share, MAX_IDLE))
    return bars


def fits(start: EvalResult) -> bool:
    """Whether there is anything to measure: a run that starts outside this range is skipped."""
    return MIN_START <= start.success <= MAX_START


def print_curve(watched: Watched) -> None:
    families = sorted(watched.evaluations[0][1].by_family)
    print_table(
        f"Success on {watched.evaluations[0][1].num_tasks} held-out tasks, at temperature 1",
        ("step", "minutes", "all", "±", *families, "evaluation took, s"),
        [
            (
                str(result.step),
                f"{(at_s - watched.started_s) / 60:.2f}",
                f"{result.success:.1%}",
                f"{result.margin:.1%}",
                *(f"{result.by_family[family]:.1%}" for family in families),
                f"{result.seconds:.1f}",
            )
            for at_s, result in watched.evaluations
        ],
    )


def keep(watched: Watched, out: Path) -> None:
    """Files that are small, in one folder."""
    out.mkdir(parents=True, exist_ok=True)
    curve = [asdict(result) | {"at_s": at_s - watched.started_s} for at_s, result in watched.evaluations]
    split = device_split(watched)
    told = {"curve": curve, "device": None if split is None else asdict(split), "utilisation": watched.utilisation}
    (out / "forge.json").write_text(json.dumps(told), encoding="utf-8")
    for path in (watched.run_dir / "metrics.jsonl", watched.run_dir / "config.toml"):
        if path.exists():
            shutil.copy(path, out)
    shutil.make_archive(str(out / "log"), "gztar", watched.run_dir, "log")
    shutil.make_archive(str(out / "busy"), "gztar", watched.run_dir, "busy")


if __name__ == "__main__":
    main()
