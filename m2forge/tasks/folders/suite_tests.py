"""Reads reports of tests of any language, and verifies a task folder by them: a patched repository in, 1 or 0 out.

    suite_tests.py /testbed /tests /logs/verifier

`instance.json` names the command, the format of its report, the tests that must fail before and pass after
(FAIL_TO_PASS) and those that must go on passing (PASS_TO_PASS). The command runs in the repository and writes its
report to the path in the variable TEST_REPORT. Test files are first restored, as `swe_tests.py` says. The reward is 1
if every named test passed: one that was skipped, or is missing from the report, has not.

    pytest-junit    JUnit's XML as pytest writes it (junit_family=xunit1)
    go-json         events of `go test -json`, and what the compiler prints between them
    libtest         output of Rust's test programs, each after a line "@target NAME" and before one "@status NUMBER"
    programs        JSON Lines, the outcome and the output of each test program; single tests by the forms in which
                    test libraries print them

It imports the standard library alone, because task folders carry a copy of this file beside that of swe_tests.py.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def _pytest_id(case: ElementTree.Element, modules: Mapping[str, str]) -> str | None:
    """Pytest's id of a test case; None for a file that could not be collected. `modules`: files that were run, by the
    name of their module. A case's own attribute `file` is where the function is defined, perhaps in a base class."""
    owner, name = case.get("classname", ""), case.get("name", "")
    parts = owner.split(".")
    for num in range(len(parts), 0, -1):
        if (file := modules.get(".".join(parts[:num]))) is not None:
            return "::".join([file, *parts[num:], name])
    return None


# -- Go ---------------------------------------------------------------------------------------------------------------


def parse_go(report: bytes, targets: Sequence[str]) -> Report:
    found = Report()
    outputs: dict[str, list[str]] = {}
    failed: set[str] = set()
    compiled = ""
    for line in report.decode(errors="replace").splitlines():
        event = _go_event(line)
        if event is None:
            # The compiler names a package, then its errors; the build's result comes last.
            if match := re.match(r"# (\S+)(?: \[(\S+)\.test\])?", line):
                compiled = match[2] or match[1]
            elif match := re.match(r"FAIL\s+(\S+) \[(?:build|setup) failed\]", line):
                failed.add(match[1])
            else:
                outputs.setdefault(compiled, []).append(line)
            continue
        package, test, action = str(event.get("Package", "")), event.get("Test"), event.get("Action")
        id = f"{package}::{test}" if test else package
        if action == "output":
            outputs.setdefault(id, []).append(str(event.get("Output", "")))
        elif test and action == "run":
            # A test that never ends, since its process did, has failed.
            found.tests[id] = FAILED
        elif test and action in _GO_OUTCOMES:
            found.tests[id] = _GO_OUTCOMES[action]
        elif action == "fail":
            failed.add(package)
    named = {id for id, outcome in found.tests.items() if outcome == FAILED}
    # A package that failed though none of its tests did could not be compiled, or ended early.
    failed -= {id.partition("::")[0] for id in named}
    found.messages |= {id: _shown(outputs.get(id, [])) or "failed" for id in sorted(named | failed)}
    return found


_GO_OUTCOMES = {"pass": PASSED, "fail": FAILED, "skip": SKIPPED}


def _go_event(line: str) -> Mapping[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "Action" in event else None


def _shown(lines: Sequence[str]) -> str:
    """What was printed, without the lines by which a test begins and ends."""
    kept = [line.strip() for line in lines if not re.match(r"\s*(?:===|---) [A-Z]|\s*$|FAIL\b|exit status", line)]
    return "\n".join(kept)[:MAX_MESSAGE]


# -- Rust -------------------------------------------------------------------------------------------------------------

_LIBTEST = re.compile(r"test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)(?:, .*)?")
_RUST_OUTCOMES = {"ok": PASSED, "FAILED": FAILED, "ignored": SKIPPED}
_EXAMPLE = re.compile(r"(.+) \(line (\d+)\)(.*)")


def parse_libtest(report: bytes, targets: Sequence[str]) -> Report:
    found = Report()
    text = report.decode(errors="replace")
    for part in re.split(r"^@target ", text, flags=re.MULTILINE)[1:]:
        target, _, output = part.partition("\n")
        _parse_target(target, output, found)
    return found


def _parse_target(target: str, output: str, found: Report) -> None:
    lines = output.splitlines()
    tests = [match for line in lines if (match := _LIBTEST.fullmatch(line))]
    names = _stable_names([match[1] for match in tests])
    for match in tests:
        found.add(f"{target}::{names[match[1]]}", _RUST_OUTCOMES[match[2]])
    for name, printed in re.findall(r"^---- (.+?) stdout ----\n(.*?)(?=^---- |^failures:|\Z)", output, re.M | re.S):
        if name in names:
            shown = [line for line in printed.splitlines() if line.strip() and not line.startswith("note: ")]
            found.messages[f"{target}::{names[name]}"] = "\n".join(shown)[:MAX_MESSAGE]
    is_over = any(line.startswith("test result: ") for line in lines)
    if not is_over and "@status 0" not in lines:
        errors = [line for line in lines if line.startswith("error")]
        found.messages[target] = "\n".join(errors)[:MAX_MESSAGE] or "the test program did not end by itself"


def _stable_names(names: Sequence[str]) -> dict[str, str]:
    """Examples of documentation by their number among those of the same item: their lines move with every change."""
    examples = [match for name in names if (match := _EXAMPLE.fullmatch(name))]
    counts: dict[str, int] = {}
    found = {name: name for name in names}
    for match in sorted(examples, key=lambda match: (match[1], int(match[2]))):
        counts[match[1]] = number = counts.get(match[1], 0) + 1
        found[match[0]] = f"{match[1]} {number}"
    return found


# -- programs ---------------------------------------------------------------------------------------------------------

_TAP = re.compile(r"^(?P<indent> *)(?P<bad>not )?ok\b(?: (?P<number>\d+))?(?: -)? *(?P<name>.*)$")
_TAP_DIRECTIVE = re.compile(r"(?<!\\) # *(?P<word>SKIP|TODO|time)\b.*$", re.IGNORECASE)
_PRINTED = (
    re.compile(r"^\S+?:\d+:(?P<name>\w+):(?P<word>PASS|FAIL|IGNORE)\b"),  # Unity
    re.compile(r"^\S+?:\d+:(?P<word>[PFE]):(?P<name>[^:]+:[^:]+):\d+: "),  # Check
    re.compile(r"^\[ +(?P<word>OK|FAILED|SKIPPED) +\] (?P<name>[\w./]*[A-Za-z_][\w./]*)(?: \(.*)?$"),
    re.compile(r"^(?P<word>PASS|FAIL|SKIP): (?P<name>\S.*?)\s*$"),
)
_WORDS = {"PASS": PASSED, "OK": PASSED, "P": PASSED, "SKIP": SKIPPED, "SKIPPED": SKIPPED, "IGNORE": SKIPPED}


def parse_programs(report: bytes, targets: Sequence[str]) -> Report:
    """A program is a test of its own, TARGET::NAME, beside those that it prints, TARGET::NAME::TEST. Where a target is
    one program without a name, its outcome counts only if it prints no test."""
    found = Report()
    for line in report.decode(errors="replace").splitlines():
        record = json.loads(line)
        target = str(record["target"])
        if "broken" in record:
            found.messages[target] = str(record["broken"])[:MAX_MESSAGE]
            continue
        name, outcome, output = str(record.get("name", "")), str(record["outcome"]), str(record["output"])
        owner = f"{target}::{name}" if name else target
        printed = list(printed_tests(output, is_grouped=bool(record.get("is_grouped"))))
        for test, result in printed:
            found.add(f"{owner}::{test}", result)
        if name or not printed:
            id = owner if name else f"{owner}::exit"
            found.add(id, outcome)
            if outcome == FAILED:
                found.messages[id] = output.strip()[-MAX_MESSAGE:]
        if outcome == FAILED and not name and not printed:
            found.messages[target] = output.strip()[-MAX_MESSAGE:]
        for id in (f"{owner}::{test}" for test, result in printed if result == FAILED):
            found.messages[id] = found.messages.get(target, "")
    return found


def printed_tests(output: str, *, is_grouped: bool = False) -> "Iterator[tuple[str, str]]":
    """Name and outcome of each test that a program prints. `is_grouped`: comments of TAP name the tests to which the
    assertions after them belong."""
    owners: list[str] = []
    for line in output.splitlines():
        if subtest := re.match(r"^( *)# Subtest: (.*)$", line):
            owners[len(subtest[1]) // 4 :] = [subtest[2]]
        elif is_grouped and (group := re.match(r"^# (?!tests \d|pass +\d|fail +\d|ok$)(.+)$", line)):
            owners[:] = [group[1]]
        elif tap := _TAP.match(line):
            directive = _TAP_DIRECTIVE.search(tap["name"])
            name = _TAP_DIRECTIVE.sub("", tap["name"]).strip() or f"{tap['number']}"
            word = directive["word"].upper() if directive else ""
            depth = len(tap["indent"]) // 4
            own = owners[:depth] if not is_grouped else owners
            outcome = FAILED if tap["bad"] and word != "TODO" else SKIPPED if word in ("SKIP", "TODO") else PASSED
            yield " > ".join([*own, re.sub(r" \(\d+ ?ms\)$", "", name)]), outcome
        elif match := next(filter(None, (form.match(line) for form in _PRINTED)), None):
            yield match["name"], _WORDS.get(match["word"], FAILED)


FORMATS: Mapping[str, Callable[[bytes, Sequence[str]], Report]] = {
    "pytest-junit": parse_junit,
    "go-json": parse_go,
    "libtest": parse_libtest,
    "programs": parse_programs,
}


# -- verification -----------------------------------------------------------------------------------------------------


def run(repository: Path, tests: Path, logs: Path) -> float:
    # A copy of swe_tests.py lies beside this file.
    sys.path.insert(0, str(tests))
    swe_tests = importlib.import_module("swe_tests")
    instance = json.loads((tests / "instance.json").read_text(encoding="utf-8"))
    wanted = [*instance["FAIL_TO_PASS"], *instance["PASS_TO_PASS"]]
    swe_tests.restore_tests(repository, tests, instance)
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
