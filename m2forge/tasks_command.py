"""`m2forge tasks ACTION`: checks sources of tasks, and lints, shows, writes and converts task folders.

One function for each action; it imports what it needs when it runs.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from m2forge.errors import ConfigError, DataError, NotFoundError, suggest

if TYPE_CHECKING:
    from m2forge.tasks.config import VerifyConfig


def _check(args: argparse.Namespace, config: "VerifyConfig") -> None:
    from rich.console import Console

    from m2forge.tasks.check import check_source, print_report

    (source,) = args.names
    report = check_source(source, config, args.num or 20, args.seed or 0)
    if args.json:
        print(json.dumps(report.to_dict()))
    else:
        print_report(report, Console())
    if report.problems:
        raise DataError(f"{source}: {len(report.problems)} problems; repair the tasks, or their verifiers")


def _lint(args: argparse.Namespace, config: "VerifyConfig") -> None:
    from rich.console import Console

    from m2forge.tasks.folders.folder import find_folders
    from m2forge.tasks.folders.lint import Rule, lint
    from m2forge.tasks.folders.view import print_findings

    for code in args.ignore:
        if code not in list(Rule):
            raise ConfigError(f"--ignore {code}: no such rule; {suggest(code, map(str, Rule))}")
    paths = [path for name in args.names for path in find_folders(Path(name))]
    if not paths:
        raise NotFoundError(f"{', '.join(args.names)}: no task folder; each needs task.toml and instruction.md")
    findings = [finding for path in paths for finding in lint(path, args.ignore)]
    if args.json:
        print(json.dumps([finding.to_dict() for finding in findings]))
    else:
        print_findings(paths, findings, Console())
    if findings:
        raise DataError(f"{len(findings)} findings; repair the folders, or leave rules out by --ignore CODE")


def _show(args: argparse.Namespace, config: "VerifyConfig") -> None:
    from rich.console import Console

    from m2forge.tasks.folders.folder import read_folder, read_folders
    from m2forge.tasks.folders.view import print_folder, print_folders, to_dict

    path = Path(args.names[0])
    folders, rejected = read_folders(path)
    if (folders and folders[0].path == path) or (rejected and rejected[0].path == path):
        folder = read_folder(path)
        if args.json:
            print(json.dumps(to_dict(folder)))
        else:
            print_folder(folder, Console())
        return
    if args.json:
        print(json.dumps([to_dict(folder) for folder in folders]))
    else:
        print_folders(folders, rejected, Console())
    if rejected:
        raise DataError(f"{len(rejected)} of {len(folders) + len(rejected)} folders cannot be used")


def _export(args: argparse.Namespace, config: "VerifyConfig") -> None:
    import asyncio

    from m2forge.tasks.folders.export import export

    source, dest = args.names
    exported = asyncio.run(export(source, Path(dest), config, args.num or 20, args.level, args.seed or 0))
    num_held_out = sum(item.split == "held_out" for item in exported)
    num_solved = sum(item.has_solution for item in exported)
    print(f"wrote {dest}: {len(exported)} folders, {num_held_out} held out, {num_solved} with a solution")


def _import(args: argparse.Namespace, config: "VerifyConfig") -> None:
    import sys

    from m2forge.tasks.folders.swe_bench import import_records

    path, dest = args.names
    imported = import_records(Path(path), Path(dest))
    for problem in imported.rejected:
        print(f"rejected: {problem}", file=sys.stderr)
    print(f"wrote {dest}: {len(imported.names)} folders; {len(imported.rejected)} records are rejected")


def _records(args: argparse.Namespace, config: "VerifyConfig") -> None:
    import sys

    from m2forge.tasks.folders.swe_bench import export_records

    path, dest = args.names
    num, rejected = export_records(Path(path), Path(dest))
    for item in rejected:
        print(f"rejected: {item.problem}", file=sys.stderr)
    print(f"wrote {dest}: {num} records; {len(rejected)} folders are rejected")


def _run(args: argparse.Namespace, config: "VerifyConfig") -> None:
    import asyncio
    import os

    from rich.console import Console

    from m2forge.agents.preset import preset_names
    from m2forge.config import build
    from m2forge.sandbox.config import SandboxConfig
    from m2forge.tasks.folders.trial import NOP, ORACLE, print_trials, run_trials

    for agent in args.agent:
        if agent in preset_names():
            raise ConfigError(
                f"--agent {agent}: an agent with a model runs in trials: `m2forge eval` with trials.agent.preset = "
                f'"{agent}" and trials.tasks = ["folders:{args.names[0]}"]; give {ORACLE}, {NOP} or a shell command'
            )
    sandbox = build(SandboxConfig, {"backend": "auto"}, args.set, origin="tasks run")
    trials, rejected = asyncio.run(
        run_trials(
            [Path(name) for name in args.names],
            args.agent or (ORACLE, NOP),
            sandbox,
            base_image=args.image,
            num_trials=args.trials or 1,
            num_concurrent=os.cpu_count() or 1,
        )
    )
    if args.json:
        print(json.dumps([trial.to_dict() for trial in trials]))
    else:
        print_trials(trials, rejected, Console())
    wrong = {trial.folder for trial in trials if trial.is_wrong} | {item.path for item in rejected}
    num = len({trial.folder for trial in trials} | wrong)
    if wrong:
        raise DataError(
            f"{len(wrong)} of {num} folders are not as they must be: perf 1 by {ORACLE} and 0 by {NOP}, without infra "
            "failures; repair the folders, or their images"
        )


ACTIONS: Mapping[str, Callable[[argparse.Namespace, "VerifyConfig"], None]] = {
    "check": _check,
    "lint": _lint,
    "show": _show,
    "export": _export,
    "import": _import,
    "records": _records,
    "run": _run,
}


OPTIONS: Mapping[str, tuple[str, ...]] = {
    "check": ("num", "seed", "set", "json"),
    "lint": ("ignore", "json"),
    "show": ("json",),
    "export": ("num", "level", "seed", "set"),
    "import": (),
    "records": (),
    "run": ("agent", "image", "trials", "set", "json"),
}
"""The options that each action has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=tuple(ACTIONS),
        help="check SOURCE: draw tasks, verify their references, time it; lint PATH…: what is wrong with task folders; "
        "show PATH: a task folder, or a folder of them; export SOURCE DIR: write tasks as folders; import FILE.jsonl "
        "DIR: write records of SWE-bench as folders; records PATH FILE.jsonl: the reverse; run PATH…: "
        "run solution, nothing or a command in sandboxes, and verify",
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="SOURCE",
        help="FILE.jsonl, FILE.py:NAME, PACKAGE.MODULE:NAME, reasoning-gym:NAME, verifiers:ENV, folders:PATH, a "
        "family's name, or the paths of the action",
    )
    parser.add_argument(
        "--num", "--count", type=int, metavar="N", help="tasks of each level and split, or to export (default: 20)"
    )
    parser.add_argument("--level", type=int, metavar="L", help="export: tasks of this level alone (default: all)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the drawn tasks (default: 0)")
    parser.add_argument("--ignore", action="append", default=[], metavar="CODE", help="lint: leave a rule out")
    parser.add_argument(
        "--agent",
        action="append",
        default=[],
        metavar="AGENT",
        help="run: oracle, nop, or a shell command that gets the instruction as its input (default: oracle and nop); "
        "agents with a model run in trials of `m2forge eval`",
    )
    parser.add_argument("--image", metavar="NAME", help="run: the image that stands for one that is not in the store")
    parser.add_argument("--trials", type=int, metavar="K", help="run: trials of each agent at each folder (default: 1)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of `verify`; run: of `sandbox`"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from m2forge.config import build
    from m2forge.tasks.config import VerifyConfig

    num_names = {"check": 1, "show": 1, "export": 2, "import": 2, "records": 2}.get(args.action, len(args.names))
    if len(args.names) != num_names:
        raise ConfigError(
            f"tasks {args.action}: expected {num_names} arguments, received {len(args.names)}; see --help"
        )
    for option in ("num", "level", "seed", "ignore", "agent", "image", "trials", "set", "json"):
        if getattr(args, option) not in (None, [], False) and option not in OPTIONS[args.action]:
            raise ConfigError(f"tasks {args.action}: --{option} belongs to another action; leave it out")
    if args.num is not None and args.num < 1:
        raise ConfigError(f"--num {args.num}: expected 1 or more")
    if args.trials is not None and args.trials < 1:
        raise ConfigError(f"--trials {args.trials}: expected 1 or more")
    config = build(VerifyConfig, {}, [] if args.action == "run" else args.set, origin=f"tasks {args.action}")
    ACTIONS[args.action](args, config)
