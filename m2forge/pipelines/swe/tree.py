"""Trees: the files of a project in memory, and its Python metadata."""

import email.parser
import io
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import TypeAlias

from m2forge.tasks.folders.folder import FileKind, FolderFile

Tree: TypeAlias = Mapping[str, FolderFile]
"""The files of a project by their path in it."""

METADATA = "PKG-INFO"
GIT_ENV = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@localhost",
    "GIT_AUTHOR_DATE": "946684800 +0000",
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@localhost",
    "GIT_COMMITTER_DATE": "946684800 +0000",
}
"""Fixed, so that the same files are the same commit on every machine."""
COMMIT = ("git", "-c", "core.hooksPath=/dev/null", "commit", "-qm", "base", "--allow-empty")


@dataclass(frozen=True, slots=True)
class Release:
    """One state of a project, as a reader returns it."""

    tree: Tree
    metadata: str = ""
    """Its PKG-INFO; "" if the tree has none."""
    name: str = ""
    """A version or a commit."""


def pack_tree(tree: Tree) -> bytes:
    """A tree as a tar, the same bytes for the same tree."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, file in sorted(tree.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(file.content), 0o755 if file.kind is FileKind.EXECUTABLE else 0o644
            tar.addfile(member, io.BytesIO(file.content))
    return buffer.getvalue()


def unpack_tree(data: bytes) -> dict[str, FolderFile]:
    """The regular files of a tar."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if member.isfile() and (opened := tar.extractfile(member)) is not None:
                kind = FileKind.EXECUTABLE if member.mode & 0o100 else FileKind.FILE
                files[member.name] = FolderFile(opened.read(), kind)
    return files


def parse_metadata(text: str) -> "Message[str, str]":
    return email.parser.HeaderParser().parsestr(text)


def read_pyproject(tree: Tree) -> dict[str, object]:
    """The table of pyproject.toml; empty without one that can be read."""
    file = tree.get("pyproject.toml")
    try:
        return {} if file is None else tomllib.loads(file.content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}
