"""What is installed: the pinned requirements are complete and hold no more than pyproject.toml asks for."""

import re
import subprocess
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OF_TORCH = ("nvidia-", "cuda-", "triton")
"""Packages that a CUDA build of torch pins itself."""
BUILDS = {"setuptools"}
"""Installs the checkout."""


def read_pins(name: str) -> dict[str, str]:
    """The versions that a file of requirements pins, with the files that it includes."""
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            pins |= read_pins(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            package, version = line.split("==")
            pins[canonicalize_name(package)] = version
    return pins


def extra(name: str) -> list[str]:
    requirements: list[str] = PROJECT["optional-dependencies"][name]
    return requirements


def closure(requirements: Iterable[str]) -> dict[str, list[Requirement]]:
    """Every package that these requirements lead to, by the metadata of what is installed, with what asks for it."""
    found: dict[str, list[Requirement]] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        asked, of_extra = waiting.pop()
        name = canonicalize_name(asked.name)
        if name.startswith(OF_TORCH) or (asked.marker and not asked.marker.evaluate({"extra": of_extra})):
            continue
        is_known = name in found
        found.setdefault(name, []).append(asked)
        if not is_known or asked.extras:
            needs = distribution(name).requires or []
            waiting += [(Requirement(text), wanted) for text in needs for wanted in ("", *asked.extras)]
    return found


@pytest.mark.parametrize(
    ("file", "requirements"),
    [
        ("runtime.txt", PROJECT["dependencies"]),
        ("demo.txt", [*PROJECT["dependencies"], *extra("demo")]),
        ("corpus.txt", [*PROJECT["dependencies"], *extra("corpus")]),
    ],
    ids=["runtime", "demo", "corpus"],
)
def test_the_pins_are_what_is_needed_and_no_more(file: str, requirements: list[str]) -> None:
    needed, pins = closure(requirements), read_pins(file)
    assert set(pins) - BUILDS == set(needed) - BUILDS
    wrong = [
        f"{asked} is pinned to {pins[name]}"
        for name, all_asked in needed.items()
        for asked in all_asked
        if not asked.specifier.contains(pins[name], prereleases=True)
    ]
    assert wrong == []


def test_the_development_pins_hold_every_extra() -> None:
    pins = read_pins("dev.txt")
    needed = closure([text for name in ("corpus", "demo", "gguf", "postgres", "tasks") for text in extra(name)])
    assert set(needed) - set(pins) == set()
    tools = {canonicalize_name(Requirement(text).name) for text in extra("dev")} - {"m2forge"}
    assert tools - set(pins) == set()


def test_the_demo_installs_the_packages_of_the_demo(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "--file", str(ROOT / "Makefile"), f"--include-dir={ROOT}", "demo"]
    command += [f"VENV={tmp_path / 'none'}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"requirements/(\w+)\.txt", printed) == ["demo"]
    assert "examples/demo.py" in printed
