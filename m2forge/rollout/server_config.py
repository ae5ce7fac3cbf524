"""How a model is served by HTTP: the engine behind, and what the server takes.

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
    """Address to listen on; by default only this machine reaches it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8400
    """0 takes any that is free."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 32 << 20
    """A request's body, at most."""
    max_samples: Annotated[int, Field(gt=0)] = 256
    """Completions of one request, at most."""
    hosts: tuple[str, ...] = ()
    """Names and addresses under which clients reach the server, besides this machine's loopback and `host`; requests
    whose Host header gives another are refused. On host 0.0.0.0 every IP address is taken as well."""


class ServeConfig(Config):
    lineage: str = ""
    """The run whose weights these are; by default named after the folder."""
    step: Annotated[int, Field(ge=0, le=MAX_INT32)] = 0
    """Optimizer steps behind these weights within the run."""
    branch: str = ""
    """Which trainer process made them, as the name of a published folder has it; see `PolicyVersion`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "stored", "float32", "bfloat16", "float16"] = "auto"
    """How the engine holds weights and KV cache. auto: as stored, but on a CPU that decodes faster in float32, which a
    probe at start measures, in float32, in twice the memory."""
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
