"""What a test file costs, by what it loads: the whole suite runs the cheapest last, `make test-fast` runs only those.

A file's imports, at the top of the file, are followed through the package and through the modules beside the tests.
"""

import functools
import re
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("m2forge", "tests", "examples")
"""Packages whose modules are followed."""
IMPORT = re.compile(r"^(?:from ([\w.]+) import (?!\()(.+)|from ([\w.]+) import \(|import ([\w.]+))", re.MULTILINE)


class Cost(IntEnum):
    PROCESS = 0
    """The file itself, or a module beside the tests, starts processes: most take seconds, and wait for one another."""
    NETWORK = 1
    """It loads torch or a library to compare with, most to run or train a network."""
    LIGHT = 2


STARTS_PROCESSES = frozenset({"subprocess", "multiprocessing", "playwright.sync_api"})
LOADS_NETWORKS = frozenset({"torch", "transformers", "trl", "datasets", "gguf"})


@functools.cache
def cost_of(path: Path) -> Cost:
    return min(_own_cost(found) for found in _closure(path))


@functools.cache
def _own_cost(path: Path) -> Cost:
    """What a file costs by its own imports."""
    names = _imports(path)
    if STARTS_PROCESSES & names and not path.is_relative_to(ROOT / "m2forge"):
        return Cost.PROCESS
    return Cost.NETWORK if any(name.split(".")[0] in LOADS_NETWORKS for name in names) else Cost.LIGHT


def run_order(paths: Iterable[Path]) -> dict[Path, float]:
    """Sort keys of the files. Those that start processes and those that load networks alternate, each kind spread
    evenly: while the tests of one worker wait for processes, the other's compute. No long test is left for the end."""
    distinct = list(dict.fromkeys(paths))
    files = {cost: [path for path in distinct if cost_of(path) == cost] for cost in Cost}
    places = {path: (rank + 0.5) / len(found) for found in files.values() for rank, path in enumerate(found)}
    return places | {path: 1 + places[path] for path in files[Cost.LIGHT]}


def _closure(path: Path) -> set[Path]:
    found, left = {path}, [path]
    while left:
        modules = _modules(left.pop()) - found
        left += modules
        found |= modules
    return found


@functools.cache
def _modules(path: Path) -> frozenset[Path]:
    """The modules that a file imports from `PACKAGES`."""
    return frozenset(module for name in _imports(path) if (module := _module(name)) is not None)


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """What a file imports when it is loaded; names that it takes from a module too, as they may be modules."""
    names = set[str]()
    for module, taken, module_of_many, plain in IMPORT.findall(path.read_text(encoding="utf-8")):
        source = module or module_of_many or plain
        names |= {source, *(f"{source}.{name.split()[0]}" for name in taken.split(",") if name.strip())}
    return frozenset(names)


@functools.cache
def _module(name: str) -> Path | None:
    if name.split(".")[0] not in PACKAGES:
        return None
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return path if path.is_file() else None
