"""A key that is accepted does something: code reads every field of every configuration, counted by class."""

import ast
import inspect
import types

from pydantic import Field

from m2forge.config import Config
from m2forge.corpus.config import CorpusConfig
from m2forge.evaluate.config import EvalConfig
from m2forge.forge.config import ForgeConfig
from m2forge.gateway.config import GatewayConfig
from m2forge.pretrain.config import PretrainConfig
from m2forge.rollout.server_config import ServeConfig
from m2forge.sft.config import SFTConfig
from tests.config_reads import modules, unread

STAGES: list[type[Config]] = [
    CorpusConfig,
    PretrainConfig,
    SFTConfig,
    EvalConfig,
    ForgeConfig,
    GatewayConfig,
    ServeConfig,
]


def test_every_field_of_every_configuration_is_read() -> None:
    sources = [(module, ast.parse(inspect.getsource(module))) for module in modules()]
    assert unread(STAGES, sources) == []


class Inner(Config):
    seed: int = 0
    size: int = 0


class Outer(Config):
    seed: int = 0
    inner: Inner = Inner()
    parts: dict[str, Inner] = Field(default_factory=dict)
    checked: int = 0


def unread_by(code: str) -> list[str]:
    module = types.ModuleType("written")
    vars(module).update(Inner=Inner, Outer=Outer, Config=Config)
    exec(code, vars(module))
    return unread([Outer], [(module, ast.parse(code))])


def test_a_read_counts_for_the_class_that_is_read_alone() -> None:
    assert unread_by("def run(config: Outer) -> int:\n    return config.inner.seed") == [
        "Inner.size",
        "Outer.checked",
        "Outer.parts",
        "Outer.seed",
    ]
    found = unread_by(
        "def run(config: Outer) -> int:\n    return [p.size for p in config.parts.values()] + [config.seed]"
    )
    assert found == ["Inner.seed", "Outer.checked", "Outer.inner"]


def test_reads_are_followed_through_attributes_closures_and_copies() -> None:
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
    assert unread_by(code) == ["Inner.seed", "Outer.checked", "Outer.parts", "Outer.seed"]


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
    assert unread([vars(module)["Own"]], [(module, ast.parse(code))]) == ["Own.checked"]
