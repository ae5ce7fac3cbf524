"""Folders of tests of any language: what is carried, what the reward is, and that Python's folders are as they were."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from m2forge.pipelines.swe.statement import Statement
from m2forge.pipelines.swe.task import Observation, Route, task_files
from m2forge.pipelines.swe.toolchains.toolchain import Environment
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.folders.suite_tests import FAILED, PASSED, SKIPPED, parse
from m2forge.tasks.folders.swe_bench import record_files
from tests.pipelines.swe import projects

RECORD = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0" * 40,
    "problem_statement": "p",
    "patch": "x",
    "test_patch": "y",
    "FAIL_TO_PASS": ["t.py::a"],
    "PASS_TO_PASS": ["t.py::b"],
}
WRITTEN = {
    Route.BUG: "ddc8710b2dd52a0fa9e95ce6a6349f940ea88e60d875c5fa8f67af2a74d5abc4",
    Route.FEATURE: "588d6a5b80228eeb7ee534ab9ba5f44d3d6a2cdc119ce49c14e06f06c90dd9a5",
    Route.PERF: "a4d3812a6fd428cac77494013661ffef29b9d2380bcc4dd18fad77552d6bf031",
}
"""Digests of folders. They change only with what folders carry: the programs that restore tests, and `test_paths`."""
WRITTEN_RECORD = "cf2541d56bf3e2808174c165f2a0aafaf56ef57a3dcf7e02b1f815915e55aaf6"


def digest(files: Mapping[str, FolderFile]) -> str:
    found = hashlib.sha256()
    for path, file in sorted(files.items()):
        found.update(f"{path}\0{file.kind}\0{len(file.content)}\0".encode() + file.content)
    return found.hexdigest()


@pytest.mark.parametrize("kind", WRITTEN)
def test_folders_of_python_are_as_ever(kind: Route) -> None:
    environment = Environment("python", ("pytest",), (), "3.12")
    wanted = ("tests/test_sums.py::test_total_of_all_numbers",), ("tests/test_sums.py::test_first",)
    statement = Statement("Fix total.\n", "changelog", ())
    observation = Observation(*wanted, (), {}, 0)
    files = task_files(projects.candidate(), environment, observation, statement, kind, {"mutants": {"killed": 1}})
    assert digest(files) == WRITTEN[kind]


def test_folders_of_swe_bench_are_as_ever() -> None:
    assert digest(record_files(dict(RECORD))) == WRITTEN_RECORD


JUNIT = '<testsuite><testcase classname="t" name="a"/><testcase classname="t" name="b">{}</testcase></testsuite>'


@pytest.mark.parametrize(("inner", "reward"), [("", "1"), ("<skipped/>", "0"), ("<failure/>", "0")])
def test_any_command_with_a_report_gives_the_reward(tmp_path: Path, inner: str, reward: str) -> None:
    repository, tests, logs = (tmp_path / name for name in ("testbed", "tests", "logs"))
    logs.mkdir()
    script = f"echo noise; printf '%s' '{JUNIT.format(inner)}' > \"$TEST_REPORT\"; exit 1"
    own = {"base_commit": "HEAD", "test_patch": "", "report": "pytest-junit", "command": ["sh", "-c", script]}
    record = {**RECORD, **own}
    for path, file in record_files(record).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(file.content)
    assert "suite_tests.py" in (tests / "test.sh").read_text()
    assert json.loads((tests / "instance.json").read_text())["report"] == "pytest-junit"
    projects.write_history(repository, ("base", {"a.txt": ""}))
    (tests / "test.patch").write_text(PATCH)
    command = [sys.executable, str(tests / "suite_tests.py"), str(repository), str(tests), str(logs)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"{reward}\n", done.stderr


PATCH = "--- /dev/null\n+++ b/t.py\n@@ -0,0 +1 @@\n+x = 1\n"


GO = r"""# example.com/sums/inner_test [example.com/sums/inner.test]
inner/a_test.go:3:31: undefined: B
{"Action":"run","Package":"example.com/sums","Test":"TestTotal"}
{"Action":"output","Package":"example.com/sums","Test":"TestTotal","Output":"=== RUN   TestTotal\n"}
{"Action":"run","Package":"example.com/sums","Test":"TestTotal/bad"}
{"Action":"output","Package":"example.com/sums","Test":"TestTotal/bad","Output":"    a_test.go:7: got 1, want 2\n"}
{"Action":"output","Package":"example.com/sums","Test":"TestTotal/bad","Output":"    --- FAIL: TestTotal/bad (0s)\n"}
{"Action":"fail","Package":"example.com/sums","Test":"TestTotal/bad","Elapsed":0}
{"Action":"fail","Package":"example.com/sums","Test":"TestTotal","Elapsed":0}
{"Action":"skip","Package":"example.com/sums","Test":"TestSkip","Elapsed":0}
{"Action":"pass","Package":"example.com/sums","Test":"TestFirst","Elapsed":0}
{"Action":"run","Package":"example.com/sums","Test":"TestPanics"}
{"Action":"fail","Package":"example.com/sums","Elapsed":0.005}
{"Action":"output","Package":"example.com/early","Output":"no database\n"}
{"Action":"fail","Package":"example.com/early","Elapsed":0.005}
{"Action":
FAIL	example.com/sums/inner [build failed]
"""


def test_events_of_go_become_outcomes() -> None:
    found = parse("go-json", GO.encode(), ())
    assert found.tests == {
        "example.com/sums::TestTotal": FAILED,
        "example.com/sums::TestTotal/bad": FAILED,
        "example.com/sums::TestSkip": SKIPPED,
        "example.com/sums::TestFirst": PASSED,
        "example.com/sums::TestPanics": FAILED,
    }
    assert found.messages["example.com/sums::TestTotal/bad"] == "a_test.go:7: got 1, want 2"
    assert found.messages["example.com/sums/inner"].startswith("inner/a_test.go:3:31: undefined: B")
    assert found.messages["example.com/early"] == "no database"
    assert "example.com/sums" not in found.messages


LIBTEST = """@target src/lib.rs
   Compiling sums v0.1.0 (/testbed)
running 4 tests
test tests::later ... ignored, not yet
test tests::panics - should panic ... ok
test tests::wrong ... FAILED
test a line of a program that is no test

failures:

---- tests::wrong stdout ----
hello
thread 'tests::wrong' panicked at 'numbers', src/lib.rs:2:41
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace


failures:
    tests::wrong

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s

@status 101
@target tests/bad.rs
error[E0425]: cannot find function `first` in crate `sums`
 --> tests/bad.rs:1:43
error: could not compile `sums` due to previous error

@status 101
@target tests/aborts.rs
running 2 tests
test early ... ok

@status 101
@target doc
running 3 tests
test src/lib.rs - total (line 14) ... FAILED
test src/lib.rs - total (line 7) ... ok
test src/lib.rs - first (line 30) - compile fail ... ok

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s

@status 101
"""


def test_output_of_rust_becomes_outcomes() -> None:
    found = parse("libtest", LIBTEST.encode(), ())
    assert found.tests == {
        "src/lib.rs::tests::later": SKIPPED,
        "src/lib.rs::tests::panics": PASSED,
        "src/lib.rs::tests::wrong": FAILED,
        "tests/aborts.rs::early": PASSED,
        "doc::src/lib.rs - total 1": PASSED,
        "doc::src/lib.rs - total 2": FAILED,
        "doc::src/lib.rs - first 1": PASSED,
    }
    assert found.messages["src/lib.rs::tests::wrong"].splitlines()[1].startswith("thread 'tests::wrong' panicked")
    assert found.messages["tests/bad.rs"].startswith("error[E0425]: cannot find function `first`")
    assert "tests/aborts.rs" in found.messages
    assert not {"src/lib.rs", "doc"} & set(found.messages)


@pytest.mark.parametrize("name", ["go-json", "libtest"])
def test_output_without_tests_has_no_outcomes(name: str) -> None:
    assert parse(name, b"sh: 1: exec: go: not found\n\xff", ()).tests == {}
