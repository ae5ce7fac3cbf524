"""The SWE pipeline without a model: release pairs that must become tasks or be refused, and the rate of injected bugs.

    pairs       consecutive sdists through all gates; F2P and P2P beside those that were seen by hand
    debian      upstream archives of Debian's C and Node packages through all gates
    bugs        faults in a release of each of five languages through all gates, per hour on this machine's cores
    speed       comparisons of a workload with itself, and with one that does 1.5 times the work
    golden      solutions of the accepted tasks again and again: none may fail

    python benchmarks/swe.py [--quick] [--json] [--part pairs] [--golden NUM] [--runs DIR]

`--golden NUM` adds golden runs of the tasks that were just made; `--part golden --golden NUM --runs DIR` takes those of
earlier runs instead. Each prints a line, and is a line of `golden.jsonl` in its run's folder; a repeated command runs
only those that these files lack.

Sdists, wheels, archives and node modules are downloaded on first use. --quick: four of the pairs and a few bugs, and
nothing of Debian unless --part names it. --runs: the runs stay there,
and the same command resumes them; rates are right only without an interruption.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import sqlite3
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from report import Bar, arguments, finish, print_table

from m2forge.compiled import cache_folder
from m2forge.files import append_line, whole_lines, write_atomic
from m2forge.pipelines.config import PipelineConfig
from m2forge.pipelines.run import STORE_FILE, run_pipeline
from m2forge.pipelines.swe.source import package_version
from m2forge.pipelines.swe.speed_tests import is_faster, measure
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.folders.export import folder_name
from m2forge.tasks.folders.folder import Rejected, read_folders
from m2forge.tasks.folders.swe_bench import folder_record
from m2forge.tasks.folders.trial import Trial, run_trials

ACCEPTED = {
    "sqlparse 0.5.4 0.5.5": (5, 475),
    "toolz 1.1.0 1.2.0": (2, 190),
    "cachetools 6.2.6 7.0.0": (49, 200),
    "cachetools 7.2.8 7.3.0": (2, 391),
    "xmltodict 1.0.2 1.0.3": (3, 101),
    "xmltodict 1.0.3 1.0.4": (16, 103),
    "humanize 4.14.0 4.15.0": (45, 692),
    "humanize 4.15.0 4.16.0": (37, 732),
    "iniconfig 2.2.0 2.3.0": (4, 45),
    "iniconfig 2.3.0 2.3.1": (17, 37),
    "pluggy 1.5.0 1.6.0": (3, 121),
    "tabulate 0.9.0 0.10.0": (36, 267),
    "simpleeval 1.0.7 1.0.8": (3, 157),
    "python-slugify 9.1.2 9.1.3": (1, 131),
    "uritemplate 4.1.1 4.2.0": (2, 56),
    "h11 0.15.0 0.16.0": (1, 75),
}
"""Pairs with the F2P and P2P that were seen by hand; packages that are installed beside a project change some."""
REFUSED = {
    "schema 0.7.5 0.7.7": ("no F2P",),
    "webcolors 24.11.1 25.10.0": ("no F2P",),
    # Its sdists hold no changed test, from which the same follows before anything is run.
    "simpleeval 1.0.6 1.0.7": ("no F2P", "tests unchanged"),
    "pathspec 1.0.4 1.1.0": ("licence",),
    "dominate 2.9.0 2.9.1": ("licence",),
}
QUICK = ("toolz 1.1.0 1.2.0", "iniconfig 2.3.0 2.3.1", "schema 0.7.5 0.7.7", "dominate 2.9.0 2.9.1")
RELEASES = ("toolz 1.2.0", "xmltodict 1.0.4", "iniconfig 2.3.1", "uritemplate 4.2.0")
"""Releases of Python that get faults for other benchmarks."""
BUGS = {
    "Python": "toolz 1.2.0",
    "JavaScript": "node-minimist_1.2.8+~cs5.3.5.orig.tar.gz",
    "Go": "golang-github-dustin-go-humanize_1.0.1.orig.tar.gz",
    "C": "libmd_1.1.0.orig.tar.xz",
    "Rust": "rust-strsim_0.11.1.orig.tar.gz",
}
"""One small release of each language that gets faults, chosen before any of them was run: a permissive licence, tests
outside of the source, and no package that is needed to build it. None was exchanged since."""
DEBIAN = (
    ("cjson_1.7.15.orig.tar.gz", "cjson_1.7.18.orig.tar.gz"),
    ("cjson_1.7.18.orig.tar.gz", "cjson_1.7.19.orig.tar.gz"),
    ("json-c_0.16.orig.tar.gz", "json-c_0.18+ds.orig.tar.xz"),
    ("cmocka_1.1.5.orig.tar.xz", "cmocka_1.1.7.orig.tar.xz"),
    ("libmd_1.0.4.orig.tar.xz", "libmd_1.1.0.orig.tar.xz"),
    ("node-nock_13.2.9.orig.tar.gz", "node-nock_13.5.4.orig.tar.gz"),
)
"""Pairs of upstream archives in Debian's suites bookworm, trixie and forky. They were chosen by what their files say,
before a test of any was run, and none was exchanged since: of some 250 packages, mostly libraries, of which the mirror
had two upstream versions and whose Build-Depends name no library, those with a permissive licence and changes of source
and tests. In C, at least two tests that CMake or automake lists and at most 1,200 changed lines of source, the five
whose tests gain the most lines; and the only pair of Node without native code whose tests are mocha's, tape's or
node's own."""
DIGESTS = {
    "cjson_1.7.15.orig.tar.gz": "5308fd4bd90cef7aa060558514de6a1a4a0819974a26e6ed13973c5f624c24b2",
    "cjson_1.7.18.orig.tar.gz": "3aa806844a03442c00769b83e99970be70fbef03735ff898f4811dd03b9f5ee5",
    "cjson_1.7.19.orig.tar.gz": "7fa616e3046edfa7a28a32d5f9eacfd23f92900fe1f8ccd988c1662f30454562",
    "json-c_0.16.orig.tar.gz": "3ecaeedffd99a60b1262819f9e60d7d983844073abc74e495cb822b251904185",
    "json-c_0.18+ds.orig.tar.xz": "f6439962c9622c1f9f4746d5b3daf5e0800c335281b048fab00159f2a29d7daa",
    "cmocka_1.1.5.orig.tar.xz": "f0ccd8242d55e2fd74b16ba518359151f6f8383ff8aef4976e48393f77bba8b6",
    "cmocka_1.1.7.orig.tar.xz": "810570eb0b8d64804331f82b29ff47c790ce9cd6b163e98d47a4807047ecad82",
    "libmd_1.0.4.orig.tar.xz": "f51c921042e34beddeded4b75557656559cf5b1f2448033b4c1eec11c07e530f",
    "libmd_1.1.0.orig.tar.xz": "1bd6aa42275313af3141c7cf2e5b964e8b1fd488025caf2f971f43b00776b332",
    BUGS["JavaScript"]: "288d51b4d1605bb645073da248bcd0c891bbeb86ec8f44b1d60e5cd85c55c5e9",
    BUGS["Go"]: "ac3a0d8d0eef07c75d12eddce775a8e8306dfb9783a45312597c34ff643793d8",
    BUGS["Rust"]: "7da8b5736845d9f2fcb837ea5d9e2628564b3b043a70948a3f0b778838c5fb4f",
    "node-nock_13.2.9.orig.tar.gz": "8f3f8ddafce2d9eaf895e1f402406e71dd056ac6d79a0082b7af6996282920d8",
    "node-nock_13.5.4.orig.tar.gz": "f51276efa64f88502c3e58d881ebb70f4e8698b67c673f1f4a13cd7982ae9e0f",
}
"""SHA-256, as the .dsc files have it."""
MIRROR = "http://deb.debian.org/debian/pool/main"
DOWNLOAD_S = 60.0
MIN_DEBIAN = 3
MIN_ACCEPTED, MIN_BUGS_AN_HOUR = 14, 600.0


@dataclass(frozen=True)
class Result:
    """What became of one pair."""

    fail_to_pass: int = 0
    pass_to_pass: int = 0
    kind: str = ""
    reason: str = ""

    @property
    def is_task(self) -> bool:
        return not self.reason


def run(name: str, runs: Path, **swe: object) -> tuple[Path, float]:
    # One more than cores: a worker also waits for processes that start, and for files.
    table = {"name": name, "workers": (os.cpu_count() or 1) + 1, "swe": swe}
    started_s = time.perf_counter()
    folder = run_pipeline(PipelineConfig.model_validate(table), runs)
    return folder, time.perf_counter() - started_s


def results(folder: Path) -> dict[str, Result]:
    """By item: tasks by their folders, the others by the last outcome in the store."""
    found: dict[str, Result] = {}
    with sqlite3.connect(folder / STORE_FILE) as store:
        for id, state, reason in store.execute("SELECT id, state, reason FROM outcome ORDER BY stage"):
            found[id] = Result(
                reason=reason if state == "rejected" else f"failed: {reason}" if state == "failed" else ""
            )
    ids = {folder_name(id): id for id in found}
    for task in read_folders(folder / "tasks")[0] if any((folder / "tasks").iterdir()) else ():
        record = folder_record(task)
        lists = [record[key] for key in ("FAIL_TO_PASS", "PASS_TO_PASS")]
        counts = [len(tests) for tests in lists if isinstance(tests, list)]
        found[ids.get(task.path.name, task.path.name)] = Result(
            counts[0], counts[1], str(task.config.task.keywords[0] if task.config.task else "")
        )
    # The stage `transform` makes tasks of a candidate; the first asks for the change itself.
    return found | {id.removesuffix("-0"): result for id, result in found.items() if id.endswith("-0")}


def pair_id(pair: str) -> str:
    package, _, new = pair.split()
    return f"{package}-{new}"


def measure_pairs(runs: Path, pairs: tuple[str, ...]) -> tuple[list[Bar], Path]:
    folder, seconds = run("pairs", runs, sdists=pairs)
    found = results(folder)
    rows, num_tasks, num_refused = [], 0, 0
    for pair in pairs:
        result = found.get(pair_id(pair), Result(reason="no outcome"))
        counts = f"{result.fail_to_pass}/{result.pass_to_pass}" if result.is_task else "–"
        if pair in ACCEPTED:
            num_tasks += result.is_task
            rows.append((pair, "task", counts, "{}/{}".format(*ACCEPTED[pair]), result.reason or result.kind))
        else:
            num_refused += result.reason in REFUSED[pair]
            rows.append((pair, "refusal", counts, " or ".join(REFUSED[pair]), result.reason or result.kind))
    print_table(f"Release pairs, {seconds:.0f} s", ("pair", "expected", "F2P/P2P", "seen", "result"), rows)
    wanted = sum(pair in ACCEPTED for pair in pairs)
    bars = [
        Bar.at_least("pairs that become tasks", num_tasks, min(MIN_ACCEPTED, wanted)),
        Bar.at_least("pairs refused for the right reason", num_refused, len(pairs) - wanted),
    ]
    return bars, folder


def measure_debian(runs: Path, pairs: tuple[tuple[str, str], ...]) -> tuple[list[Bar], Path]:
    paths = tuple(tuple(str(pool_path(name)) for name in pair) for pair in pairs)
    folder, seconds = run("debian", runs, debian=paths)
    found = results(folder)
    rows, num_tasks = [], 0
    for _, new in pairs:
        result = found.get("-".join(package_version(Path(new))), Result(reason="no outcome"))
        num_tasks += result.is_task
        counts = f"{result.fail_to_pass}/{result.pass_to_pass}" if result.is_task else "–"
        rows.append((new, counts, result.reason or result.kind))
    print_table(f"Debian's pairs, {seconds:.0f} s", ("new archive", "F2P/P2P", "result"), rows)
    return [Bar.at_least("Debian's pairs that become tasks", num_tasks, MIN_DEBIAN)], folder


def pool_path(name: str) -> Path:
    """An upstream archive in the cache folder; downloaded on first use from Debian's pool, and checked."""
    package = name.partition("_")[0]
    prefix = package[:4] if package.startswith("lib") else package[0]
    path = cache_folder() / "swe" / "debian" / name
    if not path.is_file():
        url = f"{MIRROR}/{prefix}/{package}/{name.replace('+', '%2B')}"
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_S) as response:
                content: bytes = response.read()
        except OSError as error:
            raise SystemExit(f"{url}: {error}; put the file, of SHA-256 {DIGESTS[name]}, at {path}") from error
        if hashlib.sha256(content).hexdigest() != DIGESTS[name]:
            raise SystemExit(f"{url}: the SHA-256 is not {DIGESTS[name]}")
        write_atomic(path, content)
    return path


def measure_bugs(runs: Path, releases: Mapping[str, str], num: int) -> tuple[list[Bar], list[Path]]:
    """Each language in a run of its own; what counts is the rate over all of them."""
    rows, folders, num_all, seconds_all = [], list[Path](), 0, 0.0
    for language, release in releases.items():
        chosen = {"injected": (release,)} if " " in release else {"injected_paths": (str(pool_path(release)),)}
        folder, seconds = run(f"bugs-{language.lower()}", runs, num_bugs=num, **chosen)
        tasks = folder / "tasks"
        num_tasks = len([path for path in tasks.iterdir() if path.is_dir()]) if tasks.is_dir() else 0
        stages = json.loads((folder / "yields.json").read_text())["stages"]
        refused = ", ".join(text for stage in stages if (text := reasons(stage)))
        rate = num_tasks / seconds * 3600
        rows.append((language, release, str(num_tasks), f"{seconds:.0f}", f"{rate:.0f}", refused))
        folders, num_all, seconds_all = [*folders, folder], num_all + num_tasks, seconds_all + seconds
    header = ("language", "release", "bugs", "seconds", "an hour", "rejected")
    print_table(f"Injected bugs, {num} asked for of each release", header, rows)
    rate = num_all / seconds_all * 3600
    return [Bar.at_least("injected bugs an hour, all languages", rate, MIN_BUGS_AN_HOUR)], folders


def reasons(stage: Mapping[str, object]) -> str:
    found = stage.get("rejected")
    return ", ".join(f"{reason}: {num}" for reason, num in found.items()) if isinstance(found, dict) else ""


def measure_speed(num_equal: int, num_gains: int) -> list[Bar]:
    """How often the rule of tasks of speed finds a gain where there is none, and where there is one. Each core compares
    one pair at a time."""
    with tempfile.TemporaryDirectory() as scratch:
        trees = {amount: Path(scratch) / str(amount) for amount in (20_000, 30_000)}
        for amount, tree in trees.items():
            tree.mkdir()
            (tree / "work.sh").write_text(f"i=0; while [ $i -lt {amount} ]; do i=$((i+1)); done\n")
        light, heavy = trees.values()
        # In processes: CPU time is that of all children.
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            equal = list(pool.map(finds_gain, [light] * num_equal, [light] * num_equal))
            gains = list(pool.map(finds_gain, [heavy] * num_gains, [light] * num_gains))
    return [
        Bar.at_most("equal pairs that pass as faster, %", 100 * sum(equal) / num_equal, 1.0),
        Bar.at_least("gains of 1.5x that are found, %", 100 * sum(gains) / num_gains, 95.0),
    ]


def finds_gain(base: Path, new: Path) -> bool:
    return is_faster(*measure(("sh", "work.sh"), base, new))


class Golden:
    """Golden runs of the tasks of one pipeline run, each written to its folder at once: a stopped measurement leaves
    its figures, and the same command goes on from there."""

    def __init__(self, run: Path) -> None:
        self.name, self._path = run.name, run / "golden.jsonl"
        self.tasks = sorted((run / "tasks").glob("*/"))
        data = self._path.read_bytes() if self._path.is_file() else b""
        self.records = [json.loads(line) for line in whole_lines(data)]

    def num_done(self, task: Path) -> int:
        return sum(record["task"] == task.name for record in self.records)

    @property
    def failed(self) -> list[dict[str, str]]:
        return [record for record in self.records if record["problem"]]

    def add(self, task: Path, problem: str) -> None:
        self.records.append({"task": task.name, "problem": problem})
        append_line(self._path, json.dumps(self.records[-1]))
        print(f"golden {self.name}: {len(self.records)} runs, {len(self.failed)} failed", flush=True)


def measure_golden(folders: list[Path], num: int) -> list[Bar]:
    """Solutions of all tasks, each as often, until at least `num` have run."""
    runs = [Golden(folder) for folder in folders]
    owners = {task: run for run in runs for task in run.tasks}
    if not owners:
        raise SystemExit("golden: there is no task; run the parts pairs and bugs first, with the same --runs")
    each = -(-num // len(owners))
    left = defaultdict[int, list[Path]](list)
    # One task of every run before a second one of any.
    for one_of_each in itertools.zip_longest(*(run.tasks for run in runs)):
        for task in filter(None, one_of_each):
            left[each - owners[task].num_done(task)].append(task)

    def take(trial: Trial) -> None:
        problem = str(trial.problem or trial.verdict)[:200] if trial.is_wrong else ""
        owners[trial.folder].add(trial.folder, problem)

    rejected = list[Rejected]()
    for num_left, tasks in sorted(left.items(), reverse=True):
        if num_left > 0:
            options = {"num_trials": num_left, "num_concurrent": os.cpu_count() or 1}
            trials = run_trials(tasks, ["oracle"], SandboxConfig(), base_image="host", on_trial=take, **options)
            rejected += asyncio.run(trials)[1]
    rows = [(run.name, str(len(run.tasks)), str(len(run.records)), str(len(run.failed))) for run in runs]
    num_runs = sum(len(run.records) for run in runs)
    print_table(f"{num_runs} golden runs of {len(owners)} tasks", ("run", "tasks", "golden runs", "failed"), rows)
    wrong = [(record["task"], record["problem"]) for run in runs for record in run.failed]
    wrong += [(item.path.name, item.problem) for item in rejected]
    if wrong:
        print_table("Failed golden runs", ("task", "why"), wrong[:10])
    return [Bar.at_most("golden runs that fail", len(wrong), 0)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--part", choices=("pairs", "debian", "bugs", "speed", "golden", "all"), default="all")
    parser.add_argument("--golden", type=int, default=0, help="golden runs of the accepted tasks")
    parser.add_argument("--runs", type=Path, help="folder of the runs; without it they are removed")
    args = parser.parse_args()
    if args.part == "golden" and not (args.golden and args.runs):
        parser.error("--part golden needs --golden NUM and --runs DIR, which holds earlier runs")
    bars: list[Bar] = []
    folders: list[Path] = []
    with contextlib.nullcontext(args.runs) if args.runs else tempfile.TemporaryDirectory() as scratch:
        if args.part in ("pairs", "all"):
            found, folder = measure_pairs(Path(scratch), QUICK if args.quick else (*ACCEPTED, *REFUSED))
            bars, folders = bars + found, [*folders, folder]
        if args.part == "debian" or (args.part == "all" and not args.quick):
            found, folder = measure_debian(Path(scratch), DEBIAN)
            bars, folders = bars + found, [*folders, folder]
        if args.part in ("bugs", "all"):
            chosen = {"Python": BUGS["Python"]} if args.quick else BUGS
            found, more = measure_bugs(Path(scratch), chosen, 5 if args.quick else 20)
            bars, folders = bars + found, folders + more
        if args.part in ("speed", "all"):
            bars += measure_speed(*(10, 10) if args.quick else (500, 100))
        if args.part == "golden":
            folders = [path.parent for path in sorted(Path(scratch).glob("*/tasks/"))]
        if args.golden:
            bars += measure_golden(folders, args.golden)
    finish(bars, args.json)


if __name__ == "__main__":
    main()
