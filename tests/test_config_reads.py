"""A key that is accepted does something: code uses every field of every configuration, counted by class."""

import ast
import inspect
import types

import pytest
from pydantic import Field

from m2forge.config import Config
from m2forge.corpus.config import CorpusConfig
from m2forge.evaluate.config import EvalConfig
from m2forge.gateway.config import GatewayConfig
from m2forge.inference.config import LLMConfig, ModelServerConfig, SamplingParams
from m2forge.pipelines.config import PipelineConfig
from m2forge.pretrain.config import PretrainConfig
from m2forge.rl.config import RLConfig
from m2forge.rollout.config import ServeConfig
from m2forge.sft.config import SFTConfig
from tests.config_flow import unused
from tests.config_kinds import modules

STAGES: list[type[Config]] = [
    CorpusConfig,
    PretrainConfig,
    SFTConfig,
    EvalConfig,
    RLConfig,
    PipelineConfig,
    GatewayConfig,
    ServeConfig,
    LLMConfig,
    ModelServerConfig,
    SamplingParams,
]


@pytest.mark.slow
def test_the_value_of_every_field_of_every_configuration_is_used() -> None:
    sources = [(module, ast.parse(inspect.getsource(module))) for module in modules()]
    assert unused(STAGES, sources) == []


class Inner(Config):
    seed: int = 0
    size: int = 0


class Outer(Config):
    seed: int = 0
    inner: Inner = Inner()
    parts: dict[str, Inner] = Field(default_factory=dict)
    checked: int = 0


def unused_by(code: str) -> list[str]:
    module = types.ModuleType("written")
    vars(module).update(Inner=Inner, Outer=Outer, Config=Config)
    exec(code, vars(module))
    return unused([Outer], [(module, ast.parse(code))])


def test_a_read_counts_for_the_class_that_is_read_alone() -> None:
    assert unused_by("def run(config: Outer) -> int:\n    return config.inner.seed") == [
        "Inner.size",
        "Outer.checked",
        "Outer.parts",
        "Outer.seed",
    ]
    found = unused_by(
        "def run(config: Outer) -> int:\n    return [p.size for p in config.parts.values()] + [config.seed]"
    )
    assert found == ["Inner.seed", "Outer.checked", "Outer.inner"]


def test_reads_are_followed_through_attributes_and_copies() -> None:
    code = """
class Holder:
    def __init__(self, config: Outer) -> None:
        self.config, self.other = config, 1

    def run(self) -> int:
        def later() -> int:
            return own.size
        own = self.config.model_copy().inner
        return later()
"""
    assert unused_by(code) == ["Inner.seed", "Outer.checked", "Outer.parts", "Outer.seed"]


def test_what_only_a_validator_looks_at_is_not_read() -> None:
    code = """
from pydantic import model_validator

class Own(Config):
    checked: int = 0

    @model_validator(mode="after")
    def _check(self):
        assert self.checked >= 0
        return self
"""
    module = types.ModuleType("written")
    vars(module).update(Config=Config)
    exec(code, vars(module))
    assert unused([vars(module)["Own"]], [(module, ast.parse(code))]) == ["Own.checked"]


COPIED = """
from dataclasses import dataclass

@dataclass
class Record:
    kept: int
    lost: int

class Holder:
    def __init__(self, size: int, other: int) -> None:
        self.size, self.other = size, other

    def run(self) -> int:
        return self.size

def ignore(seed: int) -> int:
    return 1

def run(config: Outer) -> object:
    FIRST
    return Record(1, 2).kept, Holder(1, 2)
"""


@pytest.mark.parametrize(
    ("line", "is_used"),
    [
        ("config.checked", False),
        ("_ = config.checked", False),
        ("size = config.checked", False),
        ("size = other = config.checked", False),
        ("size = config.checked; other = size or 3", False),
        ("self = Holder(1, config.checked)", False),
        ("Holder(2, other=config.checked if config else 1).other = 4", False),
        ("Record(1, lost=config.checked)", False),
        ("ignore(config.checked)", False),
        ("Inner(seed=config.checked)", False),
        ("size = config.checked; print(size)", True),
        ("Holder(config.checked, 2)", True),
        ("Record(config.checked, 2)", True),
        ("print(config.checked)", True),
        ("[1][config.checked]", True),
        ("assert config.checked < 9", True),
        ("FIRST.other = config.checked", True),
    ],
)
def test_a_value_that_is_only_copied_is_not_used(line: str, is_used: bool) -> None:
    assert ("Outer.checked" not in unused_by(COPIED.replace("FIRST", line))) == is_used


def test_a_property_of_a_configuration_uses_the_fields_it_reads() -> None:
    code = """
class Own(Config):
    one: int = 0
    two: int = 0

    @property
    def twice(self) -> int:
        return 2 * self.one

    @property
    def thrice(self) -> int:
        return 3 * self.two

def run(own: Own) -> int:
    return own.twice
"""
    module = types.ModuleType("written")
    vars(module).update(Config=Config)
    exec(code, vars(module))
    assert unused([vars(module)["Own"]], [(module, ast.parse(code))]) == ["Own.two"]
