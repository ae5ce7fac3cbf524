"""Configuration is strict, reports every problem at once, and survives a dump."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Literal

import pydantic
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from m2forge.config import (
    Config,
    TomlValue,
    build,
    dump,
    load,
    parse_overrides,
    write_resolved,
)
from m2forge.errors import ConfigError


class Kind(StrEnum):
    SLOW = "slow"
    FAST = "fast"


class Optimizer(Config):
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    name: Literal["adamw", "sgd"] = "adamw"


class Source(Config):
    folder: Path
    weight: float = 1.0


class Run(Config):
    steps: int
    title: str = ""
    kind: Kind = Kind.SLOW
    compile: bool = False
    limit: int | None = None
    optimizer: Optimizer = Optimizer()
    sources: tuple[Source, ...] = ()
    named: dict[str, Source] = pydantic.Field(default_factory=dict)
    either: Optimizer | Source | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Run":
        if self.limit is not None and self.limit > self.steps:
            raise ValueError(f"limit {self.limit} exceeds steps {self.steps}")
        return self


def problem(data: dict[str, TomlValue], *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        build(Run, data, overrides, origin="run.toml")
    return str(raised.value)


def test_file_with_overrides_on_top(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'steps = 3\nkind = "fast"\n[optimizer]\nrate = 1\n[[sources]]\nfolder = "a"\n[named.x]\nfolder = "b"\n'
    )
    run = load(Run, path, ["optimizer.betas=[0.5, 1]", "title=two words", "sources.0.weight=2", "limit=2"])
    assert run == Run(
        steps=3,
        title="two words",
        kind=Kind.FAST,
        limit=2,
        optimizer=Optimizer(rate=1.0, betas=(0.5, 1.0)),
        sources=(Source(folder=Path("a"), weight=2.0),),
        named={"x": Source(folder=Path("b"))},
    )
    assert isinstance(run.optimizer.rate, float)


def test_overrides_leave_the_data_alone() -> None:
    data: dict[str, TomlValue] = {"steps": 1, "optimizer": {"rate": 0.5}}
    assert build(Run, data, ["optimizer.rate=0.25"]).optimizer.rate == 0.25
    assert data == {"steps": 1, "optimizer": {"rate": 0.5}}


@pytest.mark.parametrize(
    ("key", "value"),
    [("steps", "3"), ("steps", 3.0), ("steps", True), ("title", 3), ("compile", 1), ("compile", "true")],
)
def test_nothing_is_coerced(key: str, value: TomlValue) -> None:
    message = problem({"steps": 1, key: value})
    assert message.startswith(f"run.toml: {key}: expected ")
    assert message.endswith(f", received {value!r}")


@pytest.mark.parametrize(
    ("data", "key", "near"),
    [
        ({"stepz": 4}, "stepz", "steps"),
        ({"optimizer": {"rat": 4}}, "optimizer.rat", "rate"),
        ({"sources": [{"folder": "a"}, {"folder": "b", "wieght": 4}]}, "sources.1.wieght", "weight"),
        ({"named": {"x": {"folder": "b", "wieght": 4}}}, "named.x.wieght", "weight"),
        ({"either": {"folder": "b", "wieght": 4}}, "either.wieght", "weight"),
    ],
)
def test_unknown_key_is_named_in_full_with_the_near_one(data: dict[str, TomlValue], key: str, near: str) -> None:
    message = problem({"steps": 1} | data)
    assert f"run.toml: {key}: unknown key, value 4; did you mean '{near}'?" in message


def test_unknown_key_without_a_near_one_lists_the_known() -> None:
    assert problem({"steps": 1, "optimizer": {"zzz": 1}}).endswith("known: betas, name, rate")


def test_all_problems_come_in_one_error() -> None:
    message = problem({"title": 3, "optimizer": {"name": "adam", "extra": 1}, "sources": [{}]}, "compile=7")
    assert message.splitlines() == [
        "run.toml: 6 problems",
        "  run.toml: steps: missing; this key is required",
        "  run.toml: title: expected a valid string, received 3",
        "  --set compile: compile: expected a valid boolean, received 7",
        "  run.toml: optimizer.name: expected 'adamw' or 'sgd', received 'adam'",
        "  run.toml: optimizer.extra: unknown key, value 1; known: betas, name, rate",
        "  run.toml: sources.0.folder: missing; this key is required",
    ]


def test_a_rule_over_several_fields_speaks_for_itself() -> None:
    assert problem({"steps": 1, "limit": 2}) == "run.toml: Run: limit 2 exceeds steps 1"


def test_override_into_nothing_is_blamed_and_gets_suggestions() -> None:
    assert problem({"steps": 1}, "optimiser.rate=1") == (
        "--set optimiser.rate: optimiser: unknown key, value {'rate': 1}; did you mean 'optimizer'?"
    )
    assert problem({"steps": 1}, "optimizer.rte=1").startswith("--set optimizer.rte: optimizer.rte: unknown key")
    assert problem({"steps": 1}, "steps.x=1") == "--set steps.x: steps is 1, not a table; it has no 'x'"
    assert problem({"steps": 1, "sources": []}, "sources.0=1") == "--set sources.0: sources is a list of 0, no item '0'"


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=3", "a b=3", "[x]\ny=3", "# x=3", ""])
def test_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"expected KEY=VALUE with a dotted key"):
        parse_overrides([override])


def test_override_values_are_toml_else_bare_strings() -> None:
    assert parse_overrides(
        ["a.b=1", "c=[1, 'x']", "d={e = true}", "f=some/path", "g=", "h=1\nz=2", '"x.y".z=-inf']
    ) == {
        ("a", "b"): 1,
        ("c",): [1, "x"],
        ("d",): {"e": True},
        ("f",): "some/path",
        ("g",): "",
        ("h",): "1\nz=2",
        ("x.y", "z"): float("-inf"),
    }


def test_long_values_are_cut() -> None:
    assert len(problem({"steps": "x" * 1000})) < 200


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"steps = 1\nsteps = = 2\n", r"run\.toml: not valid TOML: .*line 2"), (b"title = '\xff'", "not UTF-8")],
)
def test_broken_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(Run, tmp_path / "run.toml")


def test_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.toml"
    with pytest.raises(ConfigError, match=re.escape(f"{path}: cannot be read (No such file or directory)")):
        load(Run, path)


def test_config_is_frozen() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Run(steps=1).steps = 2


def test_a_none_that_toml_would_lose_is_refused() -> None:
    class Lossy(Config):
        value: int | None = 3

    assert dump(Lossy(value=4)) == "value = 4\n"
    with pytest.raises(ConfigError, match="Lossy does not survive TOML"):
        dump(Lossy(value=None))


floats = st.floats(allow_nan=False, allow_infinity=False)
sources = st.builds(Source, folder=st.text(min_size=1).map(Path), weight=floats)
optimizers = st.builds(Optimizer, rate=floats, betas=st.tuples(floats, floats), name=st.sampled_from(["adamw", "sgd"]))
runs = st.builds(
    Run,
    steps=st.integers(min_value=0),
    title=st.text(),
    kind=st.sampled_from(Kind),
    compile=st.booleans(),
    limit=st.none() | st.integers(max_value=0),
    optimizer=optimizers,
    sources=st.lists(sources, max_size=3).map(tuple),
    named=st.dictionaries(st.text(), sources, max_size=3),
    either=st.none() | optimizers | sources,
)


@given(runs)
def test_dump_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, run: Run) -> None:
    path = tmp_path_factory.mktemp("run") / "resolved.toml"
    write_resolved(run, path)
    assert load(Run, path) == run


toml_values = st.recursive(
    st.booleans() | st.integers() | floats | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


# An override is split at its first equals sign.
keys = st.text(st.characters(codec="ascii", exclude_characters="="), min_size=1)


@given(st.lists(keys, min_size=1, max_size=3), toml_values)
def test_any_toml_value_passes_through_an_override(parts: list[str], value: TomlValue) -> None:
    key = ".".join(tomli_w.dumps({part: 0}).removesuffix(" = 0\n") for part in parts)
    # A list in a list is always written inline, whatever the value.
    text = tomli_w.dumps({"x": [[value]]}).removeprefix("x = ")
    assert parse_overrides([f"{key}={text}"]) == {tuple(parts): [[value]]}


@given(st.text())
def test_any_text_is_a_value(text: str) -> None:
    assert list(parse_overrides([f"key={text}"])) == [("key",)]


# -- several files ----------------------------------------------------------------------------------------------------


def write_files(folder: Path, *texts: str) -> list[Path]:
    paths = [folder / f"{index}.toml" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def test_later_files_override_earlier_ones_deeply(tmp_path: Path) -> None:
    base = """
steps = 3
title = "base"
[optimizer]
rate = 0.5
betas = [0.1, 0.2]
[[sources]]
folder = "a"
[[sources]]
folder = "b"
[named.x]
folder = "x"
"""
    mine = """
title = "mine"
[optimizer]
betas = [0.3, 0.4]
[[sources]]
folder = "c"
[named.y]
folder = "y"
"""
    paths = write_files(tmp_path, base, mine)
    run = load(Run, paths, ["title=set"])
    assert run == Run(
        steps=3,
        title="set",
        optimizer=Optimizer(rate=0.5, betas=(0.3, 0.4)),
        sources=(Source(folder=Path("c")),),
        named={"x": Source(folder=Path("x")), "y": Source(folder=Path("y"))},
    )
    assert load(Run, list(reversed(paths))).title == "base"


def test_a_problem_names_the_file_in_which_the_key_is(tmp_path: Path) -> None:
    base = """
title = 3
stepz = 1
[optimizer]
name = "adam"
[either]
rate = 1
[[sources]]
folder = "a"
weight = 2
"""
    mine = """
title = 4
[optimizer]
extra = 1
[[sources]]
weight = "much"
[named.x]
folder = 3
"""
    with pytest.raises(ConfigError) as raised:
        load(Run, write_files(tmp_path, base, mine))
    assert str(raised.value).replace(f"{tmp_path}/", "").splitlines() == [
        "0.toml + 1.toml: 8 problems",
        "  0.toml + 1.toml: steps: missing; this key is required",
        "  1.toml: title: expected a valid string, received 4",
        "  0.toml: optimizer.name: expected 'adamw' or 'sgd', received 'adam'",
        "  1.toml: optimizer.extra: unknown key, value 1; known: betas, name, rate",
        "  1.toml: sources.0.folder: missing; this key is required",
        "  1.toml: sources.0.weight: expected a valid number, received 'much'",
        "  1.toml: named.x.folder: expected a valid string, received 3",
        "  0.toml: stepz: unknown key, value 1; did you mean 'steps'?",
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (good,) = write_files(tmp_path, "steps = 1\n")
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(Run, [good, tmp_path / "none.toml"])
