"""The rules of the house, read from the source: floors, weights of imports, sizes, names.

Each rule is a function from a tree of files to its breaches, run on this repository and on a small tree with a planted
breach, so that a rule that cannot fail is noticed.
"""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from dev.words import count_of, lone_modules

ROOT = Path(__file__).parent.parent
PACKAGE = "m2forge"

FLOORS = (
    (
        "records",
        "protocols",
        "compiled",
        "config",
        "config_class",
        "renamed_key",
        "resolved",
        "config_schema",
        "errors",
        "files",
        "gguf_header",
        "http_client",
        "key",
        "listener",
        "logit_chunk",
        "importing",
        "loop_thread",
        "observe",
        "python_source",
        "unpack",
    ),
    ("kernels", "text", "tree", "sandbox"),
    ("model",),
    ("corpus", "train", "rollout", "weights", "gateway", "pool", "reward", "tasks", "agents", "cluster"),
    ("pretrain", "sft", "rl", "evaluate", "inference", "pipelines", "plan", "testing"),
    ("evolve", "trials"),
    (
        "page",
        "cli",
        "command_config",
        "command_option",
        "config_help",
        "dry_run",
        "plan_command",
        "server_command",
        "shell_completion",
        "starter",
        "tasks_command",
        "__main__",
    ),
)
"""Rooms by floor, lowest first. A room imports only from floors below its own; the lowest floor, the base, and the
highest, which starts the program, are free within themselves."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FREE_FLOORS = (0, len(FLOORS) - 1)

CODE_FOLDERS = (PACKAGE, "benchmarks", "examples", "tests")
LONG_FILE_LINES = 600
"""A longer file is reported, not refused: one idea may need it."""
MAX_FUNCTION_LINES = 80
MAX_TEST_NAME = 60
FORBIDDEN_WORDS = {"util", "utils", "helper", "helpers", "common", "misc", "manager"}
MAX_HELP_S = 0.5
MAX_LONE_MODULES = 40
REPEATED_NAMES = {
    # One noun per room: the room says whose it is.
    "config": "the room's configuration",
    "app": "the routes of a room's server",
    "server": "a room's server, assembled",
    "client": "what a room calls over HTTP",
    "stage": "a stage: the room's, or a pipeline's",
    "pipeline": "a pipeline: one per folder of pipelines",
    "run": "a run of the room: it starts and resumes",
    "loop": "the loop of a run: over steps, over episodes",
    "report": "what a room prints or writes about a result",
    "metrics": "a room's metrics, and the files of all rooms' metrics",
    "engine": "trains, or samples",
    "manifest": "lists what a folder holds, with digests: shards of a corpus, a version of weights",
    "checkpoint": "a model's folder; a training state that contains one",
    "build": "makes the room's product: a corpus, a network, a task",
    "batch": "what a step trains: episodes of the pool, their tensors",
    "store": "durable records of a room",
    "source": "readers of a room's inputs",
    "preset": "named configurations of a room",
    "worker": "the program in a worker process of the room",
    "folder": "a folder on disk: of a model, of a task",
    "environment": "a task's container: as a pipeline builds it, as a folder declares it",
    "atif": "Harbor's trajectory format: read, written",
    "chat": "OpenAI's chat dialect; chat in the terminal",
    "format": "the protocol of chat formats; the gateway's choice of one",
    "model": "the model that users open, and the starter's copy for them to edit",
    "agent": "the agent domain of tasks, and the starter's copy for users to edit",
}
"""File names that occur more than once, and what they stand for. Every other name stands for one file."""
PRIVATE = r"_[^_].*"
NAMED_ACCESS = ("getattr", "setattr", "delattr", "hasattr")
"""Functions, and methods such as monkeypatch's, that take an attribute's name as a string."""


def sources(root: Path, *folders: str, pattern: str = "*.py") -> Iterator[Path]:
    for folder in folders:
        yield from sorted((root / folder).rglob(pattern))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def outline(path: Path) -> ast.Module:
    """A module's docstring and, wherever they stand in it, its imports, classes and functions without their bodies."""
    return _read(path.read_text(encoding="utf-8")).outline


@dataclass(frozen=True, slots=True)
class _Source:
    """What the rules need of a file. Its syntax tree is not stored: half a million nodes would slow every test down."""

    outline: ast.Module
    num_of: int
    """Docstrings that begin with "Of"."""
    stored_private: frozenset[str]
    """Private names that it defines or assigns."""
    read_private: tuple[tuple[int, str, str], ...]
    """Line, name and owner of every private attribute that it reads or replaces, by a dot, by `getattr` and its kin or
    through `__dict__`, of an object other than `self` and `cls`. The owner is the variable or module of which it is an
    attribute, "" if that is an expression."""


@functools.cache
def _read(text: str) -> _Source:
    """By the text, since tests change files. Most rules read every file, and reading one takes them all their time."""
    tree = ast.parse(text)
    _, num_of = count_of([tree])
    nodes: list[ast.stmt] = []
    stored, read = set[str](), list[tuple[int, str, str]]()
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                nodes.append(node)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                nodes.append(node)
                stored.add(name)
            case ast.Attribute(attr=name) if name[0] == "_":
                if isinstance(node.ctx, ast.Store):
                    stored.add(name)
                read.append((node.lineno, name, _owner(node.value)))
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[first, *others]) if (
                called in NAMED_ACCESS
            ):
                match first, others:
                    case ast.Constant(value=str(target)), _:
                        owner, _, name = target.rpartition(".")
                        read.append((node.lineno, name, owner))
                    case _, [ast.Constant(value=str(name)), *_]:
                        read.append((node.lineno, name, _owner(first)))
            case ast.Subscript(value=ast.Attribute(value=value, attr="__dict__"), slice=ast.Constant(value=str(name))):
                read.append((node.lineno, name, _owner(value)))
            case ast.Name(id=name, ctx=ast.Store()):
                stored.add(name)
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    private = frozenset(name for name in stored if re.fullmatch(PRIVATE, name))
    accessed = tuple(one for one in read if re.fullmatch(PRIVATE, one[1]) and one[2] not in ("self", "cls"))
    whole = ast.Module([*tree.body[: ast.get_docstring(tree) is not None], *nodes], [])
    return _Source(whole, num_of, private, accessed)


def _owner(value: ast.expr) -> str:
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def imported_rooms(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and room of every import from the package, wherever it stands. The root module is the room ""."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == PACKAGE:
            names = [PACKAGE if alias.name.startswith("__") else f"{PACKAGE}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import, which lint refuses, has no place in the floors: let it fail here too.
            names = [f"{PACKAGE}.relative" if node.level else str(node.module)]
        else:
            continue
        for name in names:
            if name.split(".")[0] == PACKAGE:
                yield node.lineno, name.partition(".")[2].split(".")[0]


def floor_breaches(root: Path) -> list[str]:
    breaches = []
    for path in sources(root, PACKAGE):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        room, place = parts[0], path.relative_to(root)
        if room not in FLOOR_OF:
            breaches.append(f"{place}: room {room!r} has no floor; add it to FLOORS and docs/architecture.md")
            continue
        for line, other in imported_rooms(outline(path)):
            if other in ("", room):
                continue
            allowed = other in FLOOR_OF and (
                FLOOR_OF[other] < FLOOR_OF[room] or FLOOR_OF[other] == FLOOR_OF[room] in FREE_FLOORS
            )
            if not allowed:
                breaches.append(f"{place}:{line}: {room} must not import {other}")
    return breaches


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package, by its dotted name. The root module is left out: every import loads it first, and
    what it offers it imports when asked."""
    found = {}
    for path in sources(root, PACKAGE):
        parts = path.relative_to(root).with_suffix("").parts
        if parts == (PACKAGE, "__init__"):
            continue
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_modules(tree: ast.Module, known: Collection[str]) -> set[str]:
    """The modules of `known` that a module imports at any place: in functions and under TYPE_CHECKING too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in known else str(node.module) for name in inside}
    return names & {*known}


def circle_breaches(root: Path) -> list[str]:
    """Circles of imports between modules. Modules that import nothing but modules without circles are removed until
    none is left to remove; of the others, each on a circle is named with its way back to itself."""
    paths = modules(root)
    left = {name: imported_modules(outline(path), paths) - {name} for name, path in paths.items()}
    while free := {name for name, others in left.items() if not others}:
        left = {name: others - free for name, others in left.items() if name not in free}
    found: dict[frozenset[str], str] = {}
    for name in sorted(left):
        way = way_back(name, left)
        if way:
            found.setdefault(frozenset(way), " -> ".join(way))
    return [f"circle of imports: {way}" for way in found.values()]


def way_back(start: str, imports: Mapping[str, set[str]]) -> list[str]:
    """The shortest way along imports from a module back to itself, both ends included; empty if there is none."""
    ways, seen = [[start]], {start}
    for way in ways:
        for other in sorted(imports[way[-1]]):
            if other == start:
                return [*way, start]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []


def init_breaches(root: Path) -> list[str]:
    """`__init__.py` files hold no code, except the root's: it may import the package's modules when a name is used, and
    for type checkers, but not when it is itself imported."""
    breaches = []
    for path in sources(root, PACKAGE):
        if path.name != "__init__.py":
            continue
        if path.parent == root / PACKAGE:
            eager = [statement for statement in parse(path).body if not is_lazy(statement)]
            breaches += [
                f"{path.relative_to(root)}:{line}: imports a room at once"
                for line, room in imported_rooms(ast.Module(eager, []))
                if room
            ]
            continue
        for statement in parse(path).body[1:]:
            is_version = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__version__"
            if not is_version:
                breaches.append(f"{path.relative_to(root)}:{statement.lineno}: code in __init__.py")
    return breaches


def is_lazy(statement: ast.stmt) -> bool:
    """Whether a statement of a module runs none of its imports when the module is imported."""
    is_typing = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
    return is_typing or isinstance(statement, ast.FunctionDef)


def docstring_breaches(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: no module docstring"
        for path in sources(root, *CODE_FOLDERS)
        if not ast.get_docstring(outline(path))
    ]


def name_breaches(root: Path) -> list[str]:
    breaches = []
    for path in sources(root, *CODE_FOLDERS):
        place = path.relative_to(root)
        classes = [node.name for node in ast.walk(outline(path)) if isinstance(node, ast.ClassDef)]
        for name in [*place.with_suffix("").parts, *classes]:
            words = re.findall(r"[A-Z]?[a-z0-9]+", name)
            if FORBIDDEN_WORDS & {word.lower() for word in words}:
                breaches.append(f"{place}: {name!r} names no thing")
    return breaches


def repeat_breaches(root: Path) -> list[str]:
    """File names that stand for two things, and allowed repeats that do not repeat."""
    places: dict[str, list[str]] = {}
    for path in sources(root, PACKAGE):
        if path.name != "__init__.py":
            places.setdefault(path.stem, []).append(str(path.relative_to(root)))
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    breaches = [f"{', '.join(found)}: one name" for name, found in repeated.items() if name not in REPEATED_NAMES]
    if root == ROOT:
        breaches += [
            f"{name} does not repeat: remove it from REPEATED_NAMES" for name in REPEATED_NAMES.keys() - repeated
        ]
    return breaches


def lone_breaches(root: Path) -> list[str]:
    lone = lone_modules({name: outline(path) for name, path in modules(root).items()})
    too_many = (
        f"{len(lone)} modules have one importer, in their own room, at most {MAX_LONE_MODULES}: {', '.join(lone)}"
    )
    return [too_many] if len(lone) > MAX_LONE_MODULES else []


def of_breaches(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {num_of} docstrings begin with Of"
        for path in sources(root, PACKAGE)
        if (num_of := _read(path.read_text(encoding="utf-8")).num_of)
    ]


def long_files(root: Path) -> list[str]:
    found = []
    for pattern in ("*.py", "*.[ch]"):
        for path in sources(root, *CODE_FOLDERS, pattern=pattern):
            num_lines = len(path.read_text(encoding="utf-8").splitlines())
            if num_lines > LONG_FILE_LINES:
                found.append(f"{path.relative_to(root)}: {num_lines} lines, usually at most {LONG_FILE_LINES}")
    return found


def long_test_names(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {node.name} has {len(node.name)} characters, at most {MAX_TEST_NAME}"
        for path in sources(root, "tests")
        for node in ast.walk(outline(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > MAX_TEST_NAME
    ]


def private_names(root: Path) -> dict[str, set[str]]:
    """Private functions, classes and attributes of the package → the rooms that define them."""
    rooms: dict[str, set[str]] = {}
    for path in sources(root, PACKAGE):
        room = path.relative_to(root / PACKAGE).with_suffix("").parts[0]
        for name in _read(path.read_text(encoding="utf-8")).stored_private:
            rooms.setdefault(name, set()).add(room)
    return rooms


def private_breaches(root: Path) -> list[str]:
    """Tests that import, read or replace a private name of a room other than their own. The room is that of the import
    by which a test knows the owner; where that is not imported, or defined by tests, any room that defines the name."""
    rooms, breaches = private_names(root), []
    for path in sources(root, "tests"):
        place, source = path.relative_to(root), _read(path.read_text(encoding="utf-8"))
        own = place.parts[1].removeprefix("test_").removesuffix(".py")
        origins = dict(_origins(source.outline))
        imported = [
            (node.lineno, alias.name, str(node.module))
            for node in source.outline.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        for line, name, owner in (*imported, *source.read_private):
            package, *parts = origins.get(owner, owner if "." in owner else "tests").split(".")
            defining = rooms.get(name, set())
            if package != "tests":
                defining = defining & {*parts[:1]} if package == PACKAGE else set()
            if defining and own not in defining:
                breaches.append(f"{place}:{line}: {name} is private to {', '.join(sorted(defining))}")
    return breaches


def _origins(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each imported name → the dotted name of what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name


def mention_breaches(root: Path) -> list[str]:
    """Files of the package that docstrings, comments and documents name, but that do not exist. Users' own files in
    examples are called `my_*.py`."""
    known = {str(path.relative_to(root)) for folder in CODE_FOLDERS for path in sources(root, folder)}
    known |= {str(path.relative_to(root)) for path in sources(root, "dev")}
    breaches = []
    for path in [*sources(root, PACKAGE), *sources(root, "docs", pattern="*.md")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            breaches += [
                f"{path.relative_to(root)}:{number}: {name} does not exist"
                for name in re.findall(r"(?<![\w/.*-])((?:[a-z_]+/)*(?!my_)[a-z_]+\.py)\b", line)
                if not any(f"/{other}".endswith(f"/{name}") for other in known)
            ]
    return breaches


def function_breaches(root: Path) -> list[str]:
    breaches = []
    for path in sources(root, *CODE_FOLDERS):
        place = path.relative_to(root)
        for node in ast.walk(outline(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    breaches.append(f"{place}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}")
    return breaches


TORCHLESS = {("rl", "loop"), ("rl", "relay"), ("rollout", "server", "app"), ("gateway", "server")}


def torch_breaches(root: Path) -> list[str]:
    """Modules that must load without torch: the base, the command line, every room's config, the RL loop, which leaves
    networks to its child processes, and the HTTP servers that networks of other processes stand behind."""
    names = []
    for path in sources(root, PACKAGE):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "config" or FLOOR_OF.get(parts[1]) == 0 or parts[1] == "cli" or parts[1:] in TORCHLESS:
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    result = subprocess.run([sys.executable, "-c", program, *names], cwd=root, capture_output=True, text=True)
    return [result.stderr.strip()] if result.returncode else []


def target_breaches(root: Path) -> list[str]:
    """Targets that the documents tell a reader to make, against those of the Makefile."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (root / "Makefile").read_text(), re.MULTILINE))
    breaches = []
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (root / name).read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
        told = set(re.findall(r"\bmake ([a-z][a-z-]*)", code))
        breaches += [f"{name}: make {target} does not exist" for target in sorted(told - targets)]
    return breaches


RULES: list[Callable[[Path], list[str]]] = [
    floor_breaches,
    circle_breaches,
    init_breaches,
    docstring_breaches,
    name_breaches,
    repeat_breaches,
    lone_breaches,
    of_breaches,
    function_breaches,
    long_test_names,
    private_breaches,
    mention_breaches,
    torch_breaches,
    target_breaches,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


GOOD_FILES = {
    "Makefile": "test: ## run\nset-up:\n",
    "README.md": "Make sure, then make haste. `make test`\n```\nmake set-up\n```\n",
    "CONTRIBUTING.md": "`make test`\n",
    "m2forge/__init__.py": (
        '"""A."""\n\nTYPE_CHECKING = False\nif TYPE_CHECKING:\n    from m2forge.model import x\n\n__version__ = "1"\n\n'
        "def __getattr__(name):\n    from m2forge import model\n"
    ),
    "m2forge/errors.py": '"""A."""\n',
    "m2forge/config.py": '"""A."""\nfrom m2forge.errors import x\n',
    "m2forge/model/__init__.py": '"""A."""\n',
    "m2forge/model/config.py": '"""A."""\nimport m2forge.model\n',
    "m2forge/cli.py": '"""A."""\n\ndef f():\n    from m2forge import __version__, model\n',
    "m2forge/__main__.py": '"""A."""\nfrom m2forge.cli import main\n',
}
LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES

PLANTED = [
    (floor_breaches, "m2forge/errors.py", '"""A."""\nimport m2forge.model.config\n', "errors must not import model"),
    (floor_breaches, "m2forge/errors.py", '"""A."""\nfrom m2forge import model\n', "errors must not import model"),
    (floor_breaches, "m2forge/model/a.py", "def f():\n    from m2forge.cli import main\n", "a.py:2: model must not"),
    (floor_breaches, "m2forge/tree/a.py", "from m2forge.text import x\n", "tree must not import text"),
    (floor_breaches, "m2forge/model/a.py", "from ..cli import main\n", "model must not import relative"),
    (floor_breaches, "m2forge/attic/a.py", "", "room 'attic' has no floor"),
    (
        circle_breaches,
        "m2forge/errors.py",
        '"""A."""\ndef f():\n    from m2forge import config\n',
        "m2forge.config -> m2forge.errors -> m2forge.config",
    ),
    (
        circle_breaches,
        "m2forge/errors.py",
        "if TYPE_CHECKING:\n    import m2forge.config\n",
        "m2forge.config -> m2forge.errors -> m2forge.config",
    ),
    (init_breaches, "m2forge/model/__init__.py", '"""A."""\nfrom m2forge.errors import x\n', "__init__.py:2: code"),
    (init_breaches, "m2forge/__init__.py", '"""A."""\nfrom m2forge.errors import x\n', "__init__.py:2: imports a room"),
    (docstring_breaches, "examples/a.py", "x = 1\n", "examples/a.py: no module docstring"),
    (name_breaches, "m2forge/model/tensor_utils.py", "", "'tensor_utils' names no thing"),
    (name_breaches, "m2forge/model/a.py", "class CacheManager:\n    pass\n", "'CacheManager' names no thing"),
    (repeat_breaches, "m2forge/tree/errors.py", "", "m2forge/errors.py, m2forge/tree/errors.py: one name"),
    (of_breaches, "m2forge/model/a.py", '"""A."""\nx = 1\n"""Of a thing."""\n', "a.py: 1 docstrings begin with Of"),
    (long_files, "m2forge/model/a.py", "x = 1\n" * (LONG_FILE_LINES + 1), "601 lines, usually at most 600"),
    (long_files, "m2forge/kernels/a.c", "int x;\n" * (LONG_FILE_LINES + 1), "a.c: 601 lines, usually at most 600"),
    (function_breaches, "m2forge/model/a.py", LONG_FUNCTION, "f has 81 lines, at most 80"),
    (
        private_breaches,
        "tests/text/test_a.py",
        "from m2forge.errors import _x\n",
        "tests/text/test_a.py:1: _x is private to errors",
    ),
    (private_breaches, "tests/text/test_a.py", "a = f()\na._x()\n", "tests/text/test_a.py:2: _x is private to errors"),
    (private_breaches, "tests/text/test_a.py", "patch.setattr(a, '_x', 1)\n", "test_a.py:1: _x is private to errors"),
    (private_breaches, "tests/text/test_a.py", "patch.setattr('m2forge.errors._x', 1)\n", "_x is private to errors"),
    (private_breaches, "tests/text/test_a.py", "a.__dict__['_x']\n", "test_a.py:1: _x is private to errors"),
    (
        private_breaches,
        "tests/model/test_a.py",
        "import os\nfrom m2forge import errors\nsetattr(errors, '_x', 1)\nsetattr(os, '_x', 1)\n",
        "tests/model/test_a.py:3: _x is private to errors",
    ),
    (mention_breaches, "m2forge/model/a.py", '"""As in gone.py."""\n', "a.py:1: gone.py does not exist"),
    (long_test_names, "tests/test_a.py", f"def test_{'a' * 56}(): pass\n", "has 61 characters, at most 60"),
    (torch_breaches, "m2forge/model/__init__.py", "import torch\n", "m2forge.model.config imports torch"),
    (target_breaches, "README.md", "```\nmake demo ARGS=1\n```\n", "README.md: make demo does not exist"),
]


@pytest.mark.parametrize("num", [MAX_LONE_MODULES, MAX_LONE_MODULES + 1])
def test_modules_with_one_importer_are_counted(tmp_path: Path, num: int) -> None:
    lone = {f"m2forge/model/a{number}.py": "" for number in range(num)}
    imports = "".join(f"import m2forge.model.a{number}\n" for number in range(num))
    plant(tmp_path, lone | {"m2forge/model/b.py": imports, "m2forge/model/__init__.py": ""})
    assert len(lone_breaches(tmp_path)) == num - MAX_LONE_MODULES


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(("rule", "name", "text", "breach"), PLANTED)
def test_a_planted_breach_is_caught(
    tmp_path: Path, rule: Callable[[Path], list[str]], name: str, text: str, breach: str
) -> None:
    # An empty torch, found first: the real one takes seconds.
    plant(tmp_path, GOOD_FILES | {"m2forge/errors.py": '"""A."""\nx = _x = 1\n', "torch.py": ""})
    assert rule(tmp_path) == []
    plant(tmp_path, {name: text})
    (found,) = rule(tmp_path)
    assert breach in found


def test_long_files_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        for line in long_files(ROOT):
            print(f"\nwarning: {line}", end="")


def test_help_answers_at_once() -> None:
    def help_s() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", PACKAGE, "--help"], cwd=ROOT, check=True, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    # CPU time and the best of three, because the machine may be busy with something else.
    assert min(help_s() for _ in range(3)) < MAX_HELP_S
