"""SWE-bench records become folders and records again, and their tests decide as SWE-bench does."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.cli import main
from m2forge.errors import DataError
from m2forge.records import JsonValue
from m2forge.tasks.folders.folder import read_folder, read_folders
from m2forge.tasks.folders.lint import lint
from m2forge.tasks.folders.swe_bench import folder_record, import_records, record_files
from m2forge.tasks.folders.swe_tests import passed, patched_files, report_name, run

OLD, NEW = "def double(x):\n    return x + 2\n", "def double(x):\n    return 2 * x\n"
TESTS = """import pytest
from code_ import double

def test_two():
    assert double(2) == 4

@pytest.mark.parametrize("x", [3, "a::b"])
def test_more(x):
    assert double(x) == x + x

class TestClass:
    def test_inner(self):
        assert double(5) == 10

@pytest.mark.skip
def test_skipped():
    pass
"""


def diff(name: str, old: str | None, new: str) -> str:
    lines = [f"diff --git a/{name} b/{name}"]
    lines += [f"--- a/{name}"] if old is not None else ["new file mode 100644", "--- /dev/null"]
    removed, added = (old or "").splitlines(), new.splitlines()
    lines += [f"+++ b/{name}", f"@@ -{int(bool(removed))},{len(removed)} +1,{len(added)} @@"]
    return "\n".join([*lines, *(f"-{line}" for line in removed), *(f"+{line}" for line in added), ""])


def record(**changes: JsonValue) -> dict[str, JsonValue]:
    return {
        "repo": "ada/doubles",
        "instance_id": "ada__doubles-7",
        "base_commit": "a" * 40,
        "patch": diff("code_.py", OLD, NEW),
        "test_patch": diff("tests/test_double.py", None, TESTS),
        "problem_statement": "double(3) is 5.\r\nIt should be 6.\n",
        "hints_text": "",
        "created_at": "2026-01-01T00:00:00Z",
        "version": "1.2",
        "FAIL_TO_PASS": json.dumps(
            ["tests/test_double.py::test_more[3]", "tests/test_double.py::TestClass::test_inner"]
        ),
        "PASS_TO_PASS": ["tests/test_double.py::test_two"],
        "environment_setup_commit": "b" * 40,
    } | changes


def written(tmp_path: Path, *records: object) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in records))
    return path


def test_records_survive_the_way_to_folders_and_back(tmp_path: Path) -> None:
    records = [record(), record(instance_id="b", extra={"x": [1]}, image_name="registry/x@sha256:" + "0" * 64)]
    del records[1]["PASS_TO_PASS"]
    assert main(["tasks", "import", str(written(tmp_path, *records)), str(tmp_path / "set")]) == 0
    folders, rejected = read_folders(tmp_path / "set")
    assert (len(folders), rejected) == (2, [])
    assert [folder.provenance.package for folder in folders] == ["ada/doubles"] * 2
    assert {finding.rule for folder in folders for finding in lint(folder.path)} == set()
    assert main(["tasks", "records", str(tmp_path / "set"), str(tmp_path / "again.jsonl")]) == 0
    assert [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()] == records


@given(
    st.text(min_size=1).filter(str.strip), st.text(), st.dictionaries(st.text(max_size=4).map("x".__add__), st.text())
)
def test_any_text_of_a_record_survives(statement: str, hints: str, extra: dict[str, str]) -> None:
    given_record = record(problem_statement=statement, hints_text=hints, **extra)
    files = record_files(given_record)
    texts = {"problem_statement": "instruction.md", "hints_text": "solution/hints.txt"}
    for key, name in texts.items():
        assert files[name].content.decode() == given_record[key]
    rest = json.loads(files["tests/instance.json"].content)
    assert rest.items() <= given_record.items()
    assert "patch" not in rest


def test_bad_records_are_rejected_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        record(),
        "{",
        "[]",
        record(instance_id="c", patch=None),
        record(instance_id="d", FAIL_TO_PASS="[]"),
        record(instance_id="e", FAIL_TO_PASS=["test_x (module.Case)"]),
        record(instance_id="f", repo="https://host/ada/doubles; rm"),
        record(instance_id="g", base_commit="main"),
        record(instance_id="h", test_paths="("),
        record(),
    ]
    path = written(tmp_path, *lines)
    assert main(["tasks", "import", str(path), str(tmp_path / "set")]) == 0
    output = capsys.readouterr()
    assert "1 folders; 9 records are rejected" in output.out
    expected = ("not valid JSON", "expected an object", "patch: expected text", "empty; nothing", "pytest's ids")
    for number, problem in enumerate(
        (*expected, "repo: expected OWNER/NAME", "base_commit: expected", "test_paths: expected", "is that of line 1")
    ):
        assert f"line {number + 2}: " in output.err
        assert problem in output.err
    with pytest.raises(DataError, match="no record of SWE-bench"):
        import_records(written(tmp_path, "{"), tmp_path / "other")
    assert main(["tasks", "records", str(tmp_path / "set" / "ada__doubles-7"), str(path)]) == 2
    folder = read_folder(tmp_path / "set" / "ada__doubles-7")
    shutil.rmtree(folder.path / "tests")
    with pytest.raises(DataError, match="only folders with the tests of SWE-bench have a record"):
        folder_record(folder)


def test_tests_of_a_record_decide(tmp_path: Path) -> None:
    repository, logs = tmp_path / "testbed", tmp_path / "logs"
    repository.mkdir()
    logs.mkdir()
    (repository / "code_.py").write_text(OLD)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    import_records(written(tmp_path, record(base_commit=commit)), tmp_path / "set")
    tests = tmp_path / "set" / "ada__doubles-7" / "tests"
    script = [sys.executable, str(tests / "swe_tests.py"), str(repository), str(tests), str(logs)]

    def reward() -> str:
        return subprocess.run(script, capture_output=True, text=True).stdout

    assert reward() == "0\n"
    patch = tests.parent / "solution" / "patch.diff"
    subprocess.run([*git, "apply", str(patch)], check=True)
    # Tests that an attempt replaced are restored, and a file in their place is removed.
    (repository / "tests" / "test_double.py").write_text("def test_two():\n    assert False\n")
    assert run(repository, tests, logs) == 1.0


def test_a_skipped_or_missing_test_has_not_passed(tmp_path: Path) -> None:
    case = '<testcase classname="a.Case" name="{}">{}</testcase>'
    kinds = {"good": "", "failed": "<failure/>", "errored": "<error/>", "skipped": "<skipped/>"}
    text = "".join(case.format(name, inner) for name, inner in kinds.items())
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    assert passed(tmp_path / "junit.xml") == {("a.Case", "good")}


def test_names_of_tests_are_those_of_the_report() -> None:
    assert report_name("a/b_test.py::Case::test_x[1::2]") == ("a.b_test.Case", "test_x[1::2]")
    assert report_name("test_a.py::test_x") == ("test_a", "test_x")
    patch = diff("a b.py", "x\n", "y\n") + diff("new.py", None, "z\n")
    assert patched_files(patch) == ["a b.py", "new.py"]
