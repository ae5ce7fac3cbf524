"""The resolved configuration as TOML, with the default beside each value that differs from it."""

import tomllib
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from m2forge.config import Config, build, load
from m2forge.resolved import resolved_lines
from tests.test_configs import FILES, KINDS


class Inner(Config):
    size: int = 4
    name: str = "a"


class Outer(Config):
    steps: int
    kind: Literal["x", "y"] = "x"
    limit: int | None = None
    pair: tuple[float, float] = (0.5, 1e-5)
    weights: dict[str, float] = Field(default_factory=dict)
    inner: Inner = Inner(size=8)
    other: Inner | None = None
    items: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = Field(default_factory=dict)


def render(config: Config) -> str:
    return "\n".join(str(line) for line in resolved_lines(config))


def test_only_what_differs_from_the_default_is_marked() -> None:
    config = Outer(
        steps=3, kind="y", limit=2, weights={"a b": 1.0}, inner=Inner(size=4), other=Inner(), items=(Inner(name='"'),),
        by_name={"x.y": Inner(size=9)},
    )  # fmt: skip
    assert render(config) == "\n".join(
        [
            "steps = 3  # required",
            'kind = "y"  # default: "x"',
            "limit = 2  # default: not set",
            "pair = [0.5, 1e-05]",
            'weights = {"a b" = 1.0}  # default: {}',
            "",
            "[inner]",
            "size = 4  # default: 8",
            'name = "a"',
            "",
            "[other]  # default: not set",
            "size = 4",
            'name = "a"',
            "",
            "[[items]]",
            "size = 4",
            'name = "\\""  # default: "a"',
            "",
            '[by_name."x.y"]',
            "size = 9  # default: 4",
            'name = "a"',
        ]
    )
    assert build(Outer, tomllib.loads(render(config))) == config


def test_defaults_of_a_table_that_is_left_out_are_its_own() -> None:
    lines = render(Outer(steps=1)).splitlines()
    assert [line for line in lines if "#" in line] == ["steps = 1  # required"]
    assert "size = 8" in lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_configs_load_back_equal(path: Path) -> None:
    kind = KINDS[path.parent.name]
    config = load(kind, path)
    assert build(kind, tomllib.loads(render(config))) == config
