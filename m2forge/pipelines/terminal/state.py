"""Compares the final state of a workspace with the expected one: a folder and a JSON file in, a reward out.

    state.py show ROOT                      prints the state of a folder as JSON
    state.py check EXPECTED.json ROOT       prints 1 or 0; problems go to standard error

A state has an entry for each path: its kind, and the hash of its content, a link's target, a JSON file's value, or for
an archive the hash of what it holds, whatever its times, owners and compression are. A git repository is described by
the subjects of its commits, its files at HEAD and in the index, its branches and tags. Times and owners are never
compared, modes only where the expected state says so.

It imports the standard library alone, because task folders carry a copy of it.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

MAX_BYTES = 64 << 20
"""A larger file is described by its size."""
MAX_TEXT = 100_000
GIT = ("log --format=%s", "ls-tree -r HEAD", "ls-files -s", "branch --format=%(refname)", "tag", "status --porcelain")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def describe(path: str) -> dict[str, object]:
    """One file."""
    status = os.lstat(path)
    entry: dict[str, object] = {"kind": "file", "mode": format(stat.S_IMODE(status.st_mode), "04o")}
    if stat.S_ISLNK(status.st_mode):
        return {"kind": "link", "target": str(Path(path).readlink())}
    if stat.S_ISDIR(status.st_mode):
        return entry | {"kind": "folder"}
    if not stat.S_ISREG(status.st_mode):
        return entry | {"kind": "other"}
    if status.st_size > MAX_BYTES:
        return entry | {"size": status.st_size}
    try:
        data = Path(path).read_bytes()
    except OSError:
        return entry | {"unreadable": True}
    return entry | content(path, data)


def content(path: str, data: bytes) -> dict[str, object]:
    try:
        if data[:2] == b"\x1f\x8b":
            return {"packed": content(path, gzip.decompress(data))}
        if data[:3] == b"BZh":
            return {"packed": content(path, bz2.decompress(data))}
        if data[:6] == b"\xfd7zXZ\0":
            return {"packed": content(path, lzma.decompress(data))}
        if data[257:262] == b"ustar":
            return {"members": tar_members(data)}
        if data[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return {"members": sorted([name, digest(archive.read(name))] for name in archive.namelist())}
    except (OSError, EOFError, ValueError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile):
        pass
    if path.endswith(".json"):
        try:
            return {"json": json.dumps(json.loads(data), sort_keys=True)}
        except ValueError:
            pass
    entry: dict[str, object] = {"sha256": digest(data)}
    if len(data) <= MAX_TEXT:
        entry["text"] = data.decode("utf-8", "replace")
    return entry


def tar_members(data: bytes) -> list[list[str]]:
    members = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if member.isfile() else None
            held = digest(file.read()) if file is not None else member.linkname
            members.append([os.path.normpath(member.name), member.type.decode("latin-1"), held])
    return sorted(members)


def repository(folder: str) -> dict[str, object]:
    """A git repository, without hashes of commits, which depend on times."""
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    env |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    found: dict[str, object] = {"kind": "repository"}
    for command in GIT:
        done = subprocess.run(["git", "-C", folder, *command.split()], env=env, capture_output=True, text=True)
        found[command.split()[0]] = done.stdout.splitlines()
    return found


def state(root: str) -> dict[str, dict[str, object]]:
    """Every path below a folder; git's own files are described together."""
    found: dict[str, dict[str, object]] = {}
    for folder, folders, files in os.walk(root):
        if ".git" in folders:
            folders.remove(".git")
            found[os.path.relpath(f"{folder}/.git", root)] = repository(folder)
        for name in folders + files:
            path = f"{folder}/{name}"
            found[os.path.relpath(path, root)] = describe(path)
    return found


def lines(text: str, is_ordered: bool) -> list[str]:
    """Lines of an output, without white space at their ends and blank lines at its end."""
    found = [line.rstrip() for line in text.rstrip().split("\n")]
    return found if is_ordered else sorted(found)


def problems(expected: dict[str, object], found: dict[str, dict[str, object]]) -> list[str]:
    """What differs from the expected state."""
    entries: dict[str, dict[str, object]] = expected["entries"]  # type: ignore[assignment]
    optional: list[str] = expected["optional"]  # type: ignore[assignment]
    differing = []
    for path in sorted(set(entries) | set(found)):
        wanted, own = entries.get(path), found.get(path)
        if path in optional:
            continue
        if wanted is None:
            differing.append(f"{path}: should not exist")
        elif own is None:
            differing.append(f"{path}: missing")
        elif path == expected.get("output") and "text" in wanted and "text" in own:
            is_ordered = bool(expected["is_ordered"])
            if lines(str(own["text"]), is_ordered) != lines(str(wanted["text"]), is_ordered):
                differing.append(f"{path}: other output than expected")
        elif reduced(own, expected) != reduced(wanted, expected):
            differing.append(f"{path}: differs")
    return differing


def reduced(entry: dict[str, object], expected: dict[str, object]) -> dict[str, object]:
    """What is compared."""
    left_out = {"text"} if expected["compares_modes"] else {"text", "mode"}
    chosen = {name: value for name, value in entry.items() if name not in left_out}
    if isinstance(status := chosen.get("status"), list):
        # Files that only some solutions leave, beside a repository's own.
        own = {f"?? {path}" for path in (expected.get("output"), *expected["optional"])}  # type: ignore[misc]
        chosen["status"] = [line for line in status if line not in own]
    return chosen


def main(arguments: list[str]) -> None:
    if arguments[0] == "show":
        print(json.dumps(state(arguments[1])))
        return
    expected = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    differing = problems(expected, state(arguments[2]))
    print("\n".join(differing[:50]), file=sys.stderr)
    print(0 if differing else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
