"""Terminal-Gym: how many questions of the labelled sample become tasks, and how fast a dump is read.

Yield: the pipeline runs over `examples/terminal/Posts.xml`, without a model; labels.jsonl says which of the 120
questions are sound. Reader: MB of Posts.xml per second of wall and of processor time, and peak memory, of a process
that reads a dump made by repeating the sample's rows under other ids, the answers of every block of questions far
behind them.

    python benchmarks/terminal.py [--quick] [--json]
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Bar, arguments, finish, print_table

from m2forge.pipelines.config import PipelineConfig
from m2forge.pipelines.run import make_pipeline, run_stages
from m2forge.pipelines.terminal.pipeline import FOLDER

SAMPLE = Path(__file__).parent.parent / "examples" / "terminal"
QUICK_EVERY = 4
"""The quick run takes one question of so many."""
READER = """
import re, sys, time
from pathlib import Path
from m2forge.pipelines.stage import Item
from m2forge.pipelines.terminal.config import TerminalConfig
from m2forge.pipelines.terminal.posts import PostsSource
path = Path(sys.argv[1])
started_s, began_s = time.process_time(), time.perf_counter()
num = sum(isinstance(one, Item) for one in PostsSource(path, TerminalConfig(posts=str(path))).questions())
seconds, wall_s = time.process_time() - started_s, time.perf_counter() - began_s
# The maximum that getrusage reports includes that of the process before it started this program.
print(num, seconds, wall_s, int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024)
"""


def labels() -> dict[str, bool]:
    records = map(json.loads, (SAMPLE / "labels.jsonl").read_text().splitlines())
    return {str(record["id"]): record["sound"] for record in records}


def chosen_rows(ids: set[str]) -> str:
    """The dump with the rows of these questions alone."""
    lines = (SAMPLE / "Posts.xml").read_text().splitlines(keepends=True)
    wanted = re.compile(r' (?:Id|ParentId)="(\d+)" (?:PostTypeId="1"|CreationDate)')
    return "".join(one for one in lines if not (found := wanted.search(one)) or found[1] in ids)


def measure_yield(quick: bool, workers: int) -> list[Bar]:
    known = labels()
    by_kind = {kind: sorted((id for id in known if known[id] is kind), key=int) for kind in (True, False)}
    ids = {id for part in by_kind.values() for id in part[:: QUICK_EVERY if quick else 1]}
    with tempfile.TemporaryDirectory() as scratch:
        posts = Path(scratch) / "Posts.xml"
        posts.write_text(chosen_rows(ids))
        table = {"posts": str(posts)}
        config = PipelineConfig.model_validate({"name": "sample", "workers": workers, "terminal": table})
        started_s = time.perf_counter()
        yields = run_stages(make_pipeline(config), config, Path(scratch))
        seconds = time.perf_counter() - started_s
        made = {path.name.removeprefix("terminal-") for path in (Path(scratch) / FOLDER).iterdir()}
    rows = [
        (one.name, str(one.num_in), str(one.num_passed), _reasons(one.rejected), f"{one.seconds:.1f}") for one in yields
    ]
    print_table(f"{len(ids)} questions in {seconds:.0f} s", ("stage", "in", "passed", "rejected", "s"), rows)
    num_sound, num_decoys = sum(known[id] for id in ids), sum(not known[id] for id in ids)
    return [
        Bar.at_least("sound questions that become tasks", sum(known[id] for id in made), 0.8 * num_sound),
        Bar.at_most("decoys that become tasks", sum(not known[id] for id in made), num_decoys // 20),
        Bar.at_most("items that failed", sum(one.num_failed for one in yields), 0),
    ]


def _reasons(rejected: dict[str, int]) -> str:
    return ", ".join(f"{reason} {num}" for reason, num in rejected.items()) or "–"


def write_dump(path: Path, num_bytes: int) -> int:
    """A dump of at least this size; returns how many of its questions have an accepted answer."""
    lines = (SAMPLE / "Posts.xml").read_text().splitlines()[2:-1]
    numbered = re.compile(r' (Id|ParentId|AcceptedAnswerId)="(\d+)"')
    questions = [one for one in lines if 'PostTypeId="1"' in one]
    answers = [one for one in lines if 'PostTypeId="2"' in one]
    size = block = 0
    with path.open("w") as file:
        file.write('<?xml version="1.0" encoding="utf-8"?>\n<posts>\n')
        while size < num_bytes:
            for part in (questions, answers):
                for copy in range(block, block + 50):
                    text = "\n".join(part) + "\n"
                    size += file.write(numbered.sub(lambda found: f' {found[1]}="{found[2]}{copy:06}"', text))  # noqa: B023
            block += 50
        file.write("</posts>\n")
    return sum("AcceptedAnswerId" in one for one in questions) * block


def measure_reader(num_bytes: int) -> list[Bar]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "Posts.xml"
        num_accepted = write_dump(path, num_bytes)
        done = subprocess.run([sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=True)
        num, seconds, wall_s, peak = (float(word) for word in done.stdout.split())
        megabytes = path.stat().st_size / 1e6
    speeds = (f"{megabytes / wall_s:.1f}", f"{megabytes / seconds:.1f}")
    row = (f"{megabytes:.0f} MB", f"{num:.0f} of {num_accepted}", *speeds, f"{peak / 1e6:.0f}")
    names = ("dump", "questions past the first gates", "MB/s", "MB per CPU second", "peak MB")
    print_table("Posts.xml", names, [row])
    return [
        Bar.at_least("Posts.xml, MB per second of wall time", megabytes / wall_s, 20),
        Bar.at_most("Posts.xml, peak memory in MB", peak / 1e6, 200),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=2, help="questions tried at once")
    options = parser.parse_args()
    bars = measure_reader(60_000_000 if options.quick else 400_000_000)
    bars += measure_yield(options.quick, options.workers)
    finish(bars, options.json)


if __name__ == "__main__":
    main()
