"""A tiny project for tests of the SWE pipeline: releases as trees, a git history, and wheels without a network."""

import functools
import json
import subprocess
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from m2forge.pipelines.swe.candidate import Candidate, make_candidate
from m2forge.pipelines.swe.toolchains.python import resolved_path, wheel_folder
from m2forge.pipelines.swe.tree import Release
from m2forge.tasks.folders.folder import FolderFile

LICENCE = "MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy\n"
SOURCE = "def total(numbers):\n    return sum(numbers[1:])\n\n\ndef first(numbers):\n    return numbers[0]\n"
FIXED = SOURCE.replace("numbers[1:]", "numbers")
TESTS = "from sums import first, total\n\n\ndef test_first():\n    assert first([4, 5]) == 4\n"
NEW_TESTS = TESTS + "\n\ndef test_total_of_all_numbers():\n    assert total([1, 2, 3]) == 6\n"
OLD = {"sums.py": SOURCE, "tests/test_sums.py": TESTS, "LICENSE": LICENCE, "CHANGES.md": "# 1.0\n\nFirst release.\n"}
NEW = {
    "sums.py": FIXED,
    "tests/test_sums.py": NEW_TESTS,
    "LICENSE": LICENCE,
    "CHANGES.md": "# 1.1\n\nFix `total`, which left out the first number (#12).\n\n# 1.0\n\nFirst release.\n",
}


def release(files: Mapping[str, str], name: str = "1.0") -> Release:
    return Release({path: FolderFile(text.encode()) for path, text in files.items()}, name=name)


@functools.cache
def candidate(source: str = FIXED, tests: str = NEW_TESTS) -> Candidate:
    new = {**NEW, "sums.py": source, "tests/test_sums.py": tests}
    found = make_candidate("sums-1.1", "sums", release(OLD), release(new, "1.1"), {"kind": "test"})
    assert isinstance(found, Candidate), found
    return found


def write_history(folder: Path, *states: tuple[str, Mapping[str, str]]) -> None:
    """A repository with a commit for each message and its files."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-C", str(folder)]
    folder.mkdir()
    subprocess.run([*git, "init", "-q"], check=True)
    for message, files in states:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", message], check=True)


def write_wheels(requirements: list[str], python: str) -> None:
    """Store what is installed of pytest as the wheel that fulfils the requirements."""
    name = "pytest-1.0-py3-none-any.whl"
    wheel_folder().mkdir(parents=True)
    with zipfile.ZipFile(wheel_folder() / name, "w") as wheel:
        for module in ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"):
            spec = find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            origin = Path(spec.origin)
            is_package = origin.name == "__init__.py"
            for path in origin.parent.rglob("*.py") if is_package else [origin]:
                if path.parent.name != "lexers" or path.stem in ("__init__", "_mapping", "python", "diff"):
                    wheel.write(path, str(path.relative_to(origin.parents[is_package])))
        # As with pluggy, on which pytest depends: tests must see the tree's own.
        wheel.writestr("sums.py", "raise ImportError('this is not the tested package')\n")
    path = resolved_path(requirements, python)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([name]))
