"""Verifies a task folder with the tests of a SWE-bench record: a patched repository in, a reward from 0 to 1 out.

    swe_tests.py /testbed /tests /logs/verifier

`instance.json` names the tests that must fail before and pass after (FAIL_TO_PASS), and those that must go on passing
(PASS_TO_PASS), as pytest's ids. Files that `test.patch` touches are first restored from the base commit, whatever the
attempt made of them. The reward is 1 if every named test passed: one that was skipped, or is missing from the report,
has not.

It imports the standard library alone, because task folders carry a copy of this file (`tasks/folders/swe_bench.py`).
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
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


def restore(repository: Path, commit: str, name: str) -> None:
    path = repository / name
    path.unlink(missing_ok=True)
    done = subprocess.run([*GIT, "-C", str(repository), "cat-file", "blob", f"{commit}:{name}"], capture_output=True)
    if done.returncode == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(done.stdout)


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
    patch = tests / "test.patch"
    for name in patched_files(patch.read_text(encoding="utf-8")):
        restore(repository, instance["base_commit"], name)
    subprocess.run([*GIT, "apply", "--whitespace=nowarn", str(patch)], cwd=repository, check=True)
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
