"""Opens the sandbox that a configuration asks for."""

from collections.abc import Mapping
from pathlib import Path

from m2forge.errors import ConfigError
from m2forge.protocols import Sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.container import ContainerSandbox
from m2forge.sandbox.namespace import NamespaceSandbox
from m2forge.sandbox.network import Address
from m2forge.sandbox.process import ProcessSandbox

_CONFINING = ("namespace", "podman", "docker")
"""What `auto` tries, in this order; never a plain process, which would run untrusted programs with this user's files,
keys and network."""


async def open_sandbox(
    config: SandboxConfig,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    gateway: Address | None = None,
) -> Sandbox:
    """`folder`: the workspace with the backend `process`; others have one of their own. `env`: variables of every
    command. `gateway`: what `network = "gateway"` reaches."""
    match config.backend:
        case "process":
            if folder is None:
                raise ConfigError('sandbox.backend: "process" needs a folder of this machine as workspace')
            return ProcessSandbox(folder, config, env)
        case "namespace":
            return await NamespaceSandbox.open(config, env, gateway)
        case "podman" | "docker":
            return await ContainerSandbox.open(config.backend, config, env, gateway)
    problems = []
    for backend in _CONFINING:
        try:
            return await open_sandbox(config.model_copy(update={"backend": backend}), folder, env, gateway)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError(f"sandbox.backend: auto found no backend that confines programs: {'; '.join(problems)}")
