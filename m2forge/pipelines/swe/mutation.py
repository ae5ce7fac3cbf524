"""Small faults: a source file in, mutations out, each of which makes a mutant of it.

A mutation replaces the characters of one node, so the rest of the file stays as it was written. Each has a kind:

    compare     == ↔ !=, < ↔ <=, > ↔ >=, in ↔ not in, is ↔ is not
    logic       and ↔ or; a condition or `not x` negated
    arithmetic  + ↔ -, * ↔ /, // → *, % → *
    constant    a number plus one, True ↔ False
    result      the value of `return` replaced by None
    removed     a call or an assignment to an attribute or item replaced by nothing
    argument    the first argument of a call replaced by the second

Type annotations, docstrings, decorators, imports and messages of exceptions are left alone: tests rarely see them.
The kinds above are those of Python, by `ast`; `grammar` has those of JavaScript, Go, C and Rust, by tree-sitter.
"""

import ast
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeGuard

from m2forge.pipelines.swe import grammar
from m2forge.python_source import parse_python


@dataclass(frozen=True, slots=True, order=True)
class Mutation:
    start: int
    """Bytes of the file that are replaced."""
    end: int
    text: str
    kind: str
    line: int

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def mutant_key(path: str, text: str) -> str:
    """Names a tree that differs from a known one in one file. `text`: that file's."""
    return hashlib.sha256(f"{path}\0{text}".encode(errors="surrogatepass")).hexdigest()


def mutations(path: str, source: str, lines: Collection[int] | None = None) -> list[Mutation]:
    """All mutations of a file that start at one of the lines; empty for files in other languages, or Python files with
    syntax errors."""
    suffix = PurePosixPath(path).suffix
    if suffix == ".py":
        return sorted({found for found in _python_mutations(source) if lines is None or found.line in lines})
    found = grammar.faults(path, source, lines) if suffix in grammar.LANGUAGES else ()
    return sorted({Mutation(start, end, text, kind, line) for line, (kind, start, end, text) in found})


def functions(path: str, source: str) -> list[tuple[int, int]]:
    """First and last lines of functions that are in no other function."""
    suffix = PurePosixPath(path).suffix
    if suffix in grammar.LANGUAGES:
        return list(grammar.functions(path, source))
    return list(_python_functions(source)) if suffix == ".py" else []


_COMPARE: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}


def _python_mutations(source: str) -> Iterator[Mutation]:
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.expr) -> str:
        start, end = span(node)
        return source_bytes[start:end].decode()

    source_bytes = source.encode()
    for node in _mutable_nodes(tree):
        for kind, target, new in _python_faults(node, text):
            start, end = span(target)
            yield Mutation(start, end, new, kind, target.lineno)


def _mutable_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that tests may see, outermost first."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if _is_guard(node):
            pending += node.orelse
            continue
        yield node
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pending += [*node.body, node.args]
            case ast.arguments():
                pending += [default for default in (*node.defaults, *node.kw_defaults) if default is not None]
            case ast.ClassDef():
                pending += node.body
            case ast.AnnAssign():
                pending += [node.value] if node.value is not None else []
            case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Assert():
                continue
            case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("__"):
                continue
            case _:
                pending += ast.iter_child_nodes(node)


def _is_guard(node: ast.AST) -> TypeGuard[ast.If]:
    """Whether code is for type checkers, or for a module that is run as a program."""
    return isinstance(node, ast.If) and bool({"TYPE_CHECKING", "__name__"} & _names(node.test))


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _python_faults(node: ast.AST, text: Callable[[ast.expr], str]) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARE:
            yield "compare", node, f"({text(left)} {_COMPARE[type(operator)]} {text(right)})"
        case ast.BoolOp(op=operator, values=values):
            other = " or " if isinstance(operator, ast.And) else " and "
            yield "logic", node, f"({other.join(f'({text(value)})' for value in values)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "logic", node, f"(bool({text(operand)}))"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Constant):
                yield "logic", test, f"(not ({text(test)}))"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
            is_format = isinstance(operator, ast.Mod) and isinstance(left, ast.Constant | ast.JoinedStr)
            if not is_format:
                yield "arithmetic", node, f"({text(left)} {_BINARY[type(operator)]} {text(right)})"
        case ast.Constant(value=bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", node, f"({value!r} + 1)"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "result", value, "None"
        case ast.Expr(value=ast.Call()):
            yield "removed", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield "removed", node, "pass"
        case ast.Call(args=[first, second, *_]) if not any(isinstance(arg, ast.Starred) for arg in (first, second)):
            if text(first) != text(second):
                yield "argument", first, text(second)


def _python_functions(source: str) -> Iterator[tuple[int, int]]:
    try:
        pending: list[ast.AST] = [parse_python(source)]
    except (SyntaxError, ValueError):
        return
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.end_lineno or node.lineno
        else:
            pending += ast.iter_child_nodes(node)
