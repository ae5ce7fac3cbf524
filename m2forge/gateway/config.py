"""How a gateway serves: where it listens, what it refuses, what an episode may spend, and what it writes down.

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
from m2forge.text.format import FormatName

Count = Annotated[int, Field(gt=0, le=1 << 31)]
Seconds = Annotated[float, Field(gt=0)]


class Budget(Config):
    """What one episode may spend; a field that is not set has no limit. Calls beyond it are refused."""

    max_calls: Count | None = None
    """Completions, each sample of a request counted."""
    max_tokens: Count | None = None
    """Sampled tokens, those of completions in flight counted as long as they may become."""
    max_s: Seconds | None = None
    """Seconds since the episode was made."""


class SamplingConfig(Config):
    """How tokens are drawn, whatever requests ask for. By default at temperature 1 from the whole vocabulary, which is
    the distribution that a trainer computes."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
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
    """Who can reach it: by default this machine alone. Keys go over the wire as they are, so anything else belongs
    behind a proxy that encrypts."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8500
    """0 takes a free one."""
    format: FormatName = "auto"
    """The chat format; auto takes the tokenizer's."""
    restore_thinking: bool = True
    """Whether an answer that comes back without its thinking keeps the recorded one. If not, the call branches."""
    budget: Budget = Budget()
    """Of episodes that are made without one."""
    journal: str = ""
    """Folder of the journals, one file for each episode; empty keeps nothing on disk."""
    max_closed: Annotated[int, Field(ge=0)] = 256
    """Closed episodes that stay in memory; of older ones the journal is read again when somebody asks for them."""
    expire_s: Seconds = 86_400.0
    """An episode that is asked for nothing for so long is closed, as expired."""
    sync: Literal["system", "disk"] = "system"
    """When a call counts as written. system: when the operating system has it, which outlives this process. disk: when
    the disk has it, which outlives a loss of power and takes its milliseconds."""
    context: Count | None = None
    """Tokens of prompt and completion together; None takes what the model was made for."""
    models: tuple[str, ...] = ("policy",)
    """Names that the list of models tells. Requests may use any: there is one policy, whatever an agent calls it."""
    max_body_bytes: Count = 64 << 20
    """A request's body."""
    max_header_bytes: Count = 64 << 10
    """A request's headers together."""
    max_depth: Annotated[int, Field(gt=0, le=200)] = 100
    """Nesting of a body's arrays and objects."""
    max_items: Count | None = None
    """Messages, tools and tool calls of one request together; None: as many as the context can hold, and 1024."""
    num_body_workers: Annotated[int, Field(gt=0, le=64)] = 2
    """Processes that read large bodies, started when the first one comes."""
    max_samples: Count = 128
    """Completions of one request."""
    max_connections_per_key: Count = 256
    """Connections of one episode's key. Beyond them an idle one is closed, or else the request is refused."""
    max_connections: Count = 4096
    """Connections of all episodes' keys together. Those with the admin key are not limited."""
    max_keyless_connections: Count = 2048
    """Connections without a key that opens anything; beyond them the oldest idle one is closed."""
    max_tool_calls: Count = 1024
    """Calls of tools of one episode."""
    max_tool_bytes: Count = 64 << 10
    """The body of a call of a tool."""
    read_timeout_s: Seconds = 60.0
    """A body must have come whole by then."""
    linger_s: Seconds = 5.0
    """What still comes of the body of an answered request is dropped for so long; then the connection is closed."""
    write_timeout_s: Seconds = 60.0
    """A client that leaves what it was sent unread for so long is hung up on."""
    call_timeout_s: Seconds = 3600.0
    """A completion that takes longer is aborted, and recorded as such."""
    shutdown_s: Seconds = 30.0
    """What is in flight may finish for so long when the gateway is told to stop; then it is aborted and recorded."""
    max_reward: Annotated[float, Field(gt=0, le=1e9)] = 1e9
    """A reward that is posted lies between its negative and this."""
    records_experts: bool = False
    """Whether engines are asked which experts each token went to, and calls record it. Our engine alone tells."""
    logs_text: bool = False
    """Whether prompts and completions may appear in logs."""
