"""Every configuration that is shipped loads."""

from pathlib import Path

import pytest

from m2forge.config import Config, load
from m2forge.corpus.config import CorpusConfig
from m2forge.evaluate.config import EvalConfig
from m2forge.forge.config import ForgeConfig
from m2forge.pretrain.config import PretrainConfig
from m2forge.sft.config import SFTConfig

CONFIGS = Path(__file__).parent.parent / "configs"
KINDS: dict[str, type[Config]] = {
    "corpus": CorpusConfig,
    "pretrain": PretrainConfig,
    "sft": SFTConfig,
    "eval": EvalConfig,
    "rl": ForgeConfig,
}
FILES = sorted(CONFIGS.rglob("*.toml"))


def test_there_is_one_of_each_kind() -> None:
    assert {path.parent.name for path in FILES} == KINDS.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_it_loads(path: Path) -> None:
    load(KINDS[path.parent.name], path)
