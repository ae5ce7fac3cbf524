"""The configuration of a task folder: the table of `task.toml` in, a validated `TaskConfig` out.

Schema versions 1.0 to 1.4 are read. Keys of earlier versions are read under their current names:

    version                        schema_version
    environment.memory = "2G"      environment.memory_mb = 2048
    environment.storage = "512M"   environment.storage_mb = 512
    environment.allow_internet     environment.network_mode = "public" or "no-network"

As in Harbor, a value may change its type where that loses nothing ("60" is 60), and unknown keys are no error: lint
reports them (`tasks/folders/lint.py`), and they stay in the table from which a folder is written again.
"""

import copy
import ipaddress
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, field_validator, model_validator

from m2forge.config import Config, TomlValue, build
from m2forge.errors import ConfigError, DataError
from m2forge.records import Domain

SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MAIN_SERVICE = "main"
"""The service in which the agent works, the only one without a compose file."""
PROVENANCE = ("metadata", "m2forge")
"""Where `Provenance` is in the table."""

Seconds: TypeAlias = Annotated[float, Field(gt=0)]
User: TypeAlias = str | int
Table: TypeAlias = Mapping[str, TomlValue]

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([GMK])\s*", re.IGNORECASE)
_HOST_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_PACKAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SECRET = re.compile(r"authorization|cookie|token|key|secret|password|credential", re.IGNORECASE)
_REFERENCE = re.compile(r"(?:[A-Za-z][\w-]* +)?(?:\$\{\w+\}[ :-]*)+")
_NOT_PORTABLE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICE = re.compile(r"CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9¹²³]", re.IGNORECASE)


class FolderTable(Config):
    """Base of the tables of `task.toml`."""

    model_config = ConfigDict(extra="ignore", strict=False)


class NetworkMode(StrEnum):
    NO_NETWORK = "no-network"
    PUBLIC = "public"
    ALLOWLIST = "allowlist"


class VerifierMode(StrEnum):
    """Where tests run: in the agent's environment, or in a fresh one that receives the declared artifacts alone."""

    SHARED = "shared"
    SEPARATE = "separate"


class PhaseTable(FolderTable):
    """The network of one phase."""

    network_mode: NetworkMode | None = None
    """None: that of `environment`, where the default is `public`."""
    allowed_hosts: tuple[str, ...] | None = None
    """Hosts, addresses and address ranges that `allowlist` reaches."""

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        if self.allowed_hosts and self.network_mode is not NetworkMode.ALLOWLIST:
            raise ValueError(f"allowed_hosts: needs network_mode = 'allowlist', received {self.network_mode!r}")
        if self.network_mode is None and self.allowed_hosts is not None:
            raise ValueError("allowed_hosts: needs network_mode = 'allowlist'")
        for host in self.allowed_hosts or ():
            require_host(host)
        return self


class Healthcheck(FolderTable):
    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, Field(ge=0)] = 0.0
    start_interval_sec: Seconds = 5.0
    retries: int = 3


class Tpu(FolderTable):
    type: str = Field(min_length=1)
    topology: str = Field(pattern=r"^\s*[1-9]\d*(x[1-9]\d*)+\s*$")


class McpServer(FolderTable):
    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.transport == "stdio":
            if not self.command:
                raise ValueError("command: transport 'stdio' needs one")
            if self.headers:
                raise ValueError("headers: only HTTP transports have them")
        elif not self.url:
            raise ValueError(f"url: transport {self.transport!r} needs one")
        for name, value in self.headers.items():
            if not _HEADER.fullmatch(name) or "\r" in value or "\n" in value:
                raise ValueError(f"headers: expected a header's name and one line, received {name!r}")
            if _SECRET.search(name) and value.strip() and not _REFERENCE.fullmatch(value):
                raise ValueError(f"headers: {name}: expected a reference such as 'Bearer ${{TOKEN}}', not a credential")
        return self


class Environment(PhaseTable):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    """An image that is used instead of building `environment/Dockerfile`."""
    os: Literal["linux", "windows"] = "linux"
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: Tpu | None = None
    mcp_servers: tuple[McpServer, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables; `${VAR}` is the host's."""
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    """Where commands start; None: the image's WORKDIR."""

    @field_validator("os", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @property
    def network(self) -> NetworkMode:
        return self.network_mode or NetworkMode.PUBLIC


class Agent(PhaseTable):
    timeout_sec: Seconds | None = None
    user: User | None = None
    """Who runs the agent; None: the image's USER."""


class Collect(FolderTable):
    """A command that runs after the agent, before artifacts are copied."""

    command: str
    service: str = MAIN_SERVICE
    timeout_sec: Seconds = 60.0
    user: User | None = None

    @field_validator("service")
    @classmethod
    def _check_service(cls, value: str) -> str:
        return require_service(value)


class Verifier(PhaseTable):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    user: User | None = None
    """Who runs the tests; None: the image's USER."""
    environment_mode: VerifierMode | None = None
    """None: `separate` if `environment` is set, else that of the task, else `shared`."""
    environment: Environment | None = None
    collect: tuple[Collect, ...] = ()

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.environment_mode is VerifierMode.SHARED and self.environment is not None:
            raise ValueError("environment_mode = 'shared' has no environment of its own; leave one of both out")
        return self

    @property
    def mode(self) -> VerifierMode | None:
        """The mode that this table decides by itself."""
        if self.environment_mode is None and self.environment is not None:
            return VerifierMode.SEPARATE
        return self.environment_mode


class Artifact(FolderTable):
    """A file or folder that an attempt leaves, copied for the verifier."""

    source: str
    """Its path in the environment."""
    destination: str | None = None
    """Its path among the artifacts on the host; None: as `source`."""
    exclude: tuple[str, ...] = ()
    service: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if ".." in PurePosixPath(self.source).parts:
            raise ValueError(f"source: expected a path without '..', received {self.source!r}")
        if self.service is not None:
            require_service(self.service)
            if self.service != MAIN_SERVICE and not self.source.startswith("/"):
                raise ValueError(f"source: of another service: expected an absolute path, received {self.source!r}")
        path = self.destination
        if path and (
            "\\" in path
            or path.startswith("/")
            or path.strip("/") in ("", ".", "manifest.json")
            or ".." in path.split("/")
        ):
            raise ValueError(f"destination: expected a relative path, and not manifest.json, received {path!r}")
        return self


class Step(FolderTable):
    name: str
    """Its folder under `steps/`."""
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    """Later steps are left out if this one's reward is lower."""
    healthcheck: Healthcheck | None = None
    artifacts: tuple[str | Artifact, ...] = ()

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        stem = value.partition(".")[0].rstrip(" ")
        if not value.strip() or value in (".", "..") or value.endswith((".", " ")) or len(value.encode()) > 255:
            raise ValueError("expected the name of a folder")
        if _NOT_PORTABLE.search(value) or _DEVICE.fullmatch(stem):
            raise ValueError("expected the name of a folder that every system can have")
        return value


class Author(FolderTable):
    name: str
    email: str | None = None


class Package(FolderTable):
    name: str
    """ORG/NAME."""
    version: Annotated[str, Field(min_length=1)] | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _PACKAGE.fullmatch(value) or ".." in value:
            raise ValueError("expected ORG/NAME")
        return value


class Solution(FolderTable):
    env: dict[str, str] = Field(default_factory=dict)


class Provenance(FolderTable):
    """Where a task comes from, the table `[metadata.m2forge]`."""

    source: str | None = None
    """What the task was made from: a family, a repository, a dump."""
    package: str | None = None
    """Tasks of one package are all held out or all trained on. None: `source`, else the folder's name."""
    domain: Domain | None = None
    split: Literal["train", "held_out"] | None = None
    """Decides instead of `package`."""


class TaskConfig(FolderTable):
    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = "1.4"
    task: Package | None = None
    metadata: dict[str, object] = Field(default_factory=dict)
    verifier: Verifier = Verifier()
    agent: Agent = Agent()
    environment: Environment = Environment()
    solution: Solution = Solution()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    """The reward of a task with steps: the mean of theirs, or the last one's; None: the mean."""
    steps: tuple[Step, ...] | None = None
    artifacts: tuple[str | Artifact, ...] = ()

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        seen: set[str] = set()
        for step in self.steps or ():
            # Names that one file system or another takes for the same.
            key = unicodedata.normalize("NFC", step.name).casefold()
            if key in seen:
                raise ValueError(f"steps: expected each name once, received {step.name!r} again")
            seen.add(key)
        return self

    def mode(self, step: Step | None = None) -> VerifierMode:
        """How the task, or one of its steps, is verified."""
        own = None if step is None else step.verifier.mode
        return own or self.verifier.mode or VerifierMode.SHARED

    def artifacts_of(self, step: Step | None = None) -> list[Artifact]:
        """What the verifier of the task, or of one step, receives."""
        entries = [*self.artifacts, *(step.artifacts if step is not None else ())]
        return [Artifact(source=entry) if isinstance(entry, str) else entry for entry in entries]


def parse_table(table: Table, origin: str) -> TaskConfig:
    """Validate a table of any schema version; raises a `DataError` that names `origin`, key and value."""
    current = current_table(table, origin)[0]
    try:
        return build(TaskConfig, current, origin=origin)
    except ConfigError as error:
        raise DataError(str(error)) from error


def parse_provenance(table: Table, origin: str) -> Provenance:
    found: TomlValue = dict(table)
    for key in PROVENANCE:
        found = found.get(key, {}) if isinstance(found, dict) else {}
    if not isinstance(found, dict):
        raise DataError(f"{origin}: {'.'.join(PROVENANCE)}: expected a table, received {found!r}")
    try:
        return build(Provenance, found, origin=f"{origin}: {'.'.join(PROVENANCE)}")
    except ConfigError as error:
        raise DataError(str(error)) from error


# -- deprecated keys --------------------------------------------------------------------------------------------------


def current_table(table: Table, origin: str) -> tuple[dict[str, TomlValue], list[tuple[str, str]]]:
    """The table under current keys, and the deprecated keys that it had, each with its current name."""
    current, renamed = copy.deepcopy(dict(table)), list[tuple[str, str]]()
    if "version" in current:
        version = current.pop("version")
        current.setdefault("schema_version", version)
        renamed.append(("version", "schema_version"))
    for prefix, environment in _environments(current):
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in environment:
                _rename_size(environment, old, new, f"{origin}: {prefix}")
                renamed.append((f"{prefix}.{old}", f"{prefix}.{new}"))
        if "allow_internet" in environment:
            allowed = environment.pop("allow_internet")
            if not isinstance(allowed, bool):
                raise DataError(f"{origin}: {prefix}.allow_internet: expected true or false, received {allowed!r}")
            if "network_mode" not in environment and "allowed_hosts" not in environment:
                environment["network_mode"] = "public" if allowed else "no-network"
            renamed.append((f"{prefix}.allow_internet", f"{prefix}.network_mode"))
    return current, renamed


def _environments(table: dict[str, TomlValue]) -> Iterator[tuple[str, dict[str, TomlValue]]]:
    """The tables with the keys of `Environment`, each with its place."""
    environment = table.get("environment")
    if isinstance(environment, dict):
        yield "environment", environment
    steps = table.get("steps")
    owners: list[tuple[str, TomlValue]] = [("", table)]
    owners += [(f"steps[{index}].", step) for index, step in enumerate(steps if isinstance(steps, list) else ())]
    for prefix, owner in owners:
        verifier = owner.get("verifier") if isinstance(owner, dict) else None
        inner = verifier.get("environment") if isinstance(verifier, dict) else None
        if isinstance(inner, dict):
            yield f"{prefix}verifier.environment", inner


def _rename_size(environment: dict[str, TomlValue], old: str, new: str, origin: str) -> None:
    value = environment.pop(old)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise DataError(f"{origin}.{old}: expected a size such as '2G' or '512M', received {value!r}")
    factor = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[match[2].upper()]
    size = int(float(match[1]) * factor)
    if environment.setdefault(new, size) != size:
        raise DataError(f"{origin}: {old} = {value!r} is {size} MB, and {new} = {environment[new]!r}; leave one out")


# -- values -----------------------------------------------------------------------------------------------------------


def require_host(host: str) -> None:
    """Refuse what is neither a host name, perhaps with a leading `*.`, nor an address or a range of addresses."""
    name = host.strip().lower().rstrip(".")
    try:
        if "%" not in name:
            ipaddress.ip_network(name, strict=True)
            return
    except ValueError:
        pass
    labels = name.removeprefix("*.").split(".")
    if not all(_HOST_LABEL.fullmatch(label) for label in labels) or (name.startswith("*.") and _is_address(name[2:])):
        raise ValueError(f"allowed_hosts: expected a host, address or range, without port and path, received {host!r}")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def require_service(value: str) -> str:
    if not _SERVICE.fullmatch(value.strip()):
        raise ValueError(f"service: expected a name, received {value!r}")
    return value.strip()


def unsupported_keys(config: TaskConfig) -> list[str]:
    """Keys that ask for what sandboxes here do not offer; a folder that has one is refused instead of run without."""
    found = []
    environments: Sequence[tuple[str, Environment | None]] = [
        ("environment", config.environment),
        ("verifier.environment", config.verifier.environment),
        *((f"steps[{index}].verifier.environment", step.verifier.environment) for index, step in _indexed(config)),
    ]
    for prefix, environment in environments:
        if environment is None:
            continue
        wanted = {
            "os": environment.os == "windows",
            "gpus": bool(environment.gpus),
            "tpu": environment.tpu is not None,
            "mcp_servers": bool(environment.mcp_servers),
            "skills_dir": environment.skills_dir is not None,
            "healthcheck": environment.healthcheck is not None,
        }
        found += [f"{prefix}.{key}" for key, is_wanted in wanted.items() if is_wanted]
    found += [f"steps[{index}].healthcheck" for index, step in _indexed(config) if step.healthcheck is not None]
    owners = [("", config.verifier), *((f"steps[{index}].", step.verifier) for index, step in _indexed(config))]
    found += [
        f"{prefix}verifier.collect: service {hook.service!r}"
        for prefix, verifier in owners
        for hook in verifier.collect
        if hook.service != MAIN_SERVICE
    ]
    entries = [*config.artifacts, *(entry for _, step in _indexed(config) for entry in step.artifacts)]
    found += [
        f"artifacts: service {entry.service!r}"
        for entry in entries
        if isinstance(entry, Artifact) and entry.service not in (None, MAIN_SERVICE)
    ]
    return found


def _indexed(config: TaskConfig) -> list[tuple[int, Step]]:
    return list(enumerate(config.steps or ()))
