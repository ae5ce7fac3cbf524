"""The native library is built once, atomically, and its absence is no error."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "from m2forge.kernels import arithmetic; print(arithmetic.library() is not None)"


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=120
    )


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
    assert run(environment).stdout.strip() == "True"
    (built,) = (tmp_path / "m2forge").iterdir()
    stamp = built.stat().st_mtime_ns
    assert run(environment).stdout.strip() == "True"
    assert [path.stat().st_mtime_ns for path in (tmp_path / "m2forge").iterdir()] == [stamp]
    assert calls.read_text() == "called\n"


def test_switch_turns_the_library_off(environment: dict[str, str], tmp_path: Path) -> None:
    assert run({**environment, "M2FORGE_NATIVE": "0"}).stdout.strip() == "False"
    assert not (tmp_path / "m2forge").exists()


def test_failing_compiler_leaves_nothing_and_warns(environment: dict[str, str], tmp_path: Path) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    compiler.chmod(0o755)
    result = run({**environment, "CC": str(compiler)})
    assert result.stdout.strip() == "False"
    assert "no such target" in result.stderr
    assert list((tmp_path / "m2forge").iterdir()) == []


def test_a_machine_without_a_compiler_warns_with_the_remedy(environment: dict[str, str], tmp_path: Path) -> None:
    result = run({**environment, "CC": "no-such-compiler", "PATH": str(tmp_path)})
    assert result.stdout.strip() == "False"
    assert "no C compiler (no-such-compiler, gcc) on the PATH" in result.stderr
    assert "install gcc" in result.stderr
    assert run({**environment, "M2FORGE_NATIVE": "0", "PATH": str(tmp_path)}).stderr == ""
