"""The sandbox of a task folder: a folder and a sandbox configuration in, the configuration of its attempts out.

The image is that of `environment.docker_image`, or what `environment/Dockerfile` builds. A name is looked up in the
store of images (`m2forge image list`), where an alias stands for a base that cannot be pulled; `base_image` stands for
every other. If podman is there and the base is not in the store, podman builds it, as `podman-DIGEST`; otherwise the
instructions run in a sandbox. The layer that they leave is stored as `task-DIGEST`. It is built once: the digest
covers the base and the folder `environment/`.

Repositories in the image lose every object that is not part of the checked-out commit and its history: a later commit
may hold the solution.
"""

import asyncio
import functools
import hashlib
import itertools
import logging
import os
import posixpath
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from m2forge.errors import ConfigError, DataError, NotFoundError
from m2forge.protocols import Command, Sandbox
from m2forge.sandbox import cgroup
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import HOST, Image, ImageStore, remove_tree, shifts_ids
from m2forge.sandbox.namespace import NamespaceSandbox, run_folder
from m2forge.tasks.folders.artifact import own_layer
from m2forge.tasks.folders.dockerfile import Copy, Dockerfile, NeedsRuntimeError, Run, read_dockerfile
from m2forge.tasks.folders.folder import TaskFolder, unsupported
from m2forge.tasks.folders.task_toml import Environment, NetworkMode, PhaseTable, Step, VerifierMode

WORKDIR = "/app"
"""Where commands start if neither the folder nor its Dockerfile says it."""
ROOT = "0:0"
_MAX_LINKS = 100
BUILD_S = 3600.0
_FORMAT = "1"
"""Part of every digest: another number where the same files give another layer."""

_FIND_REPOSITORIES = "find / -xdev -name .git | while read -r found; do stat -c '%u:%g %n' \"$found\"; done"
_PRUNE = r"""
set -e
cd "$(dirname "$0")"
export HOME=/tmp GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
folder=$(git rev-parse --absolute-git-dir)
branch=$(git symbolic-ref -q HEAD || true)
git rev-parse -q --verify HEAD >/dev/null || exit 0
git for-each-ref --format='%(refname)' | while read -r ref; do
    [ "$ref" != "$branch" ] || continue
    case "$ref" in refs/tags/*) ! git merge-base --is-ancestor "$ref" HEAD 2>/dev/null || continue ;; esac
    git update-ref -d "$ref"
done
rm -rf "$folder/logs" "$folder/FETCH_HEAD" "$folder/ORIG_HEAD" "$folder/MERGE_HEAD" "$folder/CHERRY_PICK_HEAD"
git worktree prune
git repack -adq
rm -f "$folder/objects/info/alternates"
git prune --expire=now
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskImage:
    """What a Dockerfile, or the name of an image, stands for."""

    base: str
    """A name in the store."""
    layers: tuple[str, ...] = ()
    """Names in the store that are stacked over it."""
    workdir: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


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
        return _validated(base, own | _network(phase, task.environment))
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
    return _validated(config, files | dict(own))


def _validated(config: SandboxConfig, update: Mapping[str, object]) -> SandboxConfig:
    return SandboxConfig.model_validate(config.model_dump() | dict(update))


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


# -- images -----------------------------------------------------------------------------------------------------------


async def task_image(
    context: Path | None, name: str | None, config: SandboxConfig, base_image: str | None
) -> TaskImage:
    """The image of a folder with a Dockerfile, or of a name."""
    store = ImageStore()
    if context is None:
        if name is None:
            raise DataError("expected environment/Dockerfile or environment.docker_image, and there is neither")
        recipe = Dockerfile(name)
    else:
        try:
            recipe = read_dockerfile(context / "Dockerfile")
        except NeedsRuntimeError:
            return await _build_by_podman(store, context, config)
    try:
        base = _known(store, recipe.base, base_image)
    except NotFoundError as missing:
        if context is None or shutil.which("podman") is None:
            raise
        try:
            return await _build_by_podman(store, context, config)
        except DataError as error:
            raise NotFoundError(f"{missing}; podman could not build it either: {error}") from error
    own = f"task-{_digest(context, base, store)}"
    if not store.has(own):
        await _build(store, own, context, recipe, config, base)
    return TaskImage(base, (own,), recipe.workdir, recipe.user, recipe.env)


def _known(store: ImageStore, name: str, base_image: str | None) -> str:
    """The name of the image in the store, with or without its digest."""
    for candidate in (name, name.partition("@")[0]):
        if candidate == HOST or store.has(candidate):
            return candidate
    if base_image is not None:
        return base_image
    raise NotFoundError(
        f"image: {name!r} is not in the store; `m2forge image build {name.partition('@')[0]} SOURCE` adds it from a "
        "folder, tar or other image, and --image names one that stands for it"
    )


async def _build_by_podman(store: ImageStore, context: Path, config: SandboxConfig) -> TaskImage:
    built = f"podman-{_digest(context, '', store)}"
    if not store.has(built):
        await asyncio.to_thread(store.build, built, [str(context)])
    own = f"task-{_digest(None, built, store)}"
    if not store.has(own):
        await _build(store, own, None, Dockerfile(built), config, built)
    last = _last_stage(context / "Dockerfile")
    return TaskImage(built, (own,), last.workdir, last.user, last.env)


def _last_stage(path: Path) -> Dockerfile:
    """Workdir, user and variables of the last stage."""
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [index for index, line in enumerate(lines) if line.strip().upper().startswith("FROM ")]
    wanted = ("FROM ", "WORKDIR ", "USER ", "ENV ", "ARG ")
    found = [line for line in lines[starts[-1] if starts else 0 :] if line.strip().upper().startswith(wanted)]
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "Dockerfile"
        copy.write_text("\n".join(found), encoding="utf-8")
        return read_dockerfile(copy)


def _digest(context: Path | None, base: str, store: ImageStore) -> str:
    digest = hashlib.sha256(f"{_FORMAT}\0{shifts_ids()}\0{base}\0{store.digest(base)}\0".encode())
    for path in [] if context is None else sorted(context.rglob("*")):
        if path.is_symlink():
            kind, content = "link", os.fsencode(path.readlink())
        elif path.is_file():
            kind, content = f"file {path.stat().st_mode & 0o777:o}", path.read_bytes()
        else:
            kind, content = "folder", b""
        name = path.relative_to(context) if context is not None else path
        digest.update(os.fsencode(f"{name}\0{kind}\0{len(content)}\0") + content)
    return digest.hexdigest()[:24]


async def _build(
    store: ImageStore, name: str, context: Path | None, recipe: Dockerfile, config: SandboxConfig, base: str
) -> None:
    """Copied files are layers written on this machine; commands run in a sandbox, whose changes are another layer."""
    layers: list[Path] = [await asyncio.to_thread(_log_layer)]
    place = f"{context}/Dockerfile" if context is not None else name
    try:
        for is_copy, steps in itertools.groupby(recipe.steps, lambda step: isinstance(step, Copy)):
            if is_copy and context is not None:
                image = await asyncio.to_thread(store.stack, (base, *map(str, layers)))
                copies = [step for step in steps if isinstance(step, Copy)]
                layers.append(await asyncio.to_thread(_copy_layer, copies, context, image))
            else:
                runs = [step for step in steps if isinstance(step, Run)]
                layers.append(await _run_layer(runs, config, base, layers, recipe.env, place))
        if (pruned := await _pruned_layer(config, base, layers, place)) is not None:
            layers.append(pruned)
        await asyncio.to_thread(store.store_layers, name, layers, place)
    finally:
        for layer in layers:
            await asyncio.to_thread(remove_tree, layer)


def _new_layer() -> Path:
    layer = Path(tempfile.mkdtemp(prefix="image-", dir=run_folder()))
    layer.chmod(0o755)
    return layer


def _log_layer() -> Path:
    """The folders for logs, which every user may write."""
    layer = _new_layer()
    for name in ("agent", "artifacts", "verifier"):
        (layer / "logs" / name).mkdir(parents=True)
    own_layer(layer, ROOT)
    for name in ("agent", "artifacts", "verifier"):
        (layer / "logs" / name).chmod(0o777)
    return layer


def _copy_layer(steps: Sequence[Copy], context: Path, image: Image) -> Path:
    layer = _new_layer()
    owners: list[tuple[Path, str]] = []
    for step in steps:
        found = [path for pattern in step.sources for path in _matches(context, pattern)]
        is_folder = step.target.endswith("/") or len(found) > 1
        inside = _followed(image, step.target)
        if bind := next((bind for _, bind in image.binds if f"{inside}/".startswith(f"{bind}/")), None):
            raise DataError(
                f"{context / 'Dockerfile'}: COPY to {step.target}: {bind} of the image `host` is this machine's, "
                "read-only; use an image with files of its own"
            )
        target = layer / inside.lstrip("/")
        for path in found:
            place = target / path.name if is_folder and not path.is_dir() else target
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, place, symlinks=True, dirs_exist_ok=True)
            else:
                place.unlink(missing_ok=True)
                shutil.copy2(path, place)
            owners.append((place, step.owner or ROOT))
    own_layer(layer, ROOT)
    for place, owner in owners:
        own_layer(place, owner)
    return layer


def _followed(image: Image, path: str) -> str:
    """The path without the links of the image: a layer that has a folder in a link's place would hide it."""
    done, left = "/", [part for part in path.split("/") if part]
    for _ in range(_MAX_LINKS):
        if not left:
            return done
        step = posixpath.join(done, left.pop(0))
        found = next((layer / step[1:] for layer in reversed(image.layers) if os.path.lexists(layer / step[1:])), None)
        if found is not None and found.is_symlink():
            target = posixpath.normpath(posixpath.join(done, os.readlink(found)))  # noqa: PTH115 (a link inside)
            done, left = "/", [part for part in target.split("/") if part] + left
        else:
            done = step
    raise DataError(f"COPY to {path}: the image has a loop of links there")


def _matches(context: Path, pattern: str) -> list[Path]:
    relative = posixpath.normpath(pattern.lstrip("/")) if pattern.strip("/") else "."
    if relative.startswith(".."):
        raise DataError(f"{context / 'Dockerfile'}: COPY {pattern}: expected a path inside {context}")
    found = [context] if relative == "." else sorted(context.glob(relative))
    if not found:
        raise DataError(f"{context / 'Dockerfile'}: COPY {pattern}: there is no such file in {context}")
    return found


@asynccontextmanager
async def _builder(
    config: SandboxConfig, base: str, layers: Sequence[Path], env: Mapping[str, str]
) -> AsyncIterator[NamespaceSandbox]:
    own: dict[str, object] = {
        "backend": "namespace",
        "image": base,
        "layers": tuple(map(str, layers)),
        "workspace": "/logs",
    }
    own |= {"user": ROOT if shifts_ids() else config.user, "network": "public", "allow": (), "timeout_s": BUILD_S}
    sandbox = await NamespaceSandbox.open(_validated(config, own), env)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def _run_layer(
    steps: Sequence[Run], config: SandboxConfig, base: str, layers: Sequence[Path], env: Mapping[str, str], place: str
) -> Path:
    async with _builder(config, base, layers, env) as sandbox:
        for step in steps:
            inner = ("/bin/sh", "-c", 'mkdir -p "$0" && cd "$0" && exec "$@"', step.workdir, *step.argv)
            user = step.user if shifts_ids() else None
            outcome = await sandbox.build(Command(inner, env=step.env, user=user, merges_stderr=True))
            if not outcome.is_success:
                raise DataError(
                    f"{place}: RUN {step.argv[-1].strip()[:200]!r} ended with {outcome.reason} {outcome.status}: "
                    f"{outcome.stdout.text().strip()[-1000:]}"
                )
        return (await sandbox.snapshot()).layer


async def _pruned_layer(config: SandboxConfig, base: str, layers: Sequence[Path], place: str) -> Path | None:
    """Remove objects of repositories that may hold the solution; None if the image has no repository."""
    async with _builder(config, base, layers, {}) as sandbox:
        listed = await sandbox.run(Command(("/bin/sh", "-c", _FIND_REPOSITORIES)))
        found = [line.partition(" ") for line in listed.stdout.text().splitlines()]
        if not found and not listed.is_success and await asyncio.to_thread(_has_repository, base, layers):
            raise DataError(
                f"{place}: repositories cannot be listed without sh, find and stat; add them, or leave .git out"
            )
        for owner, _, path in found:
            user = owner if shifts_ids() else None
            outcome = await sandbox.run(Command(("/bin/sh", "-c", _PRUNE, path), user=user, merges_stderr=True))
            if not outcome.is_success:
                raise DataError(
                    f"{place}: git objects of {path} that may hold the solution cannot be removed: "
                    f"{outcome.stdout.text().strip()[-500:]}; repair the repository, add git, or leave .git out"
                )
        return (await sandbox.snapshot()).layer if found else None


def _has_repository(base: str, layers: Sequence[Path]) -> bool:
    image = ImageStore().stack((base, *map(str, layers)))
    return any(".git" in names + files for layer in image.layers for _, names, files in os.walk(layer))


@functools.cache
def owner_of_files() -> str | None:
    """Whom files of the image belong to: root, where a sandbox has more than one id."""
    return ROOT if shifts_ids() else None
