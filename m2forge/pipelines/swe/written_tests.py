"""Verifies tests that an attempt has written: a repository in, 1 out if its tests tell right code from wrong.

    written_tests.py /testbed /tests /logs/verifier

`instance.json` holds trees, each as the files in which it differs from the base commit:

    right     every written test must pass: the finished code as it was written, and spelled in another way
    wrong     a written test must fail: the code before a fix
    mutants   of the right code, by the files in which they differ from it; written tests must fail for `num_needed`

Test files that differ from the base commit are copied into a tree made of that commit. Nothing else of the attempt is:
changes of source are undone, and so are conftest.py and what configures pytest or Python. In these files, only tests
count that the base does not have, or not in the same words. A run over time decides nothing.

Written tests are foreign code: they may forge their own outcome, so a reward needs outcomes that differ between trees
which the tests cannot tell apart but by running the code. What is hidden is removed from /tests before they run and
kept in the memory of this process, which they cannot read. All trees have one path and come in random order, and no run
may leave anything to the next: its processes are ended, and a file written anywhere but in its own temporary folder
makes the reward 0. This process writes the reward last, over whatever is there. A test may read source as text; it does
not pay, since the right tree comes in two spellings.

It imports the standard library alone, because task folders carry a copy of this file.
"""

import ast
import ctypes
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

RUN_S = 60.0
CLOCK_S = 0.05
"""The clock of file systems may be late by less."""
MAX_REPORT_BYTES = 32 << 20
GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=", "-c", "safe.directory=*")
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
RUNNER_FILES = re.compile(
    r"(?:^|/)(?:conftest\.py|\.?pytest\.(?:ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|(?:site|user)customize\.py"
    r"|__pycache__/.*|[^/]*\.(?:pth|pyc|so))$"
)
"""Files that decide how tests run."""


# -- which tests count -------------------------------------------------------------------------------------------------


def functions(source: str) -> dict[str, str]:
    """Functions and methods of a test file, without their layout, by the inner part of an id of pytest. A class also
    has the methods of its bases in the same file."""
    found: dict[str, str] = {}
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return {}
    pending: list[tuple[str, ast.stmt]] = [("", node) for node in body]
    while pending:
        prefix, node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[prefix + node.name] = ast.dump(node)
        elif isinstance(node, ast.ClassDef):
            pending += [(f"{prefix}{node.name}::", inner) for inner in node.body]
    for owner in body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for base in owner.bases:
            start = f"{base.id}::" if isinstance(base, ast.Name) else "::"
            for name in [name for name in found if name.startswith(start)]:
                found.setdefault(f"{owner.name}::{name.removeprefix(start)}", found[name])
    return found


def counted(ids: Collection[str], old_ids: Collection[str], old: Mapping[str, str], new: Mapping[str, str]) -> set[str]:
    """Tests that the base does not have, or not in the same words. `old`, `new`: texts of the test files by path."""
    before, after = ({path: functions(text) for path, text in sources.items()} for sources in (old, new))

    def is_same(id: str) -> bool:
        path, _, inner = id.partition("::")
        name = inner.partition("[")[0]
        return before.get(path, {}).get(name) == after.get(path, {}).get(name)

    return {id for id in ids if id not in old_ids or not is_same(id)}


def sees(run: Mapping[str, str] | None, tests: Collection[str]) -> bool:
    """Whether one of the tests fails in a run that ended; one that is missing could not be imported."""
    return run is not None and any(run.get(id, FAILED) == FAILED for id in tests)


# -- runs of tests -----------------------------------------------------------------------------------------------------


def run_tests(tree: Path, repository: Path, files: Sequence[str]) -> dict[str, str] | None:
    """The outcome of every test of the files by pytest's id; None if the run did not end in time."""
    scratch = Path(tempfile.mkdtemp(prefix="run-", dir=tree.parent))
    path = os.environ.get("PYTHONPATH", "").replace(str(repository), str(tree))
    own = {"PYTHONPATH": path, "HOME": str(scratch), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        *(sys.executable, "-s", "-m", "pytest", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", "-q"),
        *("--continue-on-collection-errors", f"--junitxml={scratch}/report.xml", *files),
    ]
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, **own},
            timeout=RUN_S,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
        )
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_processes()
        report = _read(scratch / "report.xml")
        shutil.rmtree(scratch, ignore_errors=True)
    return outcomes(report, files)


def _read(path: Path) -> bytes:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(MAX_REPORT_BYTES)
    except OSError:
        return b""


def protect() -> None:
    """Let no other process of this user read this one, and make it the parent of those that tests leave."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def end_processes() -> None:
    """End what tests have left running; the children of one that ends become this process's."""
    while children := [pid for pid, parent in _parents() if parent == os.getpid()]:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _parents() -> list[tuple[int, int]]:
    """All processes with their parents."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit():
                found.append((int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])))
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended.
    return found


def outcomes(report: bytes, files: Sequence[str]) -> dict[str, str]:
    """The tests of JUnit's report by pytest's id; empty without a report that can be read."""
    modules = {re.sub(r"\.py$", "", file).replace("/", "."): file for file in files}
    found: dict[str, str] = {}
    try:
        if b"<!DOCTYPE" in report or b"<!ENTITY" in report:
            return {}  # Entities expand without bound.
        cases = list(ElementTree.fromstring(report).iter("testcase"))
    except ElementTree.ParseError:
        return {}
    for case in cases:
        parts = case.get("classname", "").split(".")
        num = next((num for num in range(len(parts), 0, -1) if ".".join(parts[:num]) in modules), 0)
        if num:
            id = "::".join([modules[".".join(parts[:num])], *parts[num:], case.get("name", "")])
            is_bad = case.find("failure") is not None or case.find("error") is not None
            outcome = FAILED if is_bad else SKIPPED if case.find("skipped") is not None else PASSED
            found[id] = outcome if found.get(id, outcome) == outcome else FAILED
    return found


# -- trees -------------------------------------------------------------------------------------------------------------


def write_base(repository: Path, commit: str, tree: Path) -> None:
    """Write the files of the base commit to a folder that tests cannot write."""
    tree.mkdir(mode=0o755)
    env = {**os.environ, "GIT_INDEX_FILE": f"{tree}.index"}
    command = [*GIT, "-C", str(repository), f"--work-tree={tree}", "checkout", "-q", commit, "--", "."]
    subprocess.run(command, env=env, check=True, stdout=sys.stderr)


def written_files(repository: Path, tree: Path, pattern: str) -> dict[str, bytes]:
    """Test files of the repository that are not as in the tree of the base."""
    found = {}
    for folder, folders, names in os.walk(repository):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            path = Path(folder, name)
            inside = str(path.relative_to(repository))
            if path.is_file() and not path.is_symlink() and re.search(pattern, inside):
                content = path.read_bytes()
                is_new = _read(tree / inside) != content or not (tree / inside).is_file()
                if is_new and not RUNNER_FILES.search(inside):
                    found[inside] = content
    return found


def write_files(tree: Path, files: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """Write files of a tree, all of one age; returns those that were there. None: the file is missing."""
    before: dict[str, bytes | None] = {}
    for name, content in files.items():
        path = tree / name
        before[name] = path.read_bytes() if path.is_file() else None
        if content is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (0, 0))
    return before


# -- the reward --------------------------------------------------------------------------------------------------------


def run(repository: Path, tests: Path) -> float:
    instance = json.loads((tests / "instance.json").read_text(encoding="utf-8"))
    (tests / "instance.json").unlink()
    scratch = Path(tempfile.mkdtemp(prefix="trees-"))
    tree = scratch / "tree"
    write_base(repository, instance["base_commit"], tree)
    written = written_files(repository, tree, instance["test_paths"])
    files = [name for name in written if re.match(instance["runnable"], name.rpartition("/")[2])]
    if not files:
        print("no test file was added or changed", file=sys.stderr)
        return 0.0
    old = {name: (tree / name).read_text(errors="replace") for name in files if (tree / name).is_file()}
    new = {name: written[name].decode(errors="replace") for name in files}
    right = _encoded(instance["right"][0])
    before = write_files(tree, right)
    old_ids = run_tests(tree, repository, list(old)) if old else {}
    write_files(tree, before)
    write_files(tree, written)
    kinds = ("right", "wrong", "mutants")
    trees = [(kind, _encoded(files)) for kind in kinds for files in instance[kind]]
    random.SystemRandom().shuffle(trees)
    runs: dict[str, list[dict[str, str] | None]] = {kind: [] for kind in kinds}
    time.sleep(CLOCK_S)
    start_ns = time.time_ns()
    for kind, changed in trees:
        # A mutant's other files are written like those of the right tree.
        before = write_files(tree, {**right, **changed} if kind == "mutants" else changed)
        state = contents(scratch)
        runs[kind].append(run_tests(tree, repository, files))
        if contents(scratch) != state:
            print("tests have changed files of the repository", file=sys.stderr)
            return 0.0
        write_files(tree, before)
    if (left := next(left_behind(scratch, start_ns), None)) is not None:
        print(f"tests have left something to each other: {left}", file=sys.stderr)
        return 0.0
    return float(judge(runs, old_ids or {}, old, new, instance["num_needed"]))


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder by path; None for what is no file."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def left_behind(scratch: Path, start_ns: int) -> Iterator[str]:
    """Files and folders that were changed since a moment, also if what was written is gone again, and shared memory.
    `scratch`: the one folder that is left out."""
    for name in ("shm", "sem", "msg"):
        table = Path("/proc/sysvipc", name)
        if table.is_file() and len(table.read_text().splitlines()) > 1:
            yield str(table)
    pending = ["/"]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue  # What cannot be listed cannot be written either.
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if entry.path in ("/proc", "/sys", str(scratch)) or stat.S_ISCHR(status.st_mode):
                continue
            if status.st_ctime_ns > start_ns:
                yield entry.path
            if stat.S_ISDIR(status.st_mode):
                pending.append(entry.path)


def _encoded(files: Mapping[str, str | None]) -> dict[str, bytes | None]:
    return {name: None if text is None else text.encode() for name, text in files.items()}


def judge(
    runs: Mapping[str, Sequence[Mapping[str, str] | None]],
    old_ids: Collection[str],
    old: Mapping[str, str],
    new: Mapping[str, str],
    num_needed: int,
) -> bool:
    ended = [one for one in runs["right"] if one is not None]
    ids = counted({id for one in ended for id in one}, old_ids, old, new)
    failing = sorted(id for id in ids if sees_one(ended, id))
    good = {id for id in ids if all(one.get(id) == PASSED for one in ended)}
    num_killed = sum(sees(one, good) for one in runs["mutants"])
    print(f"{len(ids)} tests, of which {len(failing)} fail where they must pass", *failing[:20], file=sys.stderr)
    print(f"{num_killed} of {len(runs['mutants'])} mutants found, needed: {num_needed}", file=sys.stderr)
    is_right = len(ended) == len(runs["right"]) and bool(good) and not failing
    return is_right and all(sees(one, good) for one in runs["wrong"]) and num_killed >= num_needed


def sees_one(runs: Sequence[Mapping[str, str]], id: str) -> bool:
    return any(one.get(id, FAILED) == FAILED for one in runs)


def write_reward(reward: float, logs: Path) -> None:
    """Write the reward alone, whatever tests have left in its folder."""
    for path in logs.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (logs / "reward.txt").write_text(f"{reward:g}\n")


if __name__ == "__main__":
    protect()
    final = 0.0
    try:
        final = run(Path(sys.argv[1]), Path(sys.argv[2]))
    finally:
        write_reward(final, Path(sys.argv[3]))
    sys.exit(final != 1)
