"""Test files are restored before a record's tests run, whatever an attempt made of them."""

import json
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from m2forge.pipelines.swe.toolchains.toolchain import TEST_PATH
from m2forge.records import JsonValue
from m2forge.tasks.folders import suite_tests, swe_tests
from tests.pipelines.swe import projects

SOURCE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x // 2\n"
FILES = {
    "code_.py": SOURCE.replace("2 * x", "x + 2"),
    "tests/test_half.py": "from code_ import half\nfrom tests.cases import CASES\n\n\n"
    "def test_half():\n    assert [half(x) for x in CASES] == [1, 2, 3]\n",
    "tests/cases.py": "CASES = [2, 4, 6]\n",
    "tests/__init__.py": "",
}
PATCH = (
    "--- /dev/null\n+++ b/tests/test_double.py\n@@ -0,0 +1,5 @@\n+from code_ import double\n+\n+\n"
    "+def test_double():\n+    assert double(3) == 6\n"
)
BROKEN = SOURCE.replace("x // 2", "x")


def scene(tmp_path: Path, **changes: JsonValue) -> tuple[Path, Path, Path]:
    repository, tests, logs = (tmp_path / name for name in ("testbed", "hidden", "logs"))
    projects.write_history(repository, ("base", FILES))
    tests.mkdir()
    logs.mkdir()
    (tests / "test.patch").write_text(PATCH)
    for module in (swe_tests, suite_tests):
        shutil.copy(str(module.__file__), tests)
    ids = {"FAIL_TO_PASS": ["tests/test_double.py::test_double"], "PASS_TO_PASS": ["tests/test_half.py::test_half"]}
    (tests / "instance.json").write_text(json.dumps({"base_commit": "HEAD", "test_paths": TEST_PATH, **ids, **changes}))
    return repository, tests, logs


def emptied(repository: Path) -> None:
    (repository / "tests" / "test_half.py").write_text("def test_half():\n    pass\n")


def with_a_module_that_comes_first(repository: Path) -> None:
    (repository / "tests" / "cases").mkdir()
    (repository / "tests" / "cases" / "__init__.py").write_text("CASES = [1, 2, 3]\n")


def with_another_folder(repository: Path) -> None:
    shutil.move(repository / "tests", repository / "own")
    (repository / "tests").symlink_to("own")
    (repository / "own" / "conftest.py").write_text("import code_\n\ncode_.half = lambda x: x // 2\n")


def with_a_compiled_helper(repository: Path) -> None:
    path = repository / "tests" / "cases.py"
    source = path.read_text()
    path.write_text("CASES = [1, 2, 3]\n")
    # Python does not compare it with the source.
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    path.write_text(source)


CHEATS = (emptied, with_a_module_that_comes_first, with_another_folder, with_a_compiled_helper)


@pytest.mark.parametrize("cheat", CHEATS)
def test_changed_tests_help_no_attempt(cheat: Callable[[Path], None], tmp_path: Path) -> None:
    repository, tests, logs = scene(tmp_path)
    (repository / "code_.py").write_text(BROKEN)
    cheat(repository)
    assert swe_tests.run(repository, tests, logs) == 0
    if cheat is with_another_folder:
        (repository / "code_.py").write_text(SOURCE)
        assert swe_tests.run(repository, tests, logs) == 1


def test_named_tests_are_restored_without_a_pattern(tmp_path: Path) -> None:
    repository, tests, logs = scene(tmp_path, test_paths=None)
    (repository / "code_.py").write_text(BROKEN)
    emptied(repository)
    assert swe_tests.run(repository, tests, logs) == 0


def test_tests_of_any_command_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["sh", "-c", 'cat tests/test_half.py tests/test_double.py > "$TEST_REPORT"']
    repository, tests, logs = scene(tmp_path, report="pytest-junit", command=command)
    monkeypatch.syspath_prepend(str(tests))
    (repository / "tests" / "test_half.py").write_text("<testsuite/>")
    with pytest.raises(ValueError, match="syntax error"):
        suite_tests.run(repository, tests, logs)
    assert (logs / "report").read_text().startswith(FILES["tests/test_half.py"])


def test_restored_tests_are_those_of_base_and_patch(tmp_path: Path) -> None:
    repository, tests, _ = scene(tmp_path)
    (repository / "tests" / "test_half.py").chmod(0o755)
    (repository / "tests" / "cases.py").unlink()
    (repository / "tests" / "cases.py").mkdir()
    (repository / "tests" / "test_double.py").write_text("# In the way.\n")
    (repository / "test_more.py").write_text("# Added.\n")
    (repository / "notes.txt").write_text("no test\n")
    age = (repository / "tests" / "__init__.py").stat().st_mtime_ns
    swe_tests.restore_tests(repository, tests, json.loads((tests / "instance.json").read_text()))
    found = {path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()}
    assert {path for path in found if not path.startswith(".git/")} == {*FILES, "tests/test_double.py", "notes.txt"}
    assert (repository / "tests" / "cases.py").read_text() == FILES["tests/cases.py"]
    assert not (repository / "tests" / "test_half.py").stat().st_mode & 0o111
    assert (repository / "tests" / "test_double.py").read_text().startswith("from code_ import double")
    # A build tool would compile it again.
    assert (repository / "tests" / "__init__.py").stat().st_mtime_ns == age
