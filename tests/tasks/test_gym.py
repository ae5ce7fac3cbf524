"""Tasks of reasoning-gym: levels from its curricula, its scorers as verifiers, and what is refused."""

import ast
import importlib
import inspect
import random
import sys
import textwrap

import pytest

from m2forge.errors import ConfigError, DataError, NotFoundError
from m2forge.records import Submission, Task
from m2forge.tasks.catalog import find_family
from m2forge.tasks.library_family import EVALUATING, GymFamily, _num_levels

factory = importlib.import_module("reasoning_gym.factory")


def test_levels_come_from_the_curriculum() -> None:
    family = GymFamily("chain_sum")
    assert family.levels == range(11)
    lengths = [sum(len(family.draw(level, seed).instruction) for seed in range(30)) for level in (0, 4, 10)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]


def test_a_dataset_without_a_curriculum_has_one_level() -> None:
    family = GymFamily("gsm_symbolic")
    assert family.levels == range(1)
    task = family.draw(0, 5)
    assert family.verify(task, Submission(family.demonstrate(task, random.Random(0))[-1].content)).perf == 1


def test_the_scorer_is_the_library_s_own() -> None:
    family = GymFamily("chain_sum")
    task = family.draw(2, 1)
    right = family.verify(task, Submission("")).evidence["expected"]
    assert family.verify(task, Submission(f"{right}.00")).perf == 1  # it reads numbers, however they are written
    assert family.verify(task, Submission("9" * 70_000)).evidence["error"] == "70000 characters, at most 65536"


def test_part_of_the_credit_is_given_only_if_asked_for() -> None:
    task = GymFamily("chain_sum").draw(2, 1)
    near = f"1{GymFamily('chain_sum').verify(task, Submission('')).evidence['expected']}"
    whole, part = (
        GymFamily("chain_sum").verify(task, Submission(near)),
        GymFamily("chain_sum", credit="part").verify(task, Submission(near)),
    )
    assert (whole.perf, part.perf) == (0.0, 0.8)
    assert whole.evidence == part.evidence
    assert whole.evidence["score"] == 0.8


def test_tasks_of_another_version_are_noticed() -> None:
    task = find_family("reasoning-gym:chain_sum").draw(0, 0)
    changed = Task(task.id, task.domain, task.instruction + " ", task.difficulty, task.metadata)
    with pytest.raises(DataError, match="generates another question"):
        GymFamily("chain_sum").verify(changed, Submission("1"))


def test_a_level_that_the_library_cannot_make_is_refused() -> None:
    family = GymFamily("caesar_cipher")
    with pytest.raises(DataError, match=r"generates no task of level 3 \(rotation must be"):
        family.draw(family.levels[-1], 0)


def test_a_dataset_without_answers_has_no_demonstrations() -> None:
    family = GymFamily("graph_color")
    task = family.draw(0, 0)
    assert family.verify(task, Submission("{}")).perf < 1
    with pytest.raises(DataError, match="have no answer"):
        family.demonstrate(task, random.Random(0))


def test_unknown_datasets_are_refused_with_the_near_name() -> None:
    with pytest.raises(NotFoundError, match="did you mean 'chain_sum'"):
        GymFamily("chain_sums")


def test_every_dataset_whose_scorer_evaluates_answers_is_refused() -> None:
    found = set()
    for name, (dataset, _) in factory.DATASETS.items():
        if "score_answer" in vars(dataset):
            tree = ast.parse(textwrap.dedent(inspect.getsource(dataset.score_answer)))
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func).rpartition(".")[2]
                    if called in ("eval", "exec", "parse_expr", "sympify") and ast.unparse(node.args[0]) == "answer":
                        found.add(name)
    assert found == EVALUATING
    for name in found:
        with pytest.raises(ConfigError, match="evaluates answers as Python"):
            GymFamily(name)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _num_levels.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"pip install 'm2forge\[tasks\]'"):
        find_family("reasoning-gym:chain_sum")
