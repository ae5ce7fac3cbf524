"""Tasks without levels: those that are sometimes solved are drawn most, and the measurements survive a restart."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from m2forge.config import TomlValue, build
from m2forge.errors import ConfigError, RecordError
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import CurriculumConfig
from m2forge.tasks.curriculum import MIN_WEIGHT, Curriculum, PassRates
from m2forge.tasks.task_set import describe
from tests.tasks.stream import draw_batch
from tests.tasks.test_jsonl_family import many, write


def test_the_weight_is_the_variance_of_success() -> None:
    rates = PassRates(["a", "b", "c", "d"])
    for id, rate in (("a", 0.0), ("b", 0.5), ("c", 0.25)):
        rates.record(id, rate)
    assert [rates.weight(id) for id in "abcd"] == [MIN_WEIGHT, 1.0, 0.75, 1.0]
    drawn = Counter(rates.choose(random.Random(seed)) for seed in range(2000))
    assert drawn["b"] > drawn["c"] > 5 * drawn["a"]
    rates.record("a", 1.0)
    assert rates.weight("a") == 1.0
    with pytest.raises(RecordError, match="pass rate of task a: expected a number from 0 to 1"):
        rates.record("a", 1.5)


def make(path: Path) -> tuple[CurriculumConfig, Curriculum]:
    families: list[TomlValue] = [{"source": str(path)}]
    stage: TomlValue = {"name": "only", "domains": {"general": {"ratio": 1.0, "context": 512, "families": families}}}
    config = build(CurriculumConfig, {"batch_groups": 8, "stages": [stage]})
    return config, restart(config, None)


def restart(config: CurriculumConfig, state: str | None) -> Curriculum:
    known = {key: describe(find_family(key)) for key in config.family_keys}
    return Curriculum(config, families=known, state=None if state is None else json.loads(state))


def test_a_curriculum_measures_tasks_and_resumes_exactly(tmp_path: Path) -> None:
    config, curriculum = make(write(tmp_path, *many(40, split="train")))
    for _ in range(12):
        for item in draw_batch(curriculum):
            curriculum.record(item.task, 0.5 if item.task.id.endswith("7") else 1.0)
    state = json.dumps(curriculum.state())
    # Restored to the state of a checkpoint, it draws what the other draws.
    resumed = restart(config, state)
    late = [draw_batch(curriculum) for _ in range(20)]
    assert [draw_batch(resumed) for _ in range(20)] == late
    ids = Counter(item.task.id[-1] for batch in late for item in batch)
    assert ids["7"] > sum(ids.values()) / 3  # 4 of 40 tasks
    assert restart(config, None).state() != json.loads(state)


def test_levels_of_tasks_without_levels_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, *many(4, split="train"))
    families: list[TomlValue] = [{"source": str(path), "difficulty": [0, 0]}]
    stage: TomlValue = {"name": "only", "domains": {"general": {"ratio": 1.0, "context": 512, "families": families}}}
    config = build(CurriculumConfig, {"batch_groups": 8, "stages": [stage]})
    with pytest.raises(ConfigError, match="its tasks have no levels; leave difficulty and start out"):
        restart(config, None)
