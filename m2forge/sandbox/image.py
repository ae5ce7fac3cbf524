"""Images: the files that commands of a sandbox see, as read-only layers in a store in the user's cache folder.

    images/layers/DIGEST/           the files of one layer; DIGEST is that of the tar, or of the folder's entries
    images/names/NAME.json          an image: its layers, the lowest first, and where it comes from

A layer is unpacked under a temporary name and renamed, so it is complete or not there. The process that unpacks holds a
lock on that folder; one without is left by a killed process and removed. A process that uses a layer holds a shared
lock on it; `remove` refuses to take it away.

The image `host` shows this machine's system folders, read-only. Its /etc is its own, with the index of libraries, the
certificates and nothing else of the machine's; no home and no folder that keeps keys is visible.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from m2forge.compiled import cache_folder
from m2forge.errors import DataError, NotFoundError, suggest
from m2forge.files import write_atomic
from m2forge.records import JsonValue
from m2forge.sandbox.archive import Entry, TreeWriter, read_entries, write_tree
from m2forge.sandbox.shared_images import SharedImages, shared_images

HOST = "host"
DIGEST = "sha256:"
ID_BASE = 2_000_000_000
"""The host's id of id 0 inside, where root starts sandboxes; 65,536 follow. No account has such an id."""
NUM_IDS = 65_536
MAX_ENTRIES = 2_000_000
MAX_RATIO = 100.0
"""An archive may unpack to this many times its own size, and to `MIN_BYTES` whatever its size."""
MIN_BYTES = 1 << 30
PARTIAL = ".partial-"
WHITEOUT, OPAQUE = b".wh.", b".wh..wh..opq"
"""Names by which a layer's tar hides files of the layers below."""
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000::/workspace:/bin/sh\n"
    "nobody:x:65534:65534::/nonexistent:/bin/false\n",
    "etc/group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


class ImageInUseError(DataError):
    """A process uses a layer that would be removed."""


@dataclass(frozen=True, slots=True)
class Image:
    layers: tuple[Path, ...]
    """The lowest first."""
    binds: tuple[tuple[str, str], ...] = ()
    """Folders of this machine that are mounted read-only: source, target."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables that its Dockerfile sets."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    name: str
    digests: tuple[str, ...]
    source: str
    created_s: float
    env: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        if len(self.digests) == 1:
            return self.digests[0]
        return hashlib.sha256("\n".join(self.digests).encode()).hexdigest()


def shifts_ids() -> bool:
    """Whether sandboxes of this process have a range of ids: it is root, and its own namespace has the range."""
    if os.geteuid() != 0:
        return False
    try:
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return False
    return any(inside <= ID_BASE and inside + num >= ID_BASE + NUM_IDS for inside, _, num in ranges)


def id_base() -> int:
    return ID_BASE if shifts_ids() else 0


@dataclass(frozen=True)
class ImageStore:
    folder: Path = field(default_factory=lambda: cache_folder() / "images")
    shared: SharedImages | None = field(default_factory=shared_images)
    """What names mean to all machines that share it."""

    @property
    def _layers(self) -> Path:
        return self.folder / "layers"

    @property
    def _names(self) -> Path:
        return self.folder / "names"

    # -- use -------------------------------------------------------------------------------------------------------

    def resolve(self, reference: str) -> Image:
        """The image that a name, a digest or a path stands for; an archive is unpacked on first use."""
        if reference == HOST:
            return host_image(self)
        if "/" in reference or reference in (".", ".."):
            path = Path(reference).absolute()
            if path.is_dir():
                return Image((path,))
            if path.is_file():
                return Image((self._held(self._add_tar(path)),))
            raise NotFoundError(f"image: {reference} is neither a folder nor a file")
        found = self.find(reference)
        return Image(self.layers(found), env=found.env)

    def layers(self, image: StoredImage) -> tuple[Path, ...]:
        """The folders of an image in the store."""
        return tuple(self._held(digest) for digest in image.digests)

    def stack(self, references: Sequence[str]) -> Image:
        """One image of several, the last on top."""
        images = [self.resolve(reference) for reference in references]
        return Image(
            tuple(layer for image in images for layer in image.layers),
            tuple(bind for image in images for bind in image.binds),
            tuple(variable for image in images for variable in image.env),
        )

    def find(self, reference: str) -> StoredImage:
        """The image of a name or digest."""
        if self.shared is not None and self.has(reference):
            return self._find_shared(self.shared, reference)
        if self.has(reference):
            return self._read(self._path(reference))
        images = self.images()
        if reference.startswith(DIGEST):
            prefix = reference.removeprefix(DIGEST)
            found = {image.digest: image for image in images if len(prefix) >= 6 and image.digest.startswith(prefix)}
            if len(found) == 1:
                return next(iter(found.values()))
        raise NotFoundError(
            f"image: there is no {reference!r}; {suggest(reference, [HOST, *(image.name for image in images)])}; "
            "`m2forge image build NAME SOURCE` adds one"
        )

    def _find_shared(self, shared: SharedImages, name: str) -> StoredImage:
        """What a name means to all machines. The first one that uses it decides that."""
        if not shared.has(name):
            own = self._read(self._path(name))
            shared.put(name, _record(own), self.layers(own), id_base())
        image = _parse(name, shared.read(name) or {}, shared.folder)
        missing = [digest for digest in image.digests if not (self._layers / digest).is_dir()]
        if missing:
            for digest in missing:
                self._add_layer(digest, shared.entries(digest), 1 << 62)
            with self._locked(fcntl.LOCK_SH):
                # A name of its own, so that `remove` finds the layers: this machine may mean another image by the name.
                self._name(replace(image, name=f"{name}@{DIGEST}{image.digest[:12]}"))
        return image

    def _held(self, digest: str) -> Path:
        layer = self._layers / digest
        if not layer.is_dir():
            raise NotFoundError(f"image: the layer {digest} is missing from {self._layers}; build the image again")
        _hold(layer)
        return layer

    # -- build, list, remove -----------------------------------------------------------------------------------------

    def build(self, name: str, sources: Sequence[str]) -> StoredImage:
        """Store an image of one or more sources, the last on top: folders, tars, folders with a Dockerfile (built by
        podman), or images of this store, which makes an alias or extends one."""
        if not name or name == HOST or "/" in name[:1] or name.startswith((DIGEST, ".")):
            raise DataError(f"image: expected a name such as python:3.12, received {name!r}")
        digests: list[str] = []
        env: dict[str, str] = {}
        for source in sources:
            path = Path(source)
            if path.is_dir() and any((path / file).is_file() for file in ("Dockerfile", "Containerfile")):
                digest, variables = self._add_build(path)
                digests.append(digest)
                env |= variables
            elif path.is_dir():
                digests.append(self._add_folder(path))
            elif path.is_file():
                digests.append(self._add_tar(path))
            else:
                found = self.find(source)
                digests += found.digests
                env |= dict(found.env)
        with self._locked(fcntl.LOCK_SH):
            if lost := [digest for digest in digests if not (self._layers / digest).is_dir()]:
                raise DataError(f"image: the layer {lost[0]} of {name} was removed meanwhile; build it again")
            return self._name(StoredImage(name, tuple(digests), " ".join(sources), time.time(), tuple(env.items())))

    def store_layers(
        self, name: str, layers: Sequence[Path], source: str, below: StoredImage | None = None
    ) -> StoredImage:
        """Store layers whose files have the owners that a sandbox sees, such as frozen ones. The folders are moved.
        `below`: an image whose layers are the lowest of this one too."""
        digests = [] if below is None else list(below.digests)
        self._layers.mkdir(parents=True, exist_ok=True)
        with self._locked(fcntl.LOCK_SH):
            for layer in layers:
                digest = hashlib.sha256()
                write_tree(layer, digest.update)
                target = self._layers / digest.hexdigest()
                if not target.is_dir():
                    with contextlib.suppress(OSError):
                        layer.rename(target)  # Another process may have been faster.
                remove_tree(layer)
                if not target.is_dir():
                    raise DataError(f"{target}: the layer could not be stored")
                digests.append(target.name)
            return self._name(StoredImage(name, tuple(digests), source, time.time()))

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Naming layers takes a shared lock, removing some an exclusive one: no image has a layer that was removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, kind)
            yield

    def _name(self, image: StoredImage) -> StoredImage:
        write_atomic(self._path(image.name), json.dumps(_record(image), indent=2))
        return image

    def _path(self, name: str) -> Path:
        return self._names / f"{quote(name, safe='')}.json"

    def has(self, name: str) -> bool:
        return self._path(name).is_file() or (self.shared is not None and self.shared.has(name))

    def digest(self, reference: str) -> str:
        """What identifies the files of a name in the store; anything else identifies itself."""
        return self.find(reference).digest if self.has(reference) else reference

    def images(self) -> list[StoredImage]:
        return [self._read(path) for path in sorted(self._names.glob("*.json"))]

    def _read(self, path: Path) -> StoredImage:
        try:
            record = json.loads(path.read_text())
        except ValueError as error:
            raise DataError(f"{path}: not the record of an image ({error}); remove the file") from error
        return _parse(unquote(path.stem), record, path)

    def remove(self, reference: str) -> StoredImage:
        """Remove an image, and its layers that no other image has."""
        with self._locked(fcntl.LOCK_EX):
            return self._remove(self.find(reference))

    def prune(self, prefixes: tuple[str, ...], kept: Collection[str]) -> list[StoredImage]:
        """Remove the images whose names begin with one of the prefixes, except those that are kept or in use."""
        removed = []
        for image in self.images():
            if image.name.startswith(prefixes) and image.name not in kept:
                with contextlib.suppress(ImageInUseError):
                    removed.append(self.remove(image.name))
        return removed

    def _remove(self, image: StoredImage) -> StoredImage:
        others = {digest for other in self.images() if other.name != image.name for digest in other.digests}
        layers = [self._layers / digest for digest in dict.fromkeys(image.digests) if digest not in others]
        with contextlib.ExitStack() as locks:
            for layer in layers:
                if layer.is_dir() and not locks.enter_context(_lock(layer, fcntl.LOCK_EX)):
                    raise ImageInUseError(f"image: {image.name} is in use by a sandbox; close it first")
            self._path(image.name).unlink(missing_ok=True)
            for layer in layers:
                remove_tree(layer)
                layer.with_suffix(".lock").unlink(missing_ok=True)
        return image

    def _add_folder(self, folder: Path) -> str:
        digest = hashlib.sha256()
        try:
            # Read once, so that the digest is that of what is stored.
            with tempfile.TemporaryFile() as file:

                def write(data: bytes) -> None:
                    digest.update(data)
                    file.write(data)

                write_tree(folder, write)
                file.seek(0)
                return self._add_layer(digest.hexdigest(), read_entries(file.read), 1 << 62)
        except OSError as error:
            raise DataError(f"{folder}: cannot be stored as a layer: {error}") from error

    def stored(self, folder: Path) -> Path:
        """A folder as a layer of this store, whose name is its digest."""
        return folder if folder.parent == self._layers else self._held(self._add_folder(folder))

    def _add_tar(self, path: Path) -> str:
        status = path.stat()
        digest = _tar_digest(path, status.st_size, status.st_mtime_ns, status.st_ino)
        limit = max(MIN_BYTES, int(MAX_RATIO * status.st_size))
        try:
            with tarfile.open(path) as archive:
                return self._add_layer(digest, tar_entries(archive), limit)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            raise DataError(f"{path}: cannot be unpacked: {error}") from error

    def _add_build(self, context: Path) -> tuple[str, dict[str, str]]:
        """The layer that a Dockerfile builds, and the environment that it sets."""
        podman = shutil.which("podman") or shutil.which("docker")
        if podman is None:
            raise NotFoundError(f"{context} has a Dockerfile: install podman, or give a folder or tar of the files")
        with tempfile.TemporaryDirectory() as scratch:
            identifier, archive = Path(scratch) / "id", Path(scratch) / "image.tar"
            _call([podman, "build", "--iidfile", str(identifier), str(context)])
            built = identifier.read_text().strip()
            variables = json.loads(_call([podman, "image", "inspect", built]))[0]["Config"].get("Env") or []
            container = _call([podman, "create", built, "/bin/true"]).strip()
            try:
                _call([podman, "export", "-o", str(archive), container])
            finally:
                _call([podman, "rm", container])
            return self._add_tar(archive), dict(variable.split("=", 1) for variable in variables)

    def _add_layer(self, digest: str, entries: Iterator[tuple[Entry, Iterator[bytes]]], max_bytes: int) -> str:
        target = self._layers / digest
        if target.is_dir():
            return digest
        self._layers.mkdir(parents=True, exist_ok=True)
        with self._partial() as partial:
            with TreeWriter(partial, max_bytes, MAX_ENTRIES, id_base()) as writer:
                for entry, content in entries:
                    writer.add(entry, content)
            partial.chmod(0o755)
            if shifts_ids():
                os.chown(partial, ID_BASE, ID_BASE)
            with contextlib.suppress(FileExistsError, OSError):
                partial.rename(target)  # Another process may have been faster.
        if not target.is_dir():
            raise DataError(f"{target}: the layer could not be stored")
        return digest

    @contextlib.contextmanager
    def _partial(self) -> Iterator[Path]:
        """A folder to unpack a layer in, locked meanwhile. Those without a lock, of killed processes, are removed."""
        with self._locked(fcntl.LOCK_EX):  # A folder without its lock yet must not look abandoned.
            for left in self._layers.glob(f"{PARTIAL}*"):
                with contextlib.suppress(OSError), _locked_folder(left):
                    remove_tree(left)
            folder = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=self._layers))
            lock = contextlib.ExitStack()
            lock.enter_context(_locked_folder(folder))
        with lock:
            try:
                yield folder
            finally:
                remove_tree(folder)


def _record(image: StoredImage) -> dict[str, JsonValue]:
    record: dict[str, JsonValue] = {"layers": list(image.digests), "source": image.source, "created_s": image.created_s}
    return record | {"env": dict(image.env)}


def _parse(name: str, record: Any, path: Path) -> StoredImage:
    try:
        facts = (record["source"], record["created_s"], tuple(record["env"].items()))
        return StoredImage(name, tuple(record["layers"]), *facts)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the record of the image {name} ({error}); remove the file") from error


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Raises BlockingIOError if another process has the lock, which the kernel releases when a process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@functools.cache
def _tar_digest(path: Path, size: int, mtime_ns: int, inode: int) -> str:
    """Computed once in a process for each state of the file, because every sandbox of a tar asks for it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"{' '.join(command[:2])} failed with status {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


@contextlib.contextmanager
def _lock(layer: Path, kind: int) -> Iterator[bool]:
    """Whether the lock could be had at once; it is released at the end."""
    with layer.with_suffix(".lock").open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@functools.cache
def _hold(layer: Path) -> int:
    """Keeps a layer from being removed while this process lives."""
    descriptor = os.open(layer.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def remove_tree(folder: Path) -> None:
    """Remove a folder if it exists, also what is read-only in it."""
    if not folder.exists():
        return
    if os.geteuid() != 0:
        for root, _, _ in os.walk(folder):
            with contextlib.suppress(OSError):
                Path(root).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def tar_entries(archive: tarfile.TarFile) -> Iterator[tuple[Entry, Iterator[bytes]]]:
    """The members of a tar; devices and pipes are left out."""
    for member in archive:
        name = _clean(member.name)
        if not name:
            continue
        folder, _, base = name.rpartition(b"/")
        mode, mtime_ns = member.mode & 0o7777, max(int(member.mtime), 0) * 1_000_000_000
        common = (mode, member.uid, member.gid, mtime_ns)
        if base == OPAQUE:
            if folder:
                yield Entry("d", folder, 0o755, is_opaque=True), iter(())
        elif base.startswith(WHITEOUT):
            yield Entry("w", (folder + b"/" if folder else b"") + base.removeprefix(WHITEOUT)), iter(())
        elif member.isdir():
            yield Entry("d", name, *common), iter(())
        elif member.issym():
            yield Entry("l", name, *common, link=os.fsencode(member.linkname)), iter(())
        elif member.islnk():
            yield Entry("h", name, *common, link=_clean(member.linkname)), iter(())
        elif member.isfile():
            file = archive.extractfile(member)
            assert file is not None
            yield Entry("f", name, *common, size=member.size), iter(functools.partial(file.read, 1 << 18), b"")


def _clean(name: str) -> bytes:
    """A member's name without leading `./` and trailing `/`; `..` stays and is refused later."""
    return b"/".join(part for part in os.fsencode(name).split(b"/") if part not in (b"", b"."))


# -- the image `host` -------------------------------------------------------------------------------------------------


@functools.cache
def host_image(store: ImageStore) -> Image:
    """A base with an /etc of its own, over which the system folders are mounted."""
    binds = []
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        for name in ("dev", "proc", "tmp", "root", "home", "var/tmp", "run"):
            (base / name).mkdir(parents=True)
        for name in _SYSTEM:
            here = Path("/") / name
            if here.is_symlink():
                (base / name).symlink_to(here.readlink())
            elif here.is_dir():
                (base / name).mkdir()
                binds.append((str(here), str(here)))
        for name, text in _FILES.items():
            (base / name).parent.mkdir(exist_ok=True)
            (base / name).write_text(text)
        for name in _ETC:
            source, target = Path("/etc") / name, base / "etc" / name
            with contextlib.suppress(OSError, shutil.Error):
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, target, symlinks=True, ignore=_unreadable)
                elif source.is_file():
                    shutil.copyfile(source, target)
        for path in [base, *base.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
                os.utime(path, (0, 0))  # The digest is that of the content.
        for path in base.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)
        layer = store.stored(base)
    return Image((layer,), tuple(binds))


def _unreadable(folder: str, names: list[str]) -> list[str]:
    """Files that not every user may read stay outside."""
    paths = [(name, Path(folder) / name) for name in names]
    return [name for name, path in paths if path.is_file() and not path.stat().st_mode & 0o004]
