"""Tasks of writing tests (SWE-Test): a candidate in, trees that its own tests distinguish and a task folder out.

    a fix or a feature     the agent sees the code before it; its tests must fail there and pass at the finished code
    tests alone            the agent sees the finished code, whose tests let faults pass

In both, the agent's tests must find at least `MIN_KILLED` of the mutants that the project's own new tests find. Mutants
are of lines that the golden patch adds; where tests alone change, of functions whose names the test patch has, and only
those count that no older test finds. The finished code, its other spelling and the mutants lie in the folder's tests,
never in its environment. `written_tests` verifies; the golden solution is the test patch.
"""

import ast
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import tomli_w

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe import written_tests
from m2forge.pipelines.swe.candidate import Candidate, apply_to_tree
from m2forge.pipelines.swe.environment import Runner, apply_patch, mutant_limit
from m2forge.pipelines.swe.mutation import Mutation
from m2forge.pipelines.swe.statement import CLOSING, Statement, best_text, clean, introduction
from m2forge.pipelines.swe.structure import definitions
from m2forge.pipelines.swe.task import (
    MIN_KILLED,
    Observation,
    Route,
    added_lines,
    choose_mutants,
    task_files,
)
from m2forge.pipelines.swe.toolchains.python import RUNNABLE_NAME
from m2forge.pipelines.swe.toolchains.toolchain import Environment, TestRun
from m2forge.pipelines.swe.tree import Tree
from m2forge.pipelines.swe.written_tests import counted, sees
from m2forge.python_source import parse_python
from m2forge.records import JsonValue
from m2forge.tasks.folders.folder import CONFIG_NAME, FileKind, FolderFile
from m2forge.tasks.folders.swe_bench import TESTBED
from m2forge.tasks.folders.task_image import TaskImage

MIN_NEW_MUTANTS = 2
"""Mutants that the tests must find where tests alone change: nothing else distinguishes a good test from an empty
one."""
NUM_RIGHT = 2
"""Runs at the finished code as it was written; a test that fails at random fails in one of them or at the mutants."""
ROOT = 0
_TEST = """#!/bin/sh
mkdir -p /logs/verifier
exec python3 -I /tests/{name} {testbed} /tests /logs/verifier
"""
"""Isolated: modules of the repository must not stand before those of the verifier. No shell stays, whose memory tests
could write."""
_ASK = (
    "Write tests, in files that pytest collects. They run at the finished code, also spelled in another way, where all "
    "of them must pass, and at versions of it with a fault each, most of which they must find. {fails}Tests may write "
    "files in their temporary folder alone. Only tests that you add or change count; changes of other files, "
    "conftest.py and pytest's configuration among them, are undone first."
)
_FAILS = "At the code as it is now, at least one must fail. "

_Function = TypeVar("_Function", ast.FunctionDef, ast.AsyncFunctionDef)
Files = dict[str, str | None]
"""Files in which a tree differs from the base, by path; None: it lacks the file."""


@dataclass(frozen=True, slots=True)
class Trees:
    right: Files
    mutants: tuple[Files, ...]
    """Files in which each differs from the right tree."""
    functions: tuple[str, ...]
    """Names of the functions that have mutants."""
    has_fix: bool

    def to_dict(self) -> dict[str, JsonValue]:
        """What the verifier reads."""
        rights = [self.right] * NUM_RIGHT + [{path: text and respell(path, text) for path, text in self.right.items()}]
        return {
            "right": [dict(files) for files in rights],
            "wrong": [{}] if self.has_fix else [],
            "mutants": [dict(files) for files in self.mutants],
            "num_needed": math.ceil(MIN_KILLED * len(self.mutants)),
        }


# -- spelling ----------------------------------------------------------------------------------------------------------


def respell(path: str, source: str) -> str:
    """The same program in other words: no comments, other layout, and in functions `[name][0]` for every name that is
    read, so that no expression of more than one word is left. A file that is not Python stays as it is."""
    if not path.endswith(".py"):
        return source
    try:
        tree = _Respelled().visit(parse_python(source))
    except (SyntaxError, ValueError):
        return source
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


class _Respelled(ast.NodeTransformer):
    _depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return self._visit_body(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        return self._visit_body(node)

    def _visit_body(self, node: _Function) -> _Function:
        self._depth += 1
        node.body = [self.visit(inner) for inner in node.body]
        self._depth -= 1
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not self._depth or not isinstance(node.ctx, ast.Load):
            return node
        return ast.Subscript(ast.List([node], ast.Load()), ast.Constant(0), ast.Load())

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.value = None if node.value is None else self.visit(node.value)
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        node.body = [self.visit(inner) for inner in node.body]
        return node


# -- trees -------------------------------------------------------------------------------------------------------------


async def find_trees(candidate: Candidate, image: TaskImage, runner: Runner) -> Trees | Rejection:
    """Trees that the new tests of a candidate distinguish."""
    after = apply_to_tree(candidate.base, candidate.patch)
    right = _difference(candidate.base, after)
    has_fix = any(candidate.toolchain.is_source(path) for path in right)
    if not has_fix:
        right = {}
    if any(text is not None and "\0" in text for text in right.values()):
        return Rejection("no text", {"problem": "the patch changes binary files"})
    changed = tuple(path for path in candidate.targets if path in candidate.tests)
    if not changed:
        return Rejection("no test file", {"changed_tests": list[JsonValue](sorted(candidate.tests)[:20])})
    old = {path: candidate.base[path].content.decode(errors="replace") for path in changed if path in candidate.base}
    lines = added_lines(candidate.patch) if has_fix else _named_lines(candidate)
    sources = {
        path: after[path].content.decode(errors="replace")
        for path in sorted(lines)
        if path in after
        and path.endswith(".py")
        and candidate.toolchain.is_source(path)
        and "version" not in path.rpartition("/")[2]
    }
    chosen = choose_mutants(sources, lines, candidate.id)
    files = changed if has_fix else candidate.targets
    found = await _killed(candidate, chosen, sources, old, files, image, runner, has_fix=has_fix)
    if isinstance(found, Rejection):
        return found
    if len(found) < (1 if has_fix else MIN_NEW_MUTANTS):
        return Rejection(
            "no mutant", {"problem": "no new test finds faults", "tried": len(chosen), "found": len(found)}
        )
    mutants = tuple[Files, ...]({path: mutation.apply(sources[path])} for path, mutation in found)
    names = sorted({name for path, mutation in found for name in _functions_at(sources[path], mutation.line)})
    return Trees(right, mutants, tuple(names), has_fix)


def _difference(old: Tree, new: Tree) -> Files:
    paths = sorted(path for path in {*old, *new} if old.get(path) != new.get(path))
    return {path: new[path].content.decode(errors="replace") if path in new else None for path in paths}


def _named_lines(candidate: Candidate) -> dict[str, set[int]]:
    """Lines of the functions whose names the test patch adds."""
    words = set(
        re.findall(r"[A-Za-z_]\w*", "\n".join(re.findall(r"^\+(?!\+)(.*)", candidate.test_patch, re.MULTILINE)))
    )
    found: dict[str, set[int]] = {}
    for path, file in candidate.base.items():
        if path.endswith(".py") and candidate.toolchain.is_source(path):
            try:
                defined = definitions(file.content.decode(errors="replace"))
            except (SyntaxError, ValueError):
                continue
            for name, node in defined.items():
                if name.rpartition(".")[2] in words and not isinstance(node, ast.ClassDef):
                    found.setdefault(path, set()).update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _functions_at(source: str, line: int) -> list[str]:
    nodes = definitions(source).items()
    inside = [(name, node) for name, node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return [name for name, node in inside if not isinstance(node, ast.ClassDef)]


async def _killed(
    candidate: Candidate,
    chosen: Sequence[tuple[str, Mutation]],
    sources: Mapping[str, str],
    old: Mapping[str, str],
    files: Sequence[str],
    image: TaskImage,
    runner: Runner,
    *,
    has_fix: bool,
) -> list[tuple[str, Mutation]] | Rejection:
    """Mutants that new tests find; where tests alone change, those that no older one finds."""
    base_files = [path for path in files if path in candidate.base]
    old_run = await runner.run(candidate.toolchain, image, (candidate.patch,), base_files) if base_files else TestRun()
    found: list[tuple[str, Mutation]] = []
    async with runner.opened(image) as sandbox:
        for patch in (candidate.patch, candidate.test_patch):
            await apply_patch(sandbox, patch)
        sound = await runner.run_in(candidate.toolchain, sandbox, files)
        if sound.problem is not None:
            return Rejection("unfinished", {"problem": sound.problem})
        passed = sound.passed
        new = counted(passed, old_run.tests, old, candidate.tests)
        if not new:
            return Rejection("no new test", {"tests": len(passed)})
        for path, mutation in chosen:
            await sandbox.write(path, mutation.apply(sources[path]).encode())
            run = await runner.run_in(candidate.toolchain, sandbox, files, limit=mutant_limit(sound.cpu_s))
            await sandbox.write(path, sources[path].encode())
            # Without a report the test runner itself did not start: no single test has found the fault.
            if run.problem is not None or not sees(_plain(run), new):
                continue
            if has_fix or not sees(_plain(run), passed - new):
                found.append((path, mutation))
    return found


def _plain(run: TestRun) -> dict[str, str]:
    return {id: str(outcome) for id, outcome in run.tests.items()}


# -- folders -----------------------------------------------------------------------------------------------------------


def testing_statement(candidate: Candidate, plain: Statement, trees: Trees) -> Statement:
    """`plain`: the statement of the task that asks for the change itself."""
    if trees.has_fix:
        text = clean(plain.text.strip().removesuffix(CLOSING), candidate.test_patch)
        parts = [text, "None of this is done yet, and you need not do it.", _ASK.format(fails=_FAILS)]
        return replace(plain, text="\n\n".join(parts) + "\n")
    kind, text = best_text(replace(candidate, patch=candidate.patch + candidate.test_patch))
    names = "The tests of these functions let faults pass:\n\n" + "\n".join(f"- `{name}`" for name in trees.functions)
    parts = [introduction(candidate), names, *([f"Its authors wrote about their own tests:\n\n{text}"] if text else [])]
    return Statement("\n\n".join([*parts, _ASK.format(fails="")]) + "\n", kind or "tests", ())


def testing_files(
    candidate: Candidate,
    environment: Environment,
    observation: Observation,
    statement: Statement,
    trees: Mapping[str, JsonValue],
    facts: Mapping[str, JsonValue],
) -> dict[str, FolderFile]:
    """The files of the task folder. `trees`: what `Trees.to_dict` returns."""
    files = task_files(candidate, environment, observation, statement, Route.TEST, facts)
    program = Path(written_tests.__file__)
    instance = {
        "base_commit": candidate.base_commit,
        "test_paths": candidate.toolchain.test_path,
        "runnable": RUNNABLE_NAME,
        **trees,
    }
    table = tomllib.loads(files[CONFIG_NAME].content.decode())
    table["verifier"]["user"] = ROOT
    kept = {name: file for name, file in files.items() if not name.startswith("tests/")}
    return kept | {
        CONFIG_NAME: FolderFile(tomli_w.dumps(table).encode()),
        "tests/test.sh": FolderFile(_TEST.format(name=program.name, testbed=TESTBED).encode(), FileKind.EXECUTABLE),
        f"tests/{program.name}": FolderFile(program.read_bytes()),
        "tests/instance.json": FolderFile((json.dumps(instance, indent=1) + "\n").encode()),
        "solution/patch.diff": FolderFile(candidate.test_patch.encode("utf-8", "surrogatepass")),
    }
