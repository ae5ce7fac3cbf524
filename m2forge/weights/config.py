"""Config of how policy versions reach the samplers.

[weights]
anchor_every = 16
sync = "collective"
"""

from typing import Annotated, Literal

from pydantic import Field

from m2forge.config import Config


class WeightsConfig(Config):
    anchor_every: Annotated[int, Field(ge=1)] = 1
    """Versions from one whole copy of the weights to the next. Those between hold only the elements that changed since
    the version before: a few percent of bfloat16 weights at the learning rates of RL, all of float32 ones. The trainer
    then holds a copy of the weights in host memory, and a sampler that starts reads up to this many folders. 1: every
    version is whole."""
    sync: Literal["files", "collective"] = "files"
    """How a version reaches a sampler. files: it reads the version's folder. collective: the trainer's ranks broadcast
    the files into the memory of the samplers as well (weights/collective.py); a sampler that no broadcast reaches reads
    the folder."""
