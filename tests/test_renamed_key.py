"""Former keys are refused by name, and read in what an earlier version wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pydantic
import pytest

from m2forge.config import Config, TomlValue, build, current_keys, load, load_resolved, write_resolved
from m2forge.errors import ConfigError


class Slope(Config):
    renamed_keys: ClassVar[Mapping[str, str]] = {"initial": "start"}

    start: float
    end: float | None = None


class Phase(Config):
    renamed_keys: ClassVar[Mapping[str, str]] = {"rate": "lr"}

    steps: int
    lr: Slope


class LongPhase(Phase):
    renamed_keys: ClassVar[Mapping[str, str]] = {"length": "context"}

    context: int = 8


class Sgd(Config):
    renamed_keys: ClassVar[Mapping[str, str]] = {"beta": "momentum"}

    kind: Literal["sgd"]
    momentum: float = 0.0


class Beta(Config):
    """A class in which `beta` is a current key."""

    kind: Literal["beta"]
    beta: float = 0.5


class Tagged(Config):
    renamed_keys: ClassVar[Mapping[str, str]] = {"name": "kind"}

    kind: Literal["tagged"]


class Evaluation(Config):
    num_tasks: int = 0


class Training(Config):
    renamed_keys: ClassVar[Mapping[str, str]] = {"patience": "wait"}

    wait: int = 1
    seed: int = 0


class Stage(Config):
    renamed_keys: ClassVar[Mapping[str, str]] = {"check": "eval", "seed": "training.seed", "evaluates": "eval"}
    renamed_values: ClassVar[Mapping[str, Mapping[str, TomlValue]]] = {"evaluates": {"some": {"num_tasks": 4}}}

    phases: tuple[LongPhase, ...] = ()
    by_name: dict[str, Phase] = pydantic.Field(default_factory=dict)
    eval: Evaluation = Evaluation()
    optimizer: Annotated[Sgd | Beta | Tagged, pydantic.Field(discriminator="kind")] | None = None
    training: Training


OLD = """
seed = 7
[check]
num_tasks = 4
[[phases]]
steps = 2
length = 16
rate = { initial = 0.5 }
[by_name."a.b"]
steps = 1
rate = { start = 0.25 }
[optimizer]
kind = "sgd"
beta = 0.9
[training]
patience = 3
"""


def test_every_former_key_is_refused_with_its_current_one(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(OLD)
    with pytest.raises(ConfigError) as raised:
        load(Stage, tmp_path / "old.toml")
    lines = [line.strip().removeprefix(f"{tmp_path}/old.toml: ") for line in str(raised.value).splitlines()]
    assert lines[0] == "8 problems"
    assert set(lines[1:]) == {
        "seed: unknown key, value 7; this key is now 'training.seed'",
        "check: unknown key, value {'num_tasks': 4}; this key is now 'eval'",
        "phases.0.length: unknown key, value 16; this key is now 'phases.0.context'",
        "phases.0.rate: unknown key, value {'initial': 0.5}; this key is now 'phases.0.lr'",
        "phases.0.rate.initial: unknown key, value 0.5; this key is now 'phases.0.lr.start'",
        "by_name.a.b.rate: unknown key, value {'start': 0.25}; this key is now 'by_name.a.b.lr'",
        "optimizer.beta: unknown key, value 0.9; this key is now 'optimizer.momentum'",
        "training.patience: unknown key, value 3; this key is now 'training.wait'",
    }


def test_a_former_key_is_one_problem_if_the_current_is_missing() -> None:
    table: dict[str, TomlValue] = {"training": {}, "phases": [{"steps": 1, "rate": {"start": 1.0}}]}
    with pytest.raises(ConfigError, match=r"^x: phases\.0\.rate: unknown key.*is now 'phases\.0\.lr'$"):
        build(Stage, table, origin="x")
    with pytest.raises(ConfigError, match=r"^--set check\.num_tasks: check: unknown key.*is now 'eval'$"):
        build(Stage, {"training": {}}, ["check.num_tasks=3"])
    with pytest.raises(ConfigError, match=r"2 problems\n.*is now 'eval'\n  x: check\.num_tasks: expected a valid int"):
        build(Stage, {"training": {}, "check": {"num_tasks": "many"}}, origin="x")


def test_a_kind_that_has_the_key_as_its_own_is_left_alone() -> None:
    assert build(Stage, {"training": {}, "optimizer": {"kind": "beta", "beta": 0.1}}).optimizer == Beta(
        kind="beta", beta=0.1
    )
    with pytest.raises(ConfigError, match=r"^configuration: optimizer\.name: unknown key.*now 'optimizer\.kind'$"):
        build(Stage, {"training": {}, "optimizer": {"name": "tagged"}})


def test_what_was_written_under_former_keys_loads(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(OLD)
    stage = load_resolved(Stage, path)
    assert stage == Stage(
        phases=(LongPhase(steps=2, context=16, lr=Slope(start=0.5)),),
        by_name={"a.b": Phase(steps=1, lr=Slope(start=0.25))},
        eval=Evaluation(num_tasks=4),
        optimizer=Sgd(kind="sgd", momentum=0.9),
        training=Training(wait=3, seed=7),
    )
    write_resolved(stage, path)
    assert load(Stage, path) == load_resolved(Stage, path) == stage


def test_a_former_key_beside_its_current_one_is_refused() -> None:
    tables: list[dict[str, TomlValue]] = [{"check": {}, "eval": {}}, {"seed": 1, "training": {"seed": 2}}]
    for table in tables:
        with pytest.raises(ConfigError, match="which is there too"):
            current_keys(Stage, table)
        with pytest.raises(ConfigError, match="this key is now"):
            build(Stage, {"training": {}} | table)


def test_current_keys_leaves_other_data_alone() -> None:
    table: dict[str, TomlValue] = {"zebra": [1, {"rate": 2}], "phases": 3, "optimizer": {"kind": 1, "beta": 2}}
    assert current_keys(Stage, table) == table
    assert current_keys(Stage, {"seed": 1, "training": 3}) == {"training": 3}


def test_a_former_value_is_refused_with_its_current_one() -> None:
    data: dict[str, TomlValue] = {"evaluates": "some", "training": {}}
    with pytest.raises(ConfigError) as raised:
        build(Stage, data)
    problem = "unknown key, value 'some'; this key is now 'eval', its value {'num_tasks': 4}"
    assert str(raised.value) == f"configuration: evaluates: {problem}"
    assert current_keys(Stage, data) == {"eval": {"num_tasks": 4}, "training": {}}
    # A value that never was one is passed on, and refused as any other.
    with pytest.raises(ConfigError, match="eval"):
        build(Stage, current_keys(Stage, {"evaluates": "none", "training": {}}))
