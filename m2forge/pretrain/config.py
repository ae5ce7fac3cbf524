"""A pre-training run: the corpus, the network, and the phases it goes through."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from m2forge.config import Config
from m2forge.train.config import PhaseConfig, RouterBias, TrainConfig


class PretrainPhase(PhaseConfig):
    mixture: Mapping[str, float] | None = None
    """Share of each domain; None takes the corpus's own."""
    long_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of tokens drawn from the corpus's long samples."""


class PretrainTrainConfig(TrainConfig):
    """`TrainConfig` with the defaults of pre-training."""

    router_bias: RouterBias = "balanced"


class PretrainConfig(Config):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """The run lives in RUNS/NAME; started again, it goes on."""
    corpus: str
    """Folder of a built corpus."""
    model: str
    """A preset, a TOML file or a model folder. A folder's weights are where training starts; otherwise they are drawn.
    The vocabulary is the corpus's."""
    model_set: tuple[str, ...] = ()
    """Changes to the network's configuration, such as "num_layers=4"."""
    seed: int = Field(default=0, ge=0)
    train: PretrainTrainConfig = PretrainTrainConfig()
    phases: tuple[PretrainPhase, ...] = Field(min_length=1)
