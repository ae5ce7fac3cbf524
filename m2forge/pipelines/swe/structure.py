"""The structure of Python files: source text in, what it defines and calls out.

It imports the standard library alone, because the hidden tests of a refactoring carry a copy of this file (`goal.py`).
"""

import ast
import pathlib
from collections.abc import Iterator


def definitions(source: str) -> dict[str, ast.stmt]:
    """Functions, classes and methods by their qualified name."""
    return {name: node for name, node in _bindings(source) if isinstance(node, _DEFINITIONS)}


def names(source: str) -> set[str]:
    """All names that a file or a class in it binds: also by assignments and imports."""
    return {name for name, _ in _bindings(source)}


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _bindings(source: str) -> Iterator[tuple[str, ast.stmt]]:
    pending: list[tuple[str, ast.stmt]] = [("", node) for node in ast.parse(source).body]
    while pending:
        prefix, node = pending.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name, node
            case ast.ClassDef(name=name, body=body):
                yield prefix + name, node
                pending += [(f"{prefix}{name}.", inner) for inner in body]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((prefix + (alias.asname or alias.name), node) for alias in aliases)
            case ast.If() | ast.Try() | ast.With():
                pending += [(prefix, inner) for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)]
            case _:
                found = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
                yield from ((prefix + inner.id, node) for inner in found if isinstance(inner.ctx, ast.Store))


def called(node: ast.AST) -> set[str]:
    """Names of the functions and methods that a definition calls."""
    functions = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    plain = {function.id for function in functions if isinstance(function, ast.Name)}
    return plain | {function.attr for function in functions if isinstance(function, ast.Attribute)}


def num_nodes(node: ast.AST) -> int:
    """The size of a definition, which neither comments nor layout change."""
    return sum(1 for _ in ast.walk(node))


# -- goals: each is true of a tree or false ----------------------------------------------------------------------------


def read(path: str) -> str:
    """A file of the repository; empty if it is missing."""
    file = pathlib.Path(path)
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def is_renamed(source: str, old: str, new: str) -> bool:
    return new in definitions(source) and old not in names(source)


def is_moved(source: str, target: str, name: str) -> bool:
    return name in definitions(target) and name not in definitions(source)


def is_removed(source: str, name: str) -> bool:
    return name not in names(source)


def is_extracted(source: str, name: str, caller: str, max_nodes: int) -> bool:
    """Whether `caller` calls the new function, and has become smaller by it."""
    found = definitions(source)
    if name not in found or caller not in found:
        return False
    return name.rpartition(".")[2] in called(found[caller]) and num_nodes(found[caller]) <= max_nodes
