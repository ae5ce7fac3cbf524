"""Configs of the engine (KV cache size, step limits, speculation, how weight updates treat requests in flight) and of
the HTTP inference server around it.

[rollout]
num_blocks = 4096
on_weight_update = "continue"

[server]
port = 8400
max_body_bytes = 1_000_000
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.records import MAX_INT32

Count = Annotated[int, Field(gt=0, le=1 << 31)]

OnWeightUpdate = Literal["finish", "continue", "restart"]
StaleCache = Literal["drop", "keep"]


class RolloutConfig(Config):
    renamed_keys: ClassVar[Mapping[str, str]] = {
        "ahead_steps": "steps_per_sync",
        "on_load": "on_weight_update",
        "old_cache": "stale_cache",
    }

    block_tokens: Count = 16
    """Tokens per block, the unit of KV cache storage and sharing."""
    num_blocks: Count = 2048
    """Blocks of the KV cache, shared by all running requests."""
    step_tokens: Count = 512
    """Token budget of a step. Larger steps prefill long prompts sooner but delay the next token of decoding requests.
    Drafts are verified in the budget that prefill leaves."""
    prefill: Literal["mixed", "separate"] = "mixed"
    """What a GPU does with prompts while completions decode. mixed: one step for both, in which a completion gets one
    token. separate: a step for the prompts, then `steps_per_sync` decode steps for the completions, which get more
    tokens where prompts keep coming; a prompt waits longer. Not with speculation."""
    max_running: Count = 64
    """Largest number of completions that run at once."""
    max_context: Count | None = None
    """Largest number of tokens of prompt and completion together; by default the model's context length."""
    on_weight_update: OnWeightUpdate = "continue"
    """How a weight update treats completions in flight. finish: they end on the old weights, which stay until then; new
    prompts wait. continue: they resume with the new weights, and each token records the policy version that sampled it.
    restart: they start over. Tokens already sent cannot be taken back, so with restart the engine sends a completion
    whole, at its end, and all its tokens have one version."""
    stale_cache: StaleCache = "drop"
    """How a weight update treats KV cache entries of older weights. drop: all are recomputed when needed. keep:
    completions that continue keep theirs, mixed with entries of the new weights; after a preemption the new weights
    alone prefill. In neither case does a prompt hit the prefix cache of another version than the one it starts on."""
    speculation: Annotated[int, Field(ge=0, le=3)] = 0
    """Largest number of draft tokens per completion and step that the MTP modules make; the engine tunes the number as
    it runs. The output distribution does not change. 0: the modules do not run and take no cache memory."""
    steps_per_sync: Annotated[int, Field(ge=1, le=64)] = 8
    """Decode steps that a GPU runs between host syncs: arrivals, ends and aborts take effect after this many steps. The
    host's work, which grows with the batch, is done once for all of them."""
    seed: int | None = None
    """Seeds the generator that gives seeds to prompts without one; by default from the system, so that engines
    differ."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.step_tokens < self.max_running:
            raise ValueError(
                f"step_tokens ({self.step_tokens}) must be at least max_running ({self.max_running}): "
                "each completion in flight takes one token of a step"
            )
        if self.speculation and self.prefill == "separate":
            raise ValueError('prefill = "separate" does not combine with speculation; leave one of them out')
        return self


class ServerConfig(Config):
    host: str = "127.0.0.1"
    """Address to listen on; the default accepts connections from this machine only."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8400
    """Port to listen on; 0 takes any free one."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 32 << 20
    """Largest size of a request's body."""
    max_samples: Annotated[int, Field(gt=0)] = 256
    """Largest number of completions of one request."""
    hosts: tuple[str, ...] = ()
    """Names and addresses under which clients reach the server, besides this machine's loopback and `host`; requests
    with another Host header are rejected. On host 0.0.0.0 every IP address is also accepted."""


class ServeConfig(Config):
    lineage: str = ""
    """The run that trained the weights; by default the folder's name."""
    step: Annotated[int, Field(ge=0, le=MAX_INT32)] = 0
    """Optimizer steps of the run that the weights have had."""
    branch: str = ""
    """The trainer process that wrote the weights, as in the name of a published folder; see `PolicyVersion`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "stored", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and KV cache. auto: as stored, except that a CPU that decodes faster in float32, measured by a
    probe at startup, uses float32, in twice the memory."""
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
