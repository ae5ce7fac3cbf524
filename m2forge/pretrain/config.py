"""Configuration of a pre-training run: the corpus, the model and its phases."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from m2forge.config import Config
from m2forge.train.config import Count, EvalConfig, PhaseConfig, RouterBias, TrainConfig


class PretrainPhase(PhaseConfig):
    mixture: Mapping[str, float] | None = None
    """Share of each domain; None: the corpus's own mixture."""
    long_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of tokens drawn from the corpus's long samples."""


class PretrainTrainConfig(TrainConfig):
    """`TrainConfig` with the defaults of pre-training."""

    router_bias: RouterBias = "balanced"


class PretrainEvalConfig(EvalConfig):
    """Loss on held-out documents, in packs that are the same for all phases."""

    corpus: str | None = None
    """Folder of another built corpus, whose training split is evaluated; None: the held-out split of the run's own
    corpus, which holds the share of documents, selected by their hash, that its `held_out` set aside."""
    context: Count | None = None
    """Maximum document length, longer ones are read in pieces; None: the shortest context of the phases."""


class PretrainConfig(Config):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """The run's directory is RUNS/NAME; starting it again resumes it."""
    corpus: str
    """Folder of a built corpus."""
    model: str
    """A preset, a TOML file, a model folder or a hub id such as Qwen/Qwen3-0.6B-Base. Training starts from the weights
    of a folder or hub model, else from random ones. The vocabulary is that of the corpus."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a hub model; None: its main branch. A run's resolved config holds the commit."""
    model_set: tuple[str, ...] = ()
    """Overrides of the model configuration, such as "num_layers=4"."""
    seed: int = Field(default=0, ge=0)
    train: PretrainTrainConfig = PretrainTrainConfig()
    eval: PretrainEvalConfig | None = None
    """Held-out loss during training; None: nothing is evaluated."""
    phases: tuple[PretrainPhase, ...] = Field(min_length=1)
