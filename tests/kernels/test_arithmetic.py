"""The native library is built once, atomically, and its absence is no error."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from m2forge.kernels import arithmetic
from tests.forked import start


@dataclass(frozen=True)
class Outcome:
    is_there: bool
    printed: str


def run(environment: dict[str, str], folder: Path) -> Outcome:
    """Ask for the library in a process that has not asked before."""
    result, printed = folder / "result", folder / "printed"
    process = start(ask, environment, result, printed)
    process.join(120)
    assert process.exitcode == 0
    return Outcome(result.read_text() == "True", printed.read_text())


def ask(environment: dict[str, str], result: Path, printed: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    arithmetic.library.cache_clear()  # the process that this one was forked from may have asked
    result.write_text(str(arithmetic.library() is not None))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "M2FORGE_NATIVE": "1"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_library_is_built_once_and_reused(environment: dict[str, str], tmp_path: Path) -> None:
    # Without the optimizer, which takes most of the time; every other test of the kernels is of an optimized library.
    compiler, calls = tmp_path / "quick-cc", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho called >> "{calls}"\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    environment = {**environment, "CC": str(compiler)}
    assert run(environment, tmp_path).is_there
    (built,) = (tmp_path / "m2forge").iterdir()
    stamp = built.stat().st_mtime_ns
    assert run(environment, tmp_path).is_there
    assert [path.stat().st_mtime_ns for path in (tmp_path / "m2forge").iterdir()] == [stamp]
    assert calls.read_text() == "called\n"


def test_switch_turns_the_library_off(environment: dict[str, str], tmp_path: Path) -> None:
    assert not run({**environment, "M2FORGE_NATIVE": "0"}, tmp_path).is_there
    assert not (tmp_path / "m2forge").exists()


def test_failing_compiler_leaves_nothing_and_warns(environment: dict[str, str], tmp_path: Path) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    compiler.chmod(0o755)
    result = run({**environment, "CC": str(compiler)}, tmp_path)
    assert not result.is_there
    assert "no such target" in result.printed
    assert list((tmp_path / "m2forge").iterdir()) == []


def test_a_machine_without_a_compiler_warns_with_the_remedy(environment: dict[str, str], tmp_path: Path) -> None:
    result = run({**environment, "CC": "no-such-compiler", "PATH": str(tmp_path)}, tmp_path)
    assert not result.is_there
    assert "no C compiler (no-such-compiler, gcc) on the PATH" in result.printed
    assert "install gcc" in result.printed
    assert run({**environment, "M2FORGE_NATIVE": "0", "PATH": str(tmp_path)}, tmp_path).printed == ""
