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

ADMIN_KEY_VARIABLE = "M2FORGE_ADMIN_KEY"
"""Environment variable with the key; a command line can be read by everybody on the machine."""


class ServerConfig(Config):
    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine reaches it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8400
    """0 takes any that is free."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 32 << 20
    """A request's body, at most."""
    max_samples: Annotated[int, Field(gt=0)] = 256
    """Completions of one request, at most."""
    admin_key: Annotated[str, Field(pattern="^[!-~]+$")] | None = None
    """Who changes the weights must send it as a bearer token. None lets everybody who reaches the server. Signs that a
    header can carry: no spaces, no letters beyond ASCII."""


class ServeConfig(Config):
    lineage: str = ""
    """The run whose weights these are; by default named after the folder."""
    step: Annotated[int, Field(ge=0, le=MAX_INT32)] = 0
    """Optimizer steps behind these weights within the run."""
    branch: str = ""
    """Which trainer process made them, as the name of a published folder has it; see `PolicyVersion`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = "stored"
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
