"""Config of the HTTP inference server and of the engine behind it.

[server]
port = 8400
max_body_bytes = 1_000_000
"""

from typing import Annotated, Literal

from pydantic import Field

from m2forge.config import Config
from m2forge.records import MAX_INT32
from m2forge.rollout.config import RolloutConfig


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
