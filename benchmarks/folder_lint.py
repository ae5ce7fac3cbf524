"""Folders of both pipelines under Harbor's own lint, all of its rules, and ours: how many, and how many findings.

    terminal    the tasks of the labelled sample, each with every text of its instruction from no hint to all
    swe         two pairs of releases, and injected bugs; or, with --swe, those of earlier runs

    python benchmarks/folder_lint.py --harbor build/harbor/bin/harbor [--bugs NUM] [--swe RUN...] [--runs DIR] [--quick]
        [--json]

`make test-harbor` installs Harbor there. Sdists and wheels are downloaded on first use. --quick: one question of four,
and five bugs. --runs: the runs stay there, and the same command resumes them.
"""

import json
import os
import sqlite3
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from report import Bar, arguments, finish, print_table
from swe import RELEASES
from terminal import QUICK_EVERY, SAMPLE, chosen_rows, labels

from m2forge.pipelines.config import PipelineConfig
from m2forge.pipelines.run import STORE_FILE, run_pipeline
from m2forge.pipelines.stage import Item
from m2forge.pipelines.terminal.task_folder import folder_name, instructions, task_files
from m2forge.tasks.folders.folder import write_folder
from m2forge.tasks.folders.lint import lint

PAIRS = ("toolz 1.1.0 1.2.0", "iniconfig 2.3.0 2.3.1")
NUM_BUGS, NUM_FOLDERS = 25, 300
"""Bugs of each release; folders of both together."""


def swe_folders(runs: Path, quick: bool, num_bugs: int) -> list[Path]:
    table = {
        "sdists": () if quick else PAIRS,
        "injected": RELEASES[:1] if quick else RELEASES,
        "num_bugs": 5 if quick else num_bugs,
    }
    run_dir = run_pipeline(PipelineConfig.model_validate({"name": "swe", "workers": 2, "swe": table}), runs)
    return sorted((run_dir / "tasks").iterdir())


def earlier_folders(runs: Sequence[Path]) -> list[Path]:
    """The folders of runs of the pipeline `swe`, a task once."""
    found = {path.name: path.absolute() for run in runs for path in sorted((run / "tasks").iterdir())}
    return list(found.values())


def terminal_folders(runs: Path, quick: bool) -> list[Path]:
    """The variants of every accepted question; those of one text once."""
    posts = SAMPLE / "Posts.xml"
    if quick:
        posts = runs / "Posts.xml"
        posts.write_text(chosen_rows(set(sorted(labels(), key=int)[::QUICK_EVERY])))
    table = {"posts": str(posts)}
    run_dir = run_pipeline(PipelineConfig.model_validate({"name": "posts", "workers": 2, "terminal": table}), runs)
    with closing(sqlite3.connect(run_dir / STORE_FILE)) as store:
        rows = store.execute("SELECT id, data FROM item WHERE stage = (SELECT MAX(stage) FROM item)").fetchall()
    folders = []
    for id, data in rows:
        item = Item(id, json.loads(data))
        for hints, text in enumerate(texts := instructions(item)):
            if text not in texts[:hints]:
                folders.append(runs / "variants" / f"{folder_name(item)}-{hints}")
                if not folders[-1].exists():
                    write_folder(folders[-1], task_files(item.adding(instruction=text, hints=hints)))
    return folders


def harbor_findings(harbor: Path, folders: Sequence[Path]) -> list[str]:
    command = [str(harbor), "lint", "--select", "ALL", "--json", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HARBOR_TELEMETRY": "0"})
    if done.returncode not in (0, 1):
        raise SystemExit(f"{harbor} lint: {done.stderr[-500:]}")
    return [f"{one['path']} [{one['rule']}] {one['message']}" for one in json.loads(done.stdout)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--harbor", type=Path, required=True, help="Harbor's program")
    parser.add_argument("--bugs", type=int, default=NUM_BUGS, help="bugs of each release")
    parser.add_argument("--runs", type=Path, help="where the runs stay")
    parser.add_argument("--swe", type=Path, nargs="+", metavar="RUN", help="earlier runs of the pipeline `swe`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = (options.runs or Path(scratch)).absolute()
        runs.mkdir(parents=True, exist_ok=True)
        found = {
            "terminal": terminal_folders(runs, options.quick),
            "swe": earlier_folders(options.swe) if options.swe else swe_folders(runs, options.quick, options.bugs),
        }
        rows, num_theirs, num_ours = [], 0, 0
        for name, folders in found.items():
            theirs = harbor_findings(options.harbor, folders)
            ours = [str(finding) for path in folders for finding in lint(path)]
            for line in [*theirs, *ours][:20]:
                print(line)
            rows.append((name, str(len(folders)), str(len(theirs)), str(len(ours))))
            num_theirs, num_ours = num_theirs + len(theirs), num_ours + len(ours)
    print_table("Task folders", ("pipeline", "folders", "findings of Harbor", "of ours"), rows)
    num = sum(map(len, found.values()))
    bars = [Bar.at_most("findings of Harbor's lint", num_theirs, 0), Bar.at_most("findings of ours", num_ours, 0)]
    finish(bars if options.quick else [Bar.at_least("folders", num, NUM_FOLDERS), *bars], options.json)


if __name__ == "__main__":
    main()
