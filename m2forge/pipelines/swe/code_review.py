"""Tasks of code review: a candidate in, the same change with and without a fault and a task folder out.

    clean       the golden patch
    injected    the golden patch with a mutation in a line that it adds, which the hidden tests find
    reversed    a fix taken back

The agent sees the tree after the change, the change in `change.diff`, and neither the new tests nor what was written
about the change. Only source files differ: a changelog would reveal a reverted fix. Mutations are spelled as a person
would spell them. A candidate becomes a task only if it can have a fault, whether it then gets one or not, so that half
of all tasks are clean. `review_answer` verifies.
"""

import ast
import difflib
import json
import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tomli_w

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe import review_answer
from m2forge.pipelines.swe.candidate import Candidate, apply_to_tree
from m2forge.pipelines.swe.environment import Runner, apply_patch, mutant_limit
from m2forge.pipelines.swe.mutation import Mutation, mutations
from m2forge.pipelines.swe.statement import Statement, introduction
from m2forge.pipelines.swe.task import (
    Observation,
    Route,
    added_lines,
    is_killed,
    ordered_targets,
    task_files,
)
from m2forge.pipelines.swe.toolchains.toolchain import Environment
from m2forge.pipelines.swe.tree import Tree
from m2forge.python_source import parse_python
from m2forge.records import JsonValue
from m2forge.tasks.folders import swe_tests
from m2forge.tasks.folders.folder import CONFIG_NAME, FileKind, FolderFile
from m2forge.tasks.folders.swe_bench import TESTBED
from m2forge.tasks.folders.task_image import TaskImage

DIFF = "change.diff"
MAX_TRIES = 12
"""Mutations that are tried for one fault."""
MAX_FAULT_LINES = 10
"""A fix of more lines is not reverted: almost every line of the change would be right."""
_SOLVE = """#!/bin/sh
set -e
cp /solution/{answer} {testbed}/{answer}
"""
_ASK = (
    f"The change in `{DIFF}` was made to it; its files are as after the change. Review the change: it has one fault, "
    "in the lines that it changes, or none. Tests that it came with are not here.\n\n"
    f'Write your verdict to `{review_answer.ANSWER}` in the current folder: `{{"fault": false}}`, or '
    '`{"fault": true, "file": "PATH", "line": NUMBER}` with the place of the fault in the files as they are now; if '
    "lines are missing, the line before or after their place."
)


@dataclass(frozen=True, slots=True)
class Review:
    kind: Literal["clean", "injected", "reversed"]
    files: Mapping[str, str | None]
    """Source files in which the tree differs from the candidate's base; None: it lacks the file."""
    diff: str
    fault: Mapping[str, JsonValue] | None
    """File and lines of the fault."""

    def to_dict(self) -> dict[str, JsonValue]:
        fault = None if self.fault is None else dict(self.fault)
        return {"kind": self.kind, "files": dict(self.files), "diff": self.diff, "fault": fault}


# -- changes -----------------------------------------------------------------------------------------------------------


def clean_review(candidate: Candidate) -> Review:
    old, new = _sources(candidate)
    return Review("clean", new, _diff(old, new), None)


def injected_review(candidate: Candidate, path: str, mutation: Mutation) -> Review:
    old, new = _sources(candidate)
    source = new[path] or ""
    faulty = {**new, path: mutation.apply(source)}
    num_lines = source.encode()[mutation.start : mutation.end].count(b"\n") + 1
    lines: list[JsonValue] = list(range(mutation.line, mutation.line + num_lines))
    return Review("injected", faulty, _diff(old, faulty), {"file": path, "lines": lines})


def reversed_review(candidate: Candidate) -> Review | None:
    """The reverted golden patch; None if its form would reveal that, or almost every line would be right."""
    old, new = _sources(candidate)
    diff = _diff(new, old)
    places = [(path, line) for path, lines in fault_lines(diff).items() for line in sorted(lines)]
    files = {path for path, _ in places}
    if len(files) != 1 or len(places) > MAX_FAULT_LINES or any(text is None for text in old.values()):
        return None
    if candidate.origin.get("kind") == "injected" or re.search(r"^[-+].*version", diff, re.MULTILINE | re.IGNORECASE):
        return None
    lines: list[JsonValue] = [line for _, line in places]
    return Review("reversed", {}, diff, {"file": files.pop(), "lines": lines})


def _sources(candidate: Candidate) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Source files that the golden patch changes, before and after it."""
    after = apply_to_tree(candidate.base, candidate.patch)
    paths = {path for path in {*candidate.base, *after} if candidate.toolchain.is_source(path)}
    changed = sorted(path for path in paths if candidate.base.get(path) != after.get(path))

    def texts(tree: Tree) -> dict[str, str | None]:
        return {path: tree[path].content.decode() if path in tree else None for path in changed}

    return texts(candidate.base), texts(after)


def _diff(old: Mapping[str, str | None], new: Mapping[str, str | None]) -> str:
    lines: list[str] = []
    for path in sorted(new):
        before, after = ((texts[path] or "").splitlines(keepends=True) for texts in (old, new))
        left = "/dev/null" if old[path] is None else f"a/{path}"
        right = "/dev/null" if new[path] is None else f"b/{path}"
        lines += difflib.unified_diff(before, after, left, right)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def fault_lines(diff: str) -> dict[str, set[int]]:
    """Lines that a diff adds, by file, and those around what it only removes."""
    found = {path: set(lines) for path, lines in added_lines(diff).items()}
    path, number, removed_at = "", 0, -1
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[4:].removeprefix("b/")
        elif match := re.match(r"@@ -\d+(?:,\d+)? \+(\d+)", line):
            number, removed_at = int(match[1]), -1
        elif line.startswith("-") and not line.startswith("---"):
            removed_at = number
        elif line.startswith(("+", " ")):
            if line.startswith(" ") and removed_at == number:
                found.setdefault(path, set()).update({number - 1, number} - {0})
            removed_at, number = -1, number + 1
    return found


# -- mutations as a person would write them ----------------------------------------------------------------------------


def natural(source: str, mutation: Mutation) -> Mutation | None:
    """The mutation without the brackets and forms that only a program writes; None if it has no such spelling."""
    match mutation.kind:
        case "result" | "argument":
            return mutation
        case "constant":
            return replace(mutation, text=_constant(mutation.text))
        case "compare" | "arithmetic" | "logic" if not mutation.text.startswith("(bool("):
            own = source.encode()[mutation.start : mutation.end].decode()
            spelled, text = _plain(own), _plain(mutation.text)
        case _:
            return None
    if text is None or spelled != own:
        return None
    plain = replace(mutation, text=text)
    trees = [ast.dump(parse_python(one.apply(source))) for one in (plain, mutation)]
    return plain if trees[0] == trees[1] else None


def _plain(text: str) -> str | None:
    """An expression with no bracket that it does not need."""
    try:
        return ast.unparse(parse_python(f"({text}\n)"))
    except (SyntaxError, ValueError):
        return None


def _constant(text: str) -> str:
    """A number plus one, which is how a mutation writes it, as a number."""
    left, plus, right = text.strip("()").rpartition(" + ")
    return repr(ast.literal_eval(left) + ast.literal_eval(right)) if plus else text


# -- reviews of a candidate --------------------------------------------------------------------------------------------


async def find_reviews(
    candidate: Candidate,
    observation: Observation,
    kind: Route,
    image: TaskImage,
    runner: Runner,
    generator: random.Random,
) -> tuple[Review, Review] | Rejection:
    """The change without and with a fault."""
    try:
        clean = clean_review(candidate)
    except UnicodeDecodeError as error:
        return Rejection("no text", {"problem": str(error)})
    options = []
    if kind is Route.BUG and (taken_back := reversed_review(candidate)) is not None:
        options.append(taken_back)
    if (place := await _find_fault(candidate, clean, observation, image, runner, generator)) is not None:
        options.append(injected_review(candidate, *place))
    if not options:
        return Rejection("no fault", {"problem": "tests find no fault in the changed lines"})
    return clean, generator.choice(options)


async def _find_fault(
    candidate: Candidate,
    clean: Review,
    observation: Observation,
    image: TaskImage,
    runner: Runner,
    generator: random.Random,
) -> tuple[str, Mutation] | None:
    """A mutation of a line that the change adds, which the tests find."""
    choices = list(_choices(clean))
    generator.shuffle(choices)
    async with runner.opened(image) as sandbox:
        for patch in (candidate.patch, candidate.test_patch):
            await apply_patch(sandbox, patch)
        for path, mutation in choices[:MAX_TRIES]:
            source = clean.files[path] or ""
            await sandbox.write(path, mutation.apply(source).encode())
            run = await runner.run_in(
                candidate.toolchain, sandbox, ordered_targets(observation), limit=mutant_limit(observation.cpu_s)
            )
            await sandbox.write(path, source.encode())
            if run.problem is None and is_killed(run, observation):
                return path, mutation
    return None


def _choices(clean: Review) -> Iterator[tuple[str, Mutation]]:
    lines = added_lines(clean.diff)
    for path, source in clean.files.items():
        if source is not None and "version" not in path.rpartition("/")[2]:
            for mutation in mutations(path, source, lines.get(path, set())):
                if (plain := natural(source, mutation)) is not None:
                    yield path, plain


# -- folders -----------------------------------------------------------------------------------------------------------


def review_statement(candidate: Candidate) -> Statement:
    return Statement(f"{introduction(candidate)} {_ASK}\n", "rule", ())


def review_files(
    candidate: Candidate,
    environment: Environment,
    observation: Observation,
    review: Mapping[str, JsonValue],
    facts: Mapping[str, JsonValue],
) -> dict[str, FolderFile]:
    """The files of the task folder. `review`: what `Review.to_dict` returns."""
    tree = dict(candidate.base)
    changed = review["files"]
    assert isinstance(changed, dict)
    for path, text in changed.items():
        if text is None:
            tree.pop(path, None)
        else:
            kind = tree[path].kind if path in tree else FileKind.FILE
            tree[path] = FolderFile(str(text).encode(), kind)
    tree[DIFF] = FolderFile(str(review["diff"]).encode())
    own = replace(candidate, base=tree)
    files = task_files(own, environment, observation, review_statement(candidate), Route.BUG, facts)
    table = tomllib.loads(files[CONFIG_NAME].content.decode())
    table["task"]["keywords"] = ["review"]
    table["metadata"]["m2forge"]["kind"] = "review"
    fault = review["fault"]
    answer = {"fault": False}
    if isinstance(fault, dict):
        lines = fault["lines"]
        assert isinstance(lines, list)
        answer = {"fault": True, "file": fault["file"], "line": lines[0]}
    program = Path(review_answer.__file__)
    script = files["tests/test.sh"]
    by_answer = script.content.replace(
        f"-s /tests/{Path(swe_tests.__file__).name}".encode(), f"-I /tests/{program.name}".encode()
    )
    kept = {name: file for name, file in files.items() if not name.startswith(("tests/", "solution/"))}
    return kept | {
        CONFIG_NAME: FolderFile(tomli_w.dumps(table).encode()),
        "tests/test.sh": replace(script, content=by_answer),
        f"tests/{program.name}": FolderFile(program.read_bytes()),
        "tests/fault.json": FolderFile((json.dumps(fault) + "\n").encode()),
        f"solution/{review_answer.ANSWER}": FolderFile((json.dumps(answer) + "\n").encode()),
        "solution/solve.sh": FolderFile(
            _SOLVE.format(answer=review_answer.ANSWER, testbed=TESTBED).encode(), FileKind.EXECUTABLE
        ),
    }
