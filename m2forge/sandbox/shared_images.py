"""A folder of images that several machines share: a name means the same files on each of them.

    FOLDER/names/NAME.json      the digests of an image's layers, and its environment variables; written once
    FOLDER/layers/DIGEST        the entries of a layer (sandbox/archive.py), and the SHA-256 of these bytes

The first process that uses a name puts the image of that name in its own store here. From then on the name means these
layers, whatever other machines have under it: their stores fetch the layers that they lack. Owners are those inside a
sandbox.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from m2forge.errors import DataError
from m2forge.files import sync_path
from m2forge.records import JsonValue
from m2forge.sandbox.archive import Entry, read_entries, write_tree

VARIABLE = "M2FORGE_SHARED_IMAGES"
"""Environment variable that names the folder."""
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class SharedImages:
    folder: Path

    @property
    def names(self) -> list[str]:
        return sorted(unquote(path.stem) for path in (self.folder / "names").glob("*.json"))

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def read(self, name: str) -> Mapping[str, JsonValue] | None:
        """The record of an image, or None."""
        path = self._path(name)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{path}: not the record of an image ({error}); remove the file") from error
        return record if isinstance(record, dict) else {}

    def put(self, name: str, record: Mapping[str, JsonValue], layers: Sequence[Path], id_base: int) -> None:
        """Store an image, unless there is one of that name. `layers`: folders named by their digests, whose owners
        `id_base` was added to."""
        for layer in layers:
            if not (self.folder / "layers" / layer.name).exists():
                self._put_layer(layer, id_base)
        with self._written(self._path(name), is_first=True) as file:
            Path(file).write_text(json.dumps(dict(record), indent=2), encoding="utf-8")

    def _put_layer(self, layer: Path, id_base: int) -> None:
        digest = hashlib.sha256()
        with self._written(self.folder / "layers" / layer.name) as path, open(path, "wb") as file:  # noqa: PTH123

            def write(data: bytes) -> None:
                digest.update(data)
                file.write(data)

            write_tree(layer, write, id_base)
            file.write(digest.digest())

    def entries(self, digest: str) -> Iterator[tuple[Entry, Iterator[bytes]]]:
        """The files of a layer; raises after the last one if a byte is not the one that was stored."""
        path, found = self.folder / "layers" / digest, hashlib.sha256()
        with path.open("rb") as file:

            def read(size: int) -> bytes:
                data = file.read(size)
                found.update(data)
                return data

            yield from read_entries(read)
            if file.read(_DIGEST_BYTES + 1) != found.digest():
                raise DataError(f"{path}: its bytes are not those of its digest; remove the file, and its image")

    def _path(self, name: str) -> Path:
        return self.folder / "names" / f"{quote(name, safe='')}.json"

    @contextlib.contextmanager
    def _written(self, target: Path, *, is_first: bool = False) -> Iterator[str]:
        """A file that becomes `target` at the end, in one operation. `is_first`: unless it exists by then."""
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(dir=target.parent, prefix=".partial-")
        os.close(descriptor)
        try:
            yield path
            sync_path(Path(path))
            if is_first:
                with contextlib.suppress(FileExistsError):
                    os.link(path, target)
            else:
                os.replace(path, target)  # noqa: PTH105
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108


def shared_images() -> SharedImages | None:
    folder = os.environ.get(VARIABLE)
    return SharedImages(Path(folder)) if folder else None


def share_images(folder: Path) -> None:
    """Have this process and those that it starts share images in a folder."""
    os.environ.setdefault(VARIABLE, str(folder.absolute()))
