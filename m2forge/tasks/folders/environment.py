"""The sandbox of a task folder: a folder and a sandbox configuration in, the configuration of its attempts out.

`tasks/folders/task_image.py` builds the image.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from m2forge.errors import ConfigError, DataError
from m2forge.protocols import Sandbox
from m2forge.sandbox import cgroup
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import shifts_ids
from m2forge.tasks.folders.folder import TaskFolder, unsupported
from m2forge.tasks.folders.task_image import ROOT, TaskImage, task_image, validated
from m2forge.tasks.folders.task_toml import Environment, NetworkMode, PhaseTable, Step, VerifierMode

WORKDIR = "/app"
"""Where commands start if neither the folder nor its Dockerfile says it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FolderEnvironment:
    """What opens the sandboxes of a task folder."""

    folder: TaskFolder
    config: SandboxConfig
    """The agent's sandbox."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of every command."""
    verifier_configs: Mapping[str | None, SandboxConfig] = field(default_factory=dict)
    """The verifier's sandbox, by the step's name; None: that of a task without steps."""

    async def open(self) -> Sandbox:
        """A sandbox for an agent."""
        return await open_sandbox(self.config, env=self.env)

    def verifier_config(self, step: Step | None = None) -> SandboxConfig:
        return self.verifier_configs[None if step is None else step.name]


async def prepare(folder: TaskFolder, config: SandboxConfig, base_image: str | None = None) -> FolderEnvironment:
    """`config`: limits, backend and layers; the folder decides on image, user, workspace and network. `base_image`:
    the image that stands for one that is not in the store."""
    if config.backend == "process":
        raise ConfigError('sandbox.backend: task folders bring their own files; set "namespace", or "auto"')
    if missing := unsupported(folder):
        raise DataError(f"{folder.path}: not supported here: {', '.join(missing)}")
    environment = folder.config.environment
    context = folder.environment if not environment.docker_image and folder.dockerfile is not None else None
    image = await task_image(context, environment.docker_image, config, base_image)
    agent = folder.config.agent
    own = {
        "timeout_s": max(config.timeout_s, agent.timeout_sec or 0.0),
        "workspace": environment.workdir or image.workdir or WORKDIR,
        "user": _user(agent.user, image.user, config),
        **_network(agent, environment),
        **_limits(environment),
    }
    merged = _merged(config, image, own)
    found = FolderEnvironment(folder, merged, {**image.env, **resolved(environment.env, folder)})
    steps: tuple[Step | None, ...] = folder.steps or (None,)
    verifiers = {
        None if step is None else step.name: await _verifier_config(found, config, step, base_image) for step in steps
    }
    return replace(found, verifier_configs=verifiers)


async def _verifier_config(
    environment: FolderEnvironment, config: SandboxConfig, step: Step | None, base_image: str | None
) -> SandboxConfig:
    folder, task = environment.folder, environment.folder.config
    verifiers = [step.verifier, task.verifier] if step is not None else [task.verifier]
    user = next((verifier.user for verifier in verifiers if verifier.user is not None), None)
    phase = next((verifier for verifier in verifiers if verifier.network_mode is not None), task.verifier)
    base = environment.config
    own: dict[str, object] = {"timeout_s": max(base.timeout_s, *(verifier.timeout_sec for verifier in verifiers))}
    separate = next((verifier.environment for verifier in verifiers if verifier.environment is not None), None)
    dockerfile = folder.verifier_dockerfile(step)
    if task.mode(step) is VerifierMode.SHARED or (separate is None and dockerfile is None):
        if user is not None:
            own["user"] = _user(user, None, config)
        return validated(base, own | _network(phase, task.environment))
    separate = separate or task.environment
    name, context = separate.docker_image, None if dockerfile is None else dockerfile.parent
    if name is None and context is None:
        name, context = task.environment.docker_image, folder.environment
    image = await task_image(None if name else context, name, config, base_image)
    own["workspace"] = separate.workdir or image.workdir or base.workspace
    own["user"] = _user(user, image.user, config)
    return _merged(config, image, own | _network(phase, separate) | _limits(separate))


# -- configuration ----------------------------------------------------------------------------------------------------


def _merged(config: SandboxConfig, image: TaskImage, own: Mapping[str, object]) -> SandboxConfig:
    files = {"image": image.base, "layers": (*image.layers, *config.layers)}
    return validated(config, files | dict(own))


def _user(wanted: str | int | None, image_user: str | None, config: SandboxConfig) -> str:
    """As in a container, an image without a user runs as root. A sandbox that an ordinary user starts has one id."""
    user = str(wanted) if wanted is not None else image_user
    if shifts_ids():
        return user or ROOT
    return user if user and user.replace(":", "").isdigit() else config.user


def _network(phase: PhaseTable, environment: Environment) -> dict[str, object]:
    owner = phase if phase.network_mode is not None else environment
    match owner.network_mode or NetworkMode.PUBLIC:
        case NetworkMode.NO_NETWORK:
            return {"network": "none", "allow": ()}
        case NetworkMode.PUBLIC:
            return {"network": "public", "allow": ()}
    hosts = owner.allowed_hosts or ()
    if ranges := [host for host in hosts if "/" in host]:
        raise DataError(f"allowed_hosts: ranges of addresses are not supported, received {ranges[0]!r}; name the hosts")
    return {"network": "allowlist", "allow": tuple(host.removeprefix("*") for host in hosts)}


def _limits(environment: Environment) -> dict[str, object]:
    limits: dict[str, object] = {}
    if environment.memory_mb is not None:
        limits["max_memory_bytes"] = environment.memory_mb << 20
    if environment.storage_mb is not None:
        limits["max_disk_bytes"] = environment.storage_mb << 20
    if environment.cpus is not None and "cpu" in cgroup.parents():
        limits["max_cpus"] = environment.cpus
    elif environment.cpus is not None:
        _report_missing_cpus()
    return limits


@functools.cache
def _report_missing_cpus() -> None:
    _log.warning("no cgroup with the controller `cpu` is writable: environment.cpus of task folders does not apply")


def resolved(env: Mapping[str, str], folder: TaskFolder) -> dict[str, str]:
    """Variables of a folder. `${VAR}` would be one of this machine's, which may be a key: only a default is used."""
    values = {}
    for name, value in env.items():
        if value.startswith("${") and value.endswith("}"):
            _, found, default = value[2:-1].partition(":-")
            if not found:
                raise DataError(f"{folder.path}: env: {name}: {value} is a variable of this machine; no key enters")
            value = default
        values[name] = value
    return values
