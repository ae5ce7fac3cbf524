"""How an engine serves: its cache, what a step may hold, and what weights that arrive mean for what is in flight.

[rollout]
num_blocks = 4096
on_load = "continue"
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config

Count = Annotated[int, Field(gt=0, le=1 << 31)]

OnLoad = Literal["finish", "continue", "restart"]
OldCache = Literal["drop", "keep"]


class RolloutConfig(Config):
    block_tokens: Count = 16
    """Tokens of a block, the unit that keys and values are stored and shared in."""
    num_blocks: Count = 2048
    """Blocks of the cache: what all requests in flight may hold together."""
    step_tokens: Count = 512
    """Tokens of a step, at most. Larger steps read long prompts sooner, and make those that are being completed wait
    longer for their next token. Drafts are verified in what prompts leave of it."""
    max_running: Count = 64
    """Completions in flight at once."""
    max_context: Count | None = None
    """Tokens of prompt and completion together, at most; by default what the network was made for."""
    on_load: OnLoad = "continue"
    """What becomes of completions in flight when weights arrive. finish: they end on the old weights, which stay until
    then; others wait. continue: they go on with the new ones, every token under the version that drew it. restart: they
    begin again. A token once handed out cannot be taken back, so an engine that restarts hands a completion out whole,
    at its end, and all tokens of one are of one version."""
    old_cache: OldCache = "drop"
    """What becomes of keys and values that older weights computed. drop: all are computed again when they are needed.
    keep: completions that continue keep theirs, and mix them with those of the new weights; one that is preempted is
    read again by the new ones alone. In neither case does a prompt meet the cache of another version than the one it
    starts on."""
    speculation: Annotated[int, Field(ge=0, le=3)] = 0
    """Tokens that the prediction modules draft for each completion in a step, at most; how many, the engine finds out
    as it runs. What is sampled does not change. 0: the modules are not run, and take no room."""
    ahead_steps: Annotated[int, Field(ge=1, le=64)] = 8
    """Steps that a GPU runs before the host looks, when all that is done is to complete: what arrives, ends or is
    aborted meanwhile waits for so many. The host's work, which grows with the batch, is done once for all of them."""
    seed: int | None = None
    """Where prompts without a seed of their own get one from; by default from the system, so that engines differ."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.step_tokens < self.max_running:
            raise ValueError(
                f"step_tokens ({self.step_tokens}) must be at least max_running ({self.max_running}): "
                "each completion in flight takes one token of a step"
            )
        return self
