"""Verifies a task folder with the tests of a SWE-bench record: a patched repository in, a reward from 0 to 1 out.

    swe_tests.py /testbed /tests /logs/verifier

`instance.json` names the tests that must fail before and pass after (FAIL_TO_PASS), and those that must go on passing
(PASS_TO_PASS), as pytest's ids. Tests are first restored, whatever the attempt made of them: files that `test.patch`
touches, and those whose path matches the record's `test_paths`, become those of the base commit, files that it lacks
are removed, and the patch is applied. A record without `test_paths` has the files of the named tests restored. The
reward is 1 if every named test passed: one that was skipped, or is missing from the report, has not.

It imports the standard library alone, because task folders carry a copy of this file (`tasks/folders/swe_bench.py`).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=", "-c", "safe.directory=*")
REPORT = "junit.xml"


def listed(value: object) -> list[str]:
    """The tests of a record, which may be JSON in a text."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"expected a list of tests, received {str(value)[:80]!r}")
    return found


def report_name(id: str) -> tuple[str, str]:
    """Class and name by which JUnit's report lists a test of pytest."""
    path, *names = id.split("::")
    # Parameters may contain the separator.
    if (at := next((index for index, name in enumerate(names) if "[" in name), None)) is not None:
        names = [*names[:at], "::".join(names[at:])]
    module = re.sub(r"\.py$", "", path).replace("/", ".")
    return ".".join([module, *names[:-1]]), names[-1]


def patched_files(patch: str) -> list[str]:
    """Paths that a patch writes or deletes."""
    found = re.findall(r"^(?:---|\+\+\+) (?:[ab]/)?(.+?)(?:\t.*)?$", patch, re.MULTILINE)
    return sorted({name for name in found if name != "/dev/null"})


# -- test files --------------------------------------------------------------------------------------------------------

TEST_NAME = r"(?:^|/)(?:test_[^/]*|[^/]*_test)\.py"
CACHE = "__pycache__"
LINK, PROGRAM = "120000", "100755"
"""Modes of git."""


def file_matcher(tests: Path, instance: Mapping[str, object]) -> Callable[[str], bool]:
    """Decides whether the file at a path belongs to the tests."""
    found = set(patched_files((tests / "test.patch").read_text(encoding="utf-8")))
    if (pattern := instance.get("test_paths")) is None:
        ids = [*listed(instance["FAIL_TO_PASS"]), *listed(instance.get("PASS_TO_PASS", []))]
        found |= {path for id in ids if re.search(TEST_NAME + "$", path := id.partition("::")[0])}
        return found.__contains__
    matches = re.compile(str(pattern)).search
    return lambda path: path in found or matches(path) is not None


def restore_tests(repository: Path, tests: Path, instance: Mapping[str, object]) -> None:
    """Make the test files of a repository those of the base commit and the test patch."""
    is_test = file_matcher(tests, instance)
    wanted = {path: file for path, file in _base_files(repository, str(instance["base_commit"])) if is_test(path)}
    _remove_added(repository, wanted, is_test)
    contents = _contents(repository, [blob for _, blob in wanted.values()])
    for (name, (mode, _)), content in zip(wanted.items(), contents, strict=True):
        _write(repository, name, content, mode)
    if (patch := tests / "test.patch").read_bytes().strip():
        subprocess.run([*GIT, "apply", "--whitespace=nowarn", str(patch)], cwd=repository, check=True)


def _base_files(repository: Path, commit: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Path, mode and object of each file of a commit."""
    command = [*GIT, "-C", str(repository), "ls-tree", "-rz", commit]
    for line in subprocess.run(command, check=True, capture_output=True).stdout.split(b"\0"):
        head, _, path = line.partition(b"\t")
        if head and (fields := head.decode().split())[1] == "blob":
            yield os.fsdecode(path), (fields[0], fields[2])


def _contents(repository: Path, blobs: Sequence[str]) -> Iterator[bytes]:
    command = [*GIT, "-C", str(repository), "cat-file", "--batch"]
    asked = "".join(f"{blob}\n" for blob in blobs).encode()
    data, start = subprocess.run(command, input=asked, check=True, capture_output=True).stdout, 0
    for _ in blobs:
        end = data.index(b"\n", start)
        size = int(data[start:end].rpartition(b" ")[2])
        yield data[end + 1 : end + 1 + size]
        start = end + size + 2


def _remove_added(repository: Path, wanted: Collection[str], is_test: Callable[[str], bool]) -> None:
    """Remove test files that the base commit lacks, and compiled Python, which may stand for a restored file."""
    for top, folders, names in os.walk(repository):
        links = [name for name in folders if Path(top, name).is_symlink()]
        for name in (*names, *links):
            path = Path(top, name)
            inside = path.relative_to(repository).as_posix()
            if inside not in wanted and (is_test(inside) or (name in links and is_test(f"{inside}/{name}"))):
                path.unlink()
        if CACHE in folders and CACHE not in links:
            _remove_cache(Path(top, CACHE))
        folders[:] = [name for name in folders if name != CACHE and Path(top, name) != repository / ".git"]


def _remove_cache(path: Path) -> None:
    try:
        path.chmod(0o755)
    except PermissionError:
        return  # It belongs to the image and not to the attempt.
    shutil.rmtree(path)


def _write(repository: Path, name: str, content: bytes, mode: str) -> None:
    """Write a file, unless it is there: its age tells build tools whether it has changed."""
    path = repository / name
    for parent in reversed(path.parents):
        if repository in parent.parents and (parent.is_symlink() or not parent.is_dir()):
            parent.unlink(missing_ok=True)
            parent.mkdir()
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    if mode == LINK:
        path.unlink(missing_ok=True)
        path.symlink_to(os.fsdecode(content))
        return
    is_file = path.is_file() and not path.is_symlink()
    is_program = is_file and bool(path.stat().st_mode & 0o100)
    if not is_file or path.read_bytes() != content or is_program is not (mode == PROGRAM):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if mode == PROGRAM else 0o644)


# -- the reward --------------------------------------------------------------------------------------------------------


def passed(report: Path) -> set[tuple[str, str]]:
    """Class and name of the tests that passed."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    bad = ("failure", "error", "skipped")
    return {
        (case.get("classname", ""), case.get("name", ""))
        for case in cases
        if all(case.find(kind) is None for kind in bad)
    }


def run(repository: Path, tests: Path, logs: Path) -> float:
    instance = json.loads((tests / "instance.json").read_text(encoding="utf-8"))
    wanted = [*listed(instance["FAIL_TO_PASS"]), *listed(instance.get("PASS_TO_PASS", []))]
    restore_tests(repository, tests, instance)
    files = sorted({id.split("::")[0] for id in wanted})
    command: Sequence[str] = [
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"),
        *(f"--junitxml={logs / REPORT}", "-q", *files),
    ]
    # Standard output is the reward's: tested code must not have it.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=repository, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    found = passed(logs / REPORT)
    missing = [id for id in wanted if report_name(id) not in found]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} tests passed", *missing[:20], sep="\n  ", file=sys.stderr)
    return float(not missing)


if __name__ == "__main__":
    print(f"{run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])):g}")
