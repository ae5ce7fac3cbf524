"""Goals of a refactoring: a change that no test detects in, tests of the resulting structure out.

A change whose tests pass before and after has no F2P: doing nothing would pass too. Rules find what the change does to
the definitions of its Python files, as facts that hold after it and not before:

    renamed     a definition is gone, and a similar one of another name is in the same file and scope
    moved       a definition is gone from one file and is in another one
    removed     a definition is gone, and its file binds the name no more
    extracted   there is a function that another one calls, which has become smaller

The statement lists them. A hidden test file checks each by `ast`; its tests are the F2P of the task, and what passed
before is the P2P. A change without such a fact is rejected: nothing verifiable distinguishes it from no change.
"""

import ast
import difflib
import hashlib
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe import structure
from m2forge.pipelines.swe.candidate import Candidate, apply_to_tree
from m2forge.pipelines.swe.statement import Statement, best_text, introduction
from m2forge.pipelines.swe.structure import (
    called,
    definitions,
    is_extracted,
    is_moved,
    is_removed,
    is_renamed,
    num_nodes,
)
from m2forge.records import JsonValue

MAX_GOALS = 12
MIN_SIMILARITY = 0.8
"""Minimum share of common lines at which two definitions of different names count as one renamed."""


@dataclass(frozen=True, slots=True)
class Goal:
    check: Callable[..., bool]
    """A function of `structure`; it takes the texts of the files, then the values."""
    files: tuple[str, ...]
    values: tuple[str | int, ...]
    text: str

    def holds(self, sources: Mapping[str, str]) -> bool:
        return self.check(*(sources.get(file, "") for file in self.files), *self.values)

    @property
    def expression(self) -> str:
        """The check as Python."""
        arguments = [f"read({file!r})" for file in self.files] + [repr(value) for value in self.values]
        return f"{self.check.__name__}({', '.join(arguments)})"


def find_goals(old: Mapping[str, str], new: Mapping[str, str]) -> list[Goal]:
    """Goals of a change of Python files, each text by its path; they hold for the new ones and not for the old."""
    before, after = ({path: definitions(text) for path, text in sources.items()} for sources in (old, new))
    gone = [(path, name) for path in sorted(before) for name in before[path] if name not in after.get(path, {})]
    came = [(path, name) for path in sorted(after) for name in after[path] if name not in before.get(path, {})]
    goals: list[Goal] = []
    for path, name in _outermost(gone):
        target = _target(name, before[path][name], path, came, after)
        if target is None:
            goals.append(Goal(is_removed, (path,), (name,), f"`{path}` has no `{name}` any more."))
        elif target[0] == path:
            text = f"`{name}` of `{path}` is named `{target[1]}`, and the old name is gone."
            goals.append(Goal(is_renamed, (path,), (name, target[1]), text))
        else:
            text = f"`{name}` is defined in `{target[0]}` and no longer in `{path}`."
            goals.append(Goal(is_moved, (path, target[0]), (name,), text))
        came = [key for key in came if key != target]
    for path, name in _outermost(came):
        goals += _extracted(path, name, before.get(path, {}), after[path])
    return [goal for goal in goals if goal.holds(new) and not goal.holds(old)][:MAX_GOALS]


def _outermost(keys: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Without what is inside of another one."""
    found = set(keys)
    for path, name in sorted(keys):
        parts = name.split(".")
        if not any((path, ".".join(parts[:num])) in found for num in range(1, len(parts))):
            yield path, name


def _target(
    name: str,
    node: ast.stmt,
    path: str,
    came: Sequence[tuple[str, str]],
    after: Mapping[str, Mapping[str, ast.stmt]],
) -> tuple[str, str] | None:
    """The definition that a removed one became, if any."""
    for key in came:
        if key[0] != path and key[1] == name and type(after[key[0]][name]) is type(node):
            return key
    scope = name.rpartition(".")[0]
    near = [
        (_similarity(node, after[path][other]), other)
        for file, other in came
        if file == path and other.rpartition(".")[0] == scope and type(after[path][other]) is type(node)
    ]
    best = max(near, default=(0.0, ""))
    return (path, best[1]) if best[0] >= MIN_SIMILARITY else None


def _similarity(first: ast.stmt, second: ast.stmt) -> float:
    """Share of lines that two definitions have in common, their own names left out."""
    old, new = (
        [line.replace(getattr(node, "name", ""), "") for line in ast.unparse(node).splitlines()]
        for node in (first, second)
    )
    return difflib.SequenceMatcher(None, old, new, autojunk=False).ratio()


def _extracted(path: str, name: str, before: Mapping[str, ast.stmt], after: Mapping[str, ast.stmt]) -> Iterator[Goal]:
    short = name.rpartition(".")[2]
    for caller, node in sorted(after.items()):
        if isinstance(node, ast.ClassDef) or caller not in before:
            continue
        if (
            short in called(node)
            and short not in called(before[caller])
            and num_nodes(node) < num_nodes(before[caller])
        ):
            max_nodes = num_nodes(before[caller]) - 1
            text = f"`{path}` has a `{name}`, which `{caller}` calls, and `{caller}` is shorter than it is now."
            yield Goal(is_extracted, (path,), (name, caller, max_nodes), text)


# -- a candidate with goals --------------------------------------------------------------------------------------------


def add_goals(candidate: Candidate) -> tuple[Candidate, tuple[str, ...], tuple[str, ...]] | Rejection:
    """The candidate whose test patch also tests the structure, ids of these tests, and the goals' texts."""
    trees = (candidate.base, apply_to_tree(candidate.base, candidate.patch))
    paths = sorted(
        {path for tree in trees for path in tree if path.endswith(".py") and candidate.toolchain.is_source(path)}
    )
    changed = [path for path in paths if trees[0].get(path) != trees[1].get(path)]
    try:
        old, new = ({path: tree[path].content.decode() for path in changed if path in tree} for tree in trees)
        goals = find_goals(old, new)
    except (SyntaxError, ValueError) as error:
        return Rejection("no verifiable goal", {"problem": f"a file is not Python: {error}"})
    if not goals:
        return Rejection("no verifiable goal", {"changed": list[JsonValue](changed[:20])})
    source = write_tests(goals)
    name = f"test_structure_{hashlib.sha256(source.encode()).hexdigest()[:8]}.py"
    path = posixpath.join(posixpath.dirname(candidate.targets[0]), name)
    ids = tuple(f"{path}::{_test_name(number)}" for number in range(len(goals)))
    added = replace(
        candidate,
        test_patch=candidate.test_patch + new_file_patch(path, source),
        targets=tuple(sorted((*candidate.targets, path))),
        tests={**candidate.tests, path: source},
    )
    return added, ids, tuple(goal.text for goal in goals)


def write_tests(goals: Sequence[Goal]) -> str:
    """A test file with a test for each goal."""
    parts = [Path(structure.__file__).read_text(encoding="utf-8")]
    for number, goal in enumerate(goals):
        parts.append(f"def {_test_name(number)}():\n    {goal.text!r}\n    assert {goal.expression}\n")
    return "\n\n".join(parts)


def _test_name(number: int) -> str:
    return f"test_goal_{number + 1}"


def new_file_patch(path: str, text: str) -> str:
    """A patch that adds a file, whose last line ends."""
    lines = text.splitlines()
    head = (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    )
    return head + "".join(f"+{line}\n" for line in lines)


def goal_statement(candidate: Candidate, texts: Sequence[str]) -> Statement:
    """What was written about the change, and the structure that tests check."""
    kind, text = best_text(candidate)
    parts = [introduction(candidate), *(["Make this change:", text] if text else [])]
    parts.append("Afterwards the structure of the code must be so:\n\n" + "\n".join(f"- {goal}" for goal in texts))
    parts.append("Let everything that works go on working: its behaviour is tested too.")
    return Statement("\n\n".join(parts) + "\n", kind or "structure", ())
