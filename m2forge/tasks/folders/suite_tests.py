"""Reads reports of tests of any language, and verifies a task folder by them: a patched repository in, 1 or 0 out.

    suite_tests.py /testbed /tests /logs/verifier

`instance.json` names the command, the format of its report, the tests that must fail before and pass after
(FAIL_TO_PASS) and those that must go on passing (PASS_TO_PASS). The command runs in the repository and writes its
report to the path in the variable TEST_REPORT. Files that `test.patch` touches are first restored from the base commit.
The reward is 1 if every named test passed: one that was skipped, or is missing from the report, has not.

    pytest-junit    JUnit's XML as pytest writes it (junit_family=xunit1)

It imports the standard library alone, because task folders carry a copy of this file beside that of swe_tests.py.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
VARIABLE, REPORT = "TEST_REPORT", "report"
MAX_MESSAGE = 500


@dataclass
class Report:
    tests: dict[str, str] = field(default_factory=dict)
    """PASSED, FAILED or SKIPPED, by id: TARGET::NAME."""
    messages: dict[str, str] = field(default_factory=dict)
    """Why a test failed, by its id, and why a target could not be compiled or imported, by the target."""

    def add(self, id: str, outcome: str) -> None:
        """A test that is reported twice with different outcomes has failed."""
        self.tests[id] = outcome if self.tests.get(id, outcome) == outcome else FAILED


def parse(report_format: str, report: bytes, targets: Sequence[str]) -> Report:
    """The outcome of every test of the targets that were run; raises ValueError for what is no such report."""
    return FORMATS[report_format](report, targets)


# -- pytest -----------------------------------------------------------------------------------------------------------


def parse_junit(report: bytes, targets: Sequence[str]) -> Report:
    modules = {
        re.sub(r"\.py$", "", file.partition("::")[0]).replace("/", "."): file.partition("::")[0] for file in targets
    }
    if b"<!DOCTYPE" in report or b"<!ENTITY" in report:
        raise ValueError("entities expand without bound")
    try:
        cases = list(ElementTree.fromstring(report).iter("testcase"))
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from error
    found = Report()
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        id = _pytest_id(case, modules)
        if problem is not None:
            text = problem.get("message") or problem.text or ""
            found.messages[id or str(case.get("name"))] = text[:MAX_MESSAGE]
        if id is not None:
            is_skipped = case.find("skipped") is not None
            found.add(id, FAILED if problem is not None else SKIPPED if is_skipped else PASSED)
    return found


def _pytest_id(case: ElementTree.Element, modules: Mapping[str, str]) -> "str | None":
    """Pytest's id of a test case; None for a file that could not be collected. `modules`: files that were run, by the
    name of their module. A case's own attribute `file` is where the function is defined, perhaps in a base class."""
    owner, name = case.get("classname", ""), case.get("name", "")
    parts = owner.split(".")
    for num in range(len(parts), 0, -1):
        if (file := modules.get(".".join(parts[:num]))) is not None:
            return "::".join([file, *parts[num:], name])
    return None


FORMATS: "Mapping[str, Callable[[bytes, Sequence[str]], Report]]" = {"pytest-junit": parse_junit}


# -- verification -----------------------------------------------------------------------------------------------------


def run(repository: Path, tests: Path, logs: Path) -> float:
    # A copy of swe_tests.py lies beside this file.
    sys.path.insert(0, str(tests))
    swe_tests = importlib.import_module("swe_tests")
    instance = json.loads((tests / "instance.json").read_text(encoding="utf-8"))
    wanted = [*instance["FAIL_TO_PASS"], *instance["PASS_TO_PASS"]]
    patch = tests / "test.patch"
    for name in swe_tests.patched_files(patch.read_text(encoding="utf-8")):
        swe_tests.restore(repository, instance["base_commit"], name)
    subprocess.run([*swe_tests.GIT, "apply", "--whitespace=nowarn", str(patch)], cwd=repository, check=True)
    # Standard output is the reward's: tested code must not have it.
    env = {**os.environ, VARIABLE: str(logs / REPORT)}
    subprocess.run(instance["command"], cwd=repository, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    targets = sorted({id.partition("::")[0] for id in wanted})
    found = parse(instance["report"], (logs / REPORT).read_bytes(), targets).tests
    missing = [id for id in wanted if found.get(id) != PASSED]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} tests passed", *missing[:20], sep="\n  ", file=sys.stderr)
    return float(not missing)


if __name__ == "__main__":
    print(f"{run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])):g}")
