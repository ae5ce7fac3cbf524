"""Gateway configuration: address, limits, budgets, journals and logging.

[gateway]
port = 8500
journal = "runs/forge/journal"

[gateway.budget]
max_calls = 200
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.records import Sampling
from m2forge.text.message import FormatName, RewritePolicy

Count = Annotated[int, Field(gt=0, le=1 << 31)]
Seconds = Annotated[float, Field(gt=0)]


class Budget(Config):
    """Limits of one episode; an unset field means no limit. Calls beyond a limit are refused."""

    max_calls: Count | None = None
    """Maximum number of completions; each sample of a request counts."""
    max_tokens: Count | None = None
    """Maximum number of sampled tokens; a completion in flight counts with the maximum it reserved."""
    max_s: Seconds | None = None
    """Maximum seconds since the episode was created, gateway downtime excluded."""


class SamplingConfig(Config):
    """Sampling parameters that override those of requests. The defaults, temperature 1 and the whole vocabulary, match
    the distribution that a trainer computes."""

    temperature: float = 1.0
    """0 is greedy sampling."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.record()
        return self

    def record(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
        )


class GatewayConfig(Config):
    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine can connect. API keys are sent unencrypted, so put any other
    address behind a TLS proxy."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8500
    """TCP port; 0 picks a free one."""
    format: FormatName = "auto"
    """Chat format; auto uses the tokenizer's, and the model's own chat template where there is none of ours."""
    prefix_rewrites: RewritePolicy = "allow"
    """Whether a chat format may render earlier messages differently because of later ones. allow: the conversation
    branches there, and a message at the start says when. refuse: such a format is refused at the start."""
    restore_thinking: bool = True
    """Whether an answer sent back without its thinking keeps the recorded thinking; if not, the call branches."""
    budget: Budget = Budget()
    """Budget of episodes created without one."""
    journal: str = ""
    """Folder of the journals, one file per episode; empty writes nothing to disk."""
    max_closed: Annotated[int, Field(ge=0)] = 256
    """Maximum number of closed episodes in memory; older ones are reloaded from their journals on demand."""
    expire_s: Seconds = 86_400.0
    """Seconds without a request after which an episode is closed as expired."""
    sync: Literal["system", "disk"] = "system"
    """When a call counts as written. system: once the operating system has it, which survives a crash of this process.
    disk: after fsync, which survives a power loss and takes milliseconds."""
    context: Count | None = None
    """Maximum tokens of prompt plus completion; None uses the model's context length."""
    models: tuple[str, ...] = ("policy",)
    """Model names that GET /v1/models lists; requests may use any name, since there is only one policy."""
    max_body_bytes: Count = 64 << 20
    """Maximum size of a request's body."""
    max_header_bytes: Count = 64 << 10
    """Maximum total size of a request's headers."""
    max_depth: Annotated[int, Field(gt=0, le=200)] = 100
    """Maximum nesting depth of a body's arrays and objects."""
    max_items: Count | None = None
    """Maximum messages, tools and tool calls per request; None: as many as fit the context, but at least 1024."""
    num_body_workers: Annotated[int, Field(gt=0, le=64)] = 2
    """Number of worker processes that read large bodies, started at the first large body."""
    max_samples: Count = 128
    """Maximum number of completions per request (`n`)."""
    max_connections_per_key: Count = 256
    """Maximum connections per episode key; beyond it an idle one is closed, or else the request is refused."""
    max_connections: Count = 4096
    """Maximum connections of all episode keys together; connections with the admin key are not limited."""
    max_keyless_connections: Count = 2048
    """Maximum connections without a valid key; beyond it the oldest idle one, or else the oldest, is closed."""
    max_tool_calls: Count = 1024
    """Maximum tool calls per episode."""
    max_tool_bytes: Count = 64 << 10
    """Maximum size of a tool call's body."""
    read_timeout_s: Seconds = 60.0
    """Seconds within which a request's head must arrive, and then its body."""
    linger_s: Seconds = 5.0
    """Seconds for which the rest of an answered request's body is discarded before the connection is closed."""
    write_timeout_s: Seconds = 60.0
    """Seconds after which a client that does not read its response is disconnected."""
    call_timeout_s: Seconds = 3600.0
    """Seconds after which a completion is aborted and recorded as aborted."""
    shutdown_s: Seconds = 30.0
    """Seconds that requests in flight may finish at shutdown before they are aborted; streamed ones are recorded."""
    max_reward: Annotated[float, Field(gt=0, le=1e9)] = 1e9
    """Maximum absolute value of a posted reward."""
    strict: bool = False
    """Whether a request with a setting that would not be honoured is refused; if not, it is answered with a notice."""
    image_placeholder: str = "[image]"
    """Text that the model reads in place of an image."""
    records_experts: bool = False
    """Whether calls record each token's routed experts; only our engine returns them."""
    logs_text: bool = False
    """Whether prompts and completions may appear in logs."""
