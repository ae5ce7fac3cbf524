"""What is installed: the pinned requirements are complete and hold no more than pyproject.toml asks for, and the wheel
runs with nothing but its declared dependencies."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

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
    """Every package that these requirements lead to, by the metadata of what is installed, with what asks for it. Those
    that a CUDA build of torch pins are left out."""
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
    needed = closure([text for name in ("corpus", "demo", "gguf", "postgres", "ray", "tasks") for text in extra(name)])
    assert set(needed) - set(pins) == set()
    tools = {canonicalize_name(Requirement(text).name) for text in extra("dev")} - {"m2forge"}
    assert tools - set(pins) == set()


def test_the_demo_installs_the_packages_of_the_demo(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "--file", str(ROOT / "Makefile"), f"--include-dir={ROOT}", "demo"]
    command += [f"VENV={tmp_path / 'none'}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"requirements/(\w+)\.txt", printed) == ["demo"]
    assert "examples/demo.py" in printed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because a build writes into its source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "m2forge", folder / "source" / "m2forge", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    _run([sys.executable, "-m", "pip", "-qq", "wheel", *options, str(folder / "source")], folder)
    (path,) = folder.glob("*.whl")
    return path


def _run(command: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "m2forge").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    assert {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name} == expected


def _bare_environment(folder: Path, wheel: Path) -> Path:
    """The folder of the programs of an environment that holds the wheel and what it and the demo require, as links."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in closure([*PROJECT["dependencies"], *extra("demo")]):
        for part in {file.parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(str(distribution(name).locate_file(part)))
    for folder_of_cuda in Path(str(distribution("torch").locate_file(""))).glob("nvidia*"):
        (packages / folder_of_cuda.name).symlink_to(folder_of_cuda)
    python = str(folder / "bin" / "python")
    command = [sys.executable, "-m", "pip", "-qq", "--python", python, "install", "--no-deps", "--no-index"]
    _run([*command, "--no-compile", str(wheel)], folder)
    return folder / "bin"


def test_the_wheel_runs_the_demo_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    """The checkout is not on the path; examples and configs are copies, as a user has them."""
    programs = _bare_environment(tmp_path / "bare", wheel)
    assert "usage: m2forge" in _run([str(programs / "m2forge"), "--help"], tmp_path)
    place = _run([str(programs / "python"), "-c", "import m2forge; print(m2forge.__file__)"], tmp_path)
    assert Path(place).is_relative_to(tmp_path / "bare")
    for name in ("examples", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    printed = _run([str(programs / "python"), "examples/demo.py", "--smoke"], tmp_path)
    assert re.search(r"^after +\d+\.\d% after 1 steps of CISPO", printed, re.MULTILINE)
    assert "Before and after" in (tmp_path / "runs" / "smoke" / "report.html").read_text()
