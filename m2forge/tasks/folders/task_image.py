"""The image of a task folder: a Dockerfile or a name in, layers in the store of images out.

The image is that of `environment.docker_image`, or what `environment/Dockerfile` builds. A name is looked up in the
store of images (`m2forge image list`), where an alias stands for a base that cannot be pulled; `base_image` stands for
every other. If podman is there and the base is not in the store, podman builds it, as `podman-DIGEST`; otherwise the
instructions run in a sandbox. The layer that they leave is stored as `task-DIGEST`. It is built once: the digest covers
the base and the folder `environment/`. Instructions before the last COPY that follows a RUN are a layer of their own,
which folders that differ only in later files share: most install packages first, and copy a repository then.

The instructions of a Dockerfile that a sandbox can do without a container runtime are read: FROM, COPY and ADD of files
of the context, RUN, WORKDIR, ENV, ARG and USER. Instructions that describe how a container is started (CMD, ENTRYPOINT,
EXPOSE, LABEL, …) do not matter to a sandbox. Several stages and remote sources are refused by name: they need
`podman build`.

Repositories in the image lose every object that is not part of the checked-out commit and its history: a later commit
may hold the solution.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import os
import posixpath
import re
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from m2forge.errors import DataError, NotFoundError
from m2forge.protocols import Command
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import HOST, Image, ImageStore, StoredImage, remove_tree, shifts_ids
from m2forge.sandbox.namespace import NamespaceSandbox, run_folder
from m2forge.tasks.folders.artifact import own_layer
from m2forge.tasks.folders.folder import CONFIG_NAME

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
IGNORED = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "HEALTHCHECK", "STOPSIGNAL", "VOLUME", "ONBUILD")
_IMAGE_KEY = re.compile(r"""^\s*docker_image\s*=\s*["'](.+?)["']""", re.MULTILINE)
_VARIABLE = re.compile(r"\\\$|\$\{(\w+)(?::([-+])([^}]*))?\}|\$(\w+)")


# -- reading a Dockerfile ----------------------------------------------------------------------------------------------


class NeedsRuntimeError(DataError):
    """A Dockerfile that only a container runtime can build."""


@dataclass(frozen=True, slots=True)
class Copy:
    sources: tuple[str, ...]
    """Paths in the context, perhaps with wildcards."""
    target: str
    """An absolute path; with `/` at its end a folder."""
    owner: str | None


@dataclass(frozen=True, slots=True)
class Run:
    argv: tuple[str, ...]
    workdir: str
    user: str | None
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    base: str
    steps: tuple[Copy | Run, ...] = ()
    workdir: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def read_dockerfile(path: Path) -> Dockerfile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    reader = _Reader(path)
    for number, line in _logical_lines(text):
        word, _, rest = line.partition(" ")
        reader.take(word.upper(), rest.strip(), number)
    return reader.finish()


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Instructions with the number of their first line; continued lines are joined, comments left out."""
    found: list[tuple[int, str]] = []
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not parts and not line.strip()):
            continue
        first = first if parts else number
        is_continued = line.rstrip().endswith("\\")
        parts.append(line.rstrip().removesuffix("\\").strip() if is_continued else line.strip())
        if not is_continued:
            found.append((first, " ".join(part for part in parts if part)))
            parts = []
    if parts:
        found.append((first, " ".join(part for part in parts if part)))
    return found


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._base: str | None = None
        self._steps: list[Copy | Run] = []
        self._workdir: str | None = None
        self._user: str | None = None
        self._env: dict[str, str] = {}
        self._args: dict[str, str] = {}

    def take(self, name: str, rest: str, number: int) -> None:
        where = f"{self._path}:{number}"
        if "<<" in rest and name in ("RUN", "COPY", "ADD"):
            raise NeedsRuntimeError(f"{where}: here documents need podman")
        match name:
            case "FROM":
                self._take_from(self._expand(rest), where)
            case "ARG":
                key, _, value = rest.partition("=")
                self._args[key.strip()] = self._expand(_unquoted(value))
            case "ENV":
                self._env |= {key: self._expand(value) for key, value in _pairs(rest, where).items()}
            case "WORKDIR":
                self._workdir = posixpath.normpath(posixpath.join(self._workdir or "/", self._expand(_unquoted(rest))))
            case "USER":
                self._user = self._expand(rest)
            case "COPY" | "ADD":
                self._take_copy(rest, where)
            case "RUN":
                self._take_run(rest, where)
            case _ if name not in (*IGNORED, "SHELL"):
                raise NeedsRuntimeError(f"{where}: {name} needs podman")

    def finish(self) -> Dockerfile:
        if self._base is None:
            raise DataError(f"{self._path}: expected FROM, and there is none")
        return Dockerfile(self._base, tuple(self._steps), self._workdir, self._user, self._env)

    def _take_from(self, rest: str, where: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--")]
        if self._base is not None:
            raise NeedsRuntimeError(f"{where}: several stages need podman")
        if not words:
            raise DataError(f"{where}: expected the name of an image after FROM")
        self._base = words[0]

    def _take_copy(self, rest: str, where: str) -> None:
        words = _words(rest, where)
        options = [word for word in words if word.startswith("--")]
        paths = [self._expand(word) for word in words if not word.startswith("--")]
        owner = next((option.partition("=")[2] for option in options if option.startswith("--chown=")), None)
        if unknown := [option for option in options if not option.startswith(("--chown=", "--link"))]:
            raise NeedsRuntimeError(f"{where}: {unknown[0]} needs podman")
        if len(paths) < 2 or any("://" in path or path.startswith("git@") for path in paths[:-1]):
            raise NeedsRuntimeError(f"{where}: expected files of the context and a target; other sources need podman")
        joined = posixpath.join(self._workdir or "/", paths[-1])
        target = posixpath.normpath(joined) + ("/" if paths[-1].endswith(("/", ".")) else "")
        self._steps.append(Copy(tuple(paths[:-1]), target, owner))

    def _take_run(self, rest: str, where: str) -> None:
        if rest.startswith("--"):
            raise NeedsRuntimeError(f"{where}: {rest.split()[0]} needs podman")
        argv: tuple[str, ...] = ("/bin/sh", "-c", rest)
        if rest.startswith("["):
            argv = tuple(_words(rest, where))
        self._steps.append(Run(argv, self._workdir or "/", self._user, self._args | self._env))

    def _expand(self, text: str) -> str:
        values = self._args | self._env

        def replace(match: re.Match[str]) -> str:
            if match[0] == "\\$":
                return "$"
            name, rule, other = match[1] or match[4], match[2], match[3] or ""
            value = values.get(name, "")
            return {"-": value or other, "+": other if value else ""}.get(rule or "", value)

        return _VARIABLE.sub(replace, text)


def _words(text: str, where: str) -> list[str]:
    try:
        if text.startswith("["):
            return [str(word) for word in json.loads(text)]
        return shlex.split(text)
    except ValueError as error:
        raise DataError(f"{where}: cannot be read: {error}") from error


def _pairs(text: str, where: str) -> dict[str, str]:
    words = _words(text, where)
    if words and "=" not in words[0]:
        return {words[0]: text.partition(words[0])[2].strip()}
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


# -- building an image -------------------------------------------------------------------------------------------------


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
    own = f"task-{await asyncio.to_thread(_digest, context, base, store)}"
    if not store.has(own):
        await _build_all(store, own, context, recipe, config, base)
    return TaskImage(base, (own,), recipe.workdir, recipe.user, recipe.env)


async def _build_all(
    store: ImageStore, name: str, context: Path | None, recipe: Dockerfile, config: SandboxConfig, base: str
) -> None:
    head, tail = _split(recipe.steps)
    if not head or context is None:
        await _build(store, name, context, recipe, config, base)
        return
    shared = f"task-{await asyncio.to_thread(_shared_digest, head, recipe.env, context, base, store)}"
    if not store.has(shared):
        await _build(store, shared, context, replace(recipe, steps=head), config, base)
    await _build(store, name, context, replace(recipe, steps=tail), config, base, store.find(shared))


def _split(steps: Sequence[Copy | Run]) -> tuple[tuple[Copy | Run, ...], tuple[Copy | Run, ...]]:
    """The steps before the last COPY that follows a RUN, and the others."""
    starts = [
        index
        for index, (before, step) in enumerate(itertools.pairwise(steps), 1)
        if isinstance(before, Run) and isinstance(step, Copy)
    ]
    at = starts[-1] if starts else 0
    return tuple(steps[:at]), tuple(steps[at:])


def _shared_digest(
    steps: Sequence[Copy | Run], env: Mapping[str, str], context: Path, base: str, store: ImageStore
) -> str:
    digest = hashlib.sha256(
        f"{_FORMAT}\0{shifts_ids()}\0{base}\0{store.digest(base)}\0{sorted(env.items())}\0".encode()
    )
    for step in steps:
        digest.update(f"{step}\0".encode())
        for pattern in step.sources if isinstance(step, Copy) else ():
            for found in _matches(context, pattern):
                _add_files(digest, found, context)
    return digest.hexdigest()[:24]


BUILT = ("task-", "podman-")
"""How names of images begin that were built for a folder; they are built again when they are missing."""


def built_names(folder: Path) -> set[str]:
    """All names under which images of a task folder may be stored, whatever their base: its environment's, and those of
    its verifiers."""
    store = ImageStore()
    bases = [HOST, *(image.name for image in store.images() if not image.name.startswith(BUILT))]
    contexts = [path.parent for path in folder.rglob("Dockerfile")]
    by_podman = [f"podman-{_digest(context, '', store)}" for context in contexts]
    over = [(context, base) for context in (None, *contexts) for base in bases]
    over += [(None, base) for base in by_podman]
    return {*by_podman, *(f"task-{_digest(context, base, store)}" for context, base in over)}


def base_names(folder: Path) -> set[str]:
    """The images that the environments of a task folder are, or are built on."""
    names = set(_IMAGE_KEY.findall(_text(folder / CONFIG_NAME)))
    for path in folder.rglob("Dockerfile"):
        with contextlib.suppress(DataError):  # podman builds it
            names.add(read_dockerfile(path).base)
    return names | {name.partition("@")[0] for name in names}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


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
    if context is not None:
        _add_files(digest, context, context)
    return digest.hexdigest()[:24]


def _add_files(digest: "hashlib._Hash", folder: Path, context: Path) -> None:
    """Add names, modes and contents of a folder's files, or of one file."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path.is_symlink():
            kind, content = "link", os.fsencode(path.readlink())
        elif path.is_file():
            kind, content = f"file {path.stat().st_mode & 0o777:o}", path.read_bytes()
        else:
            kind, content = "folder", b""
        digest.update(os.fsencode(f"{path.relative_to(context)}\0{kind}\0{len(content)}\0") + content)


async def _build(
    store: ImageStore,
    name: str,
    context: Path | None,
    recipe: Dockerfile,
    config: SandboxConfig,
    base: str,
    shared: StoredImage | None = None,
) -> None:
    """Copied files are layers written on this machine; commands run in a sandbox, whose changes are another layer.
    `shared`: the layers below."""
    layers: list[Path] = [] if shared is not None else [await asyncio.to_thread(_log_layer)]
    held = () if shared is None else tuple(str(layer) for layer in store.layers(shared))
    where = f"{context}/Dockerfile" if context is not None else name

    def below() -> tuple[str, ...]:
        return (*held, *map(str, layers))

    try:
        for is_copy, steps in itertools.groupby(recipe.steps, lambda step: isinstance(step, Copy)):
            if is_copy and context is not None:
                image = await asyncio.to_thread(store.stack, (base, *below()))
                copies = [step for step in steps if isinstance(step, Copy)]
                layers.append(await asyncio.to_thread(_copy_layer, copies, context, image))
            else:
                runs = [step for step in steps if isinstance(step, Run)]
                layers.append(await _run_layer(runs, config, base, below(), recipe.env, where))
        if (pruned := await _pruned_layer(config, base, below(), where)) is not None:
            layers.append(pruned)
        await asyncio.to_thread(store.store_layers, name, layers, where, shared)
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
            dest = target / path.name if is_folder and not path.is_dir() else target
            dest.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, dest, symlinks=True, dirs_exist_ok=True)
            else:
                dest.unlink(missing_ok=True)
                shutil.copy2(path, dest)
            owners.append((dest, step.owner or ROOT))
    own_layer(layer, ROOT)
    for dest, owner in owners:
        own_layer(dest, owner)
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
    config: SandboxConfig, base: str, layers: Sequence[str], env: Mapping[str, str]
) -> AsyncIterator[NamespaceSandbox]:
    own: dict[str, object] = {
        "backend": "namespace",
        "image": base,
        "layers": tuple(layers),
        "workspace": "/logs",
    }
    own |= {"user": ROOT if shifts_ids() else config.user, "network": "public", "allow": (), "timeout_s": BUILD_S}
    sandbox = await NamespaceSandbox.open(validated(config, own), env)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def _run_layer(
    steps: Sequence[Run], config: SandboxConfig, base: str, layers: Sequence[str], env: Mapping[str, str], where: str
) -> Path:
    async with _builder(config, base, layers, env) as sandbox:
        for step in steps:
            inner = ("/bin/sh", "-c", 'mkdir -p "$0" && cd "$0" && exec "$@"', step.workdir, *step.argv)
            user = step.user if shifts_ids() else None
            outcome = await sandbox.build(Command(inner, env=step.env, user=user, merges_stderr=True))
            if not outcome.is_success:
                raise DataError(
                    f"{where}: RUN {step.argv[-1].strip()[:200]!r} ended with {outcome.reason} {outcome.status}: "
                    f"{outcome.stdout.text().strip()[-1000:]}"
                )
        return (await sandbox.snapshot()).layer


async def _pruned_layer(config: SandboxConfig, base: str, layers: Sequence[str], where: str) -> Path | None:
    """Remove objects of repositories that may hold the solution; None if the image has no repository."""
    async with _builder(config, base, layers, {}) as sandbox:
        listed = await sandbox.run(Command(("/bin/sh", "-c", _FIND_REPOSITORIES)))
        found = [line.partition(" ") for line in listed.stdout.text().splitlines()]
        if not found and not listed.is_success and await asyncio.to_thread(_has_repository, base, layers):
            raise DataError(
                f"{where}: repositories cannot be listed without sh, find and stat; add them, or leave .git out"
            )
        for owner, _, path in found:
            user = owner if shifts_ids() else None
            outcome = await sandbox.run(Command(("/bin/sh", "-c", _PRUNE, path), user=user, merges_stderr=True))
            if not outcome.is_success:
                raise DataError(
                    f"{where}: git objects of {path} that may hold the solution cannot be removed: "
                    f"{outcome.stdout.text().strip()[-500:]}; repair the repository, add git, or leave .git out"
                )
        return (await sandbox.snapshot()).layer if found else None


def _has_repository(base: str, layers: Sequence[str]) -> bool:
    image = ImageStore().stack((base, *layers))
    return any(".git" in names + files for layer in image.layers for _, names, files in os.walk(layer))


@functools.cache
def owner_of_files() -> str | None:
    """Whom files of the image belong to: root, where a sandbox has more than one id."""
    return ROOT if shifts_ids() else None


def validated(config: SandboxConfig, update: Mapping[str, object]) -> SandboxConfig:
    return SandboxConfig.model_validate(config.model_dump() | dict(update))
