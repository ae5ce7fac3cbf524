"""Every configuration that is shipped loads."""

import re
from pathlib import Path

import pytest

from m2forge.agents import preset
from m2forge.cli import COMMANDS
from m2forge.config import Config, load
from m2forge.corpus.config import CorpusConfig
from m2forge.errors import ConfigError
from m2forge.model.config import ModelConfig
from m2forge.pipelines.config import PipelineConfig
from m2forge.pretrain.config import PretrainConfig
from m2forge.rl.config import RLConfig
from m2forge.sft.config import SFTConfig
from m2forge.trials.config import TrialEvalConfig

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
KINDS: dict[str, type[Config]] = {
    "model": ModelConfig,
    "corpus": CorpusConfig,
    "pretrain": PretrainConfig,
    "sft": SFTConfig,
    "eval": TrialEvalConfig,
    "rl": RLConfig,
    "pipeline": PipelineConfig,
}
STAGES = {"pretrain": "balanced", "sft": "frozen", "rl": "frozen"}
"""What `train.router_bias` is by default."""
FILES = sorted(CONFIGS.rglob("*.toml"))


def test_there_is_one_of_each_kind() -> None:
    assert {path.parent.name for path in FILES} == KINDS.keys()
    assert (CONFIGS / "agents").samefile(preset.FOLDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_it_loads(path: Path) -> None:
    load(KINDS[path.parent.name], path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_its_comments_name_commands_and_files_that_exist(path: Path) -> None:
    comments = " ".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    assert set(re.findall(r"\bm2forge ([a-z]\w*)", comments)) <= COMMANDS.keys()
    assert set(re.findall(r"`make ([a-z-]+)`", comments)) <= TARGETS
    for name in re.findall(r"\b(?:configs|examples|benchmarks|tasks)/[\w/.-]+\.\w+", comments):
        assert (ROOT / name).is_file() or (ROOT / "m2forge" / name).is_file(), name


def test_a_key_that_moved_is_refused_with_its_new_name() -> None:
    path = next(path for path in FILES if path.parent.name == "rl")
    with pytest.raises(
        ConfigError, match=r"policy\.router_bias: unknown key, .*; this key is now 'train\.router_bias'$"
    ):
        load(RLConfig, path, ["policy.router_bias=frozen"])


def test_router_biases_move_in_pre_training_alone_by_default() -> None:
    found = {kind: load(KINDS[kind], path).model_dump() for path in FILES if (kind := path.parent.name) in STAGES}
    assert {kind: config["train"]["router_bias"] for kind, config in found.items()} == STAGES
