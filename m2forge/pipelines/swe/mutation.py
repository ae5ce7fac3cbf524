"""Small faults: mutants of Python files, and candidates made of them by bug injection.

A mutation replaces the characters of one node, so the rest of the file stays as it was written. Each has a kind:

    compare     == ↔ !=, < ↔ <=, > ↔ >=, in ↔ not in, is ↔ is not
    logic       and ↔ or; a condition or `not x` negated
    arithmetic  + ↔ -, * ↔ /, // → *, % → *
    constant    a number plus one, True ↔ False
    result      the value of `return` replaced by None
    removed     a call or an assignment to an attribute or item replaced by nothing
    argument    the first argument of a call replaced by the second

Type annotations, docstrings, decorators, imports and messages of exceptions are left alone: tests rarely see them.

Bug injection takes a release whose tests pass. A mutation of a source file is tried in a sandbox. It is a bug if tests
that passed three times without it fail with it, and no more than `MAX_BROKEN` of all: a fault that breaks everything
teaches nothing. The candidate's base is the faulty tree without the test functions that failed; its golden patch undoes
the fault, its test patch restores the functions.
"""

import ast
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TypeGuard

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.candidate import Candidate, make_candidate
from m2forge.pipelines.swe.environment import Runner, build
from m2forge.pipelines.swe.toolchains.table import detect
from m2forge.pipelines.swe.toolchains.toolchain import Environment, Outcomes, TestRun, Toolchain
from m2forge.pipelines.swe.tree import Release
from m2forge.records import JsonValue
from m2forge.tasks.folders.task_image import TaskImage


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


def mutations(path: str, source: str, lines: Collection[int] | None = None) -> list[Mutation]:
    """All mutations of a file that start at one of the lines; empty for other languages and files with errors."""
    if PurePosixPath(path).suffix != ".py":
        return []
    return sorted({found for found in _python_mutations(source) if lines is None or found.line in lines})


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
        tree = ast.parse(source)
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
        for kind, place, new in _python_faults(node, text):
            start, end = span(place)
            yield Mutation(start, end, new, kind, place.lineno)


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


# -- bug injection -----------------------------------------------------------------------------------------------------

NUM_RUNS = 3
MAX_BROKEN = 0.5
MAX_TRIES = 4
"""Mutations that are tried for each bug that is asked for."""
TRIAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Sound:
    """A release with its environment and the tests that always pass."""

    package: str
    release: Release
    licence: str
    toolchain: Toolchain
    environment: Environment
    image: TaskImage
    passing: frozenset[str]


async def prepare_release(package: str, release: Release, licence: str, runner: Runner) -> Sound | Rejection:
    toolchain = detect(release.tree)
    targets = toolchain.targets(release.tree)
    if not targets:
        return Rejection("no test file", {"package": package})
    whole = Candidate(
        *(package, package, toolchain.name, {}, release.tree, release.metadata, licence, "", "", "", (), targets, {})
    )
    built = await build(whole, runner)
    if isinstance(built, Rejection):
        return built
    runs = [built.run, *[await runner.run(toolchain, built.image, (), targets) for _ in range(NUM_RUNS - 1)]]
    if problem := next((run.problem for run in runs if run.problem is not None), None):
        return Rejection("unfinished", {"problem": problem})
    passing = frozenset.intersection(*(frozenset(run.passed) for run in runs))
    if not passing:
        return Rejection("no P2P", {"output": built.run.output[-3000:]})
    return Sound(package, release, licence, toolchain, built.environment, built.image, passing)


async def inject(sound: Sound, num: int, runner: Runner, generator: random.Random) -> list[Candidate]:
    """Up to `num` candidates, each with another fault."""
    found: list[Candidate] = []
    targets = sorted({id.partition("::")[0] for id in sound.passing})
    async with runner.opened(sound.image) as sandbox:
        for path, mutation in _faults(sound, generator, num * MAX_TRIES):
            source = sound.release.tree[path].content.decode()
            await sandbox.write(path, mutation.apply(source).encode())
            run = await runner.run_in(sound.toolchain, sandbox, targets, timeout_s=TRIAL_S)
            await sandbox.write(path, source.encode())
            if (broken := broken_tests(sound.passing, run)) is not None:
                candidate = _candidate(sound, path, mutation, broken)
                found += [candidate] if isinstance(candidate, Candidate) else []
            if len(found) == num:
                break
    return found


def broken_tests(passing: Collection[str], run: TestRun) -> list[str] | None:
    """Tests that a fault breaks; None if it breaks none, too many, or the run decides nothing."""
    if run.problem is not None:
        return None
    broken = sorted(id for id in passing if run.tests.get(id) is Outcomes.FAILED)
    num_gone = sum(id not in run.tests for id in passing)
    return broken if broken and not num_gone and len(broken) <= MAX_BROKEN * len(passing) else None


def _faults(sound: Sound, generator: random.Random, num: int) -> list[tuple[str, Mutation]]:
    """Mutations spread over files and functions: one of each function before a second one of any."""
    groups: list[list[tuple[str, Mutation]]] = []
    for path, file in sorted(sound.release.tree.items()):
        if sound.toolchain.is_source(path) and path.endswith(".py") and "version" not in path.rpartition("/")[2]:
            try:
                source = file.content.decode()
            except UnicodeDecodeError:
                continue
            found = mutations(path, source)
            for start, end in _functions(source):
                group = [(path, mutation) for mutation in found if start <= mutation.line <= end]
                generator.shuffle(group)
                groups += [group] if group else []
    generator.shuffle(groups)
    rounds = max(map(len, groups), default=0)
    return [group[index] for index in range(rounds) for group in groups if index < len(group)][:num]


def _functions(source: str) -> Iterator[tuple[int, int]]:
    """First and last lines of functions that are in no other function."""
    try:
        pending: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):
        return
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.end_lineno or node.lineno
        else:
            pending += ast.iter_child_nodes(node)


def _candidate(sound: Sound, path: str, mutation: Mutation, broken: Sequence[str]) -> Candidate | Rejection:
    tree = dict(sound.release.tree)
    tree[path] = replace(tree[path], content=mutation.apply(tree[path].content.decode()).encode())
    names: dict[str, set[str]] = {}
    for file, function in _places(sound, broken):
        names.setdefault(file, set()).add(function)
    for file, functions in names.items():
        pruned = without_functions(tree[file].content.decode(errors="surrogateescape"), functions)
        tree[file] = replace(tree[file], content=pruned.encode(errors="surrogateescape"))
    origin: dict[str, JsonValue] = {
        "kind": "injected",
        "release": sound.release.name,
        "file": path,
        "line": mutation.line,
        "mutation": mutation.kind,
    }
    place = path.removesuffix(".py").replace("/", "-")
    id = f"{sound.package}-{sound.release.name}-{place}-{mutation.start}-{mutation.kind}"
    old = Release(tree, sound.release.metadata, sound.release.name)
    candidate = make_candidate(id, sound.package, old, sound.release, origin)
    if isinstance(candidate, Rejection):
        return candidate
    # Tests of other files say nothing about this fault, and make every gate slower.
    return replace(candidate, targets=tuple(sorted({id.partition("::")[0] for id in broken})))


def _places(sound: Sound, ids: Sequence[str]) -> list[tuple[str, str]]:
    """The test files and functions of tests."""
    is_test, tree = sound.toolchain.is_test, sound.release.tree
    tests = {path: file.content.decode(errors="replace") for path, file in tree.items() if is_test(path)}
    return [place for id in ids if (place := sound.toolchain.locate(id, tests)) is not None]


def without_functions(source: str, names: Collection[str]) -> str:
    """A test file without the functions of these names; a class or file stays valid."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return source
    lines = source.splitlines(keepends=True)
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.Module | ast.ClassDef):
            continue
        functions = [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        removed = [node for node in functions if node.name in names]
        for number, node in enumerate(removed):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            is_whole = len(removed) == len(owner.body) and number == 0
            indent = " " * node.col_offset
            lines[first - 1 : node.end_lineno] = [f"{indent}pass\n" if is_whole else ""] + [""] * (
                (node.end_lineno or first) - first
            )
    return "".join(lines)
