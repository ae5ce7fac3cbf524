"""What an attempt leaves for its verifier: the layer of files that its sandbox has changed in, a checked one out.

The verifier's sandbox stacks that layer over a fresh image. Only declared paths stay in it, with their owners, modes
and deletions: regular files, folders and links inside a declared folder, up to `MAX_BYTES` and `MAX_FILES`. Links that
lead out of their folder are removed, also those that do so only together with another link.

Files that decide how tests run are removed from the layer, so that the image's own apply: `conftest.py`, `pytest.ini`,
modules that Python imports at its start (`sitecustomize`, `.pth`), compiled modules, plugins, and modules in the way
of the runner's own. In `pyproject.toml`, `setup.cfg` and `tox.ini` the part that configures pytest is the image's.
"""

import configparser
import fnmatch
import io
import os
import posixpath
import shutil
import stat
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from m2forge.config import TomlValue
from m2forge.errors import DataError
from m2forge.records import JsonValue
from m2forge.sandbox.image import Image, id_base, shifts_ids
from m2forge.tasks.folders.task_toml import Artifact

CONVENTION = "/logs/artifacts"
"""Reaches the verifier whether it is declared or not, as with Harbor."""
RESTORED = ("/tests", "/solution", "/logs/verifier", "/etc/ld.so.preload")
"""Paths that never come from an attempt, declared or not."""
MAX_BYTES = 256 << 20
"""Limit of all artifacts of an attempt together."""
MAX_FILES = 20_000
MAX_SHOWN = 20
"""Paths that evidence lists of each kind."""
MAX_CONFIG_BYTES = 1 << 20

RUNNER_FILES = frozenset({"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"})
RUNNER_SCRIPTS = frozenset({"conftest", "sitecustomize", "usercustomize", "py"})
"""Python files by name, of pytest and of Python itself."""
RUNNER_ENDINGS = (".pth", ".egg-link", ".pyc")
RUNNER_FOLDERS = frozenset({"__pycache__", ".pytest_cache"})
RUNNER_MODULES = frozenset({"pytest", "_pytest", "pluggy"})
"""Modules of the test runner: such a name is removed unless the image has it at the same path."""
RUNNER_SECTIONS = {"pyproject.toml": "tool.pytest", "setup.cfg": "tool:pytest", "tox.ini": "pytest"}
PLUGIN_GROUP = "pytest11"
SHELLS = frozenset(f"{folder}/{name}" for folder in ("/bin", "/usr/bin") for name in ("sh", "bash", "dash", "env"))
"""Programs that start tests."""


class ArtifactError(DataError):
    """Artifacts that cannot be verified, because there are too many."""


@dataclass(slots=True)
class Artifacts:
    """A checked layer."""

    layer: Path
    left_out: list[str] = field(default_factory=list)
    """Links that lead out of their folder."""
    dropped: list[str] = field(default_factory=list)
    """Files that would decide how tests run."""
    num_files: int = 0
    num_bytes: int = 0


def evidence_of(checked: Sequence[Artifacts]) -> dict[str, JsonValue]:
    """What a verdict shows of its artifacts."""
    lists = {
        "left_out": [path for layer in checked for path in layer.left_out],
        "dropped": [path for layer in checked for path in layer.dropped],
    }
    shown: dict[str, JsonValue] = {name: [*paths[:MAX_SHOWN]] for name, paths in lists.items() if paths}
    num_files, num_bytes = sum(layer.num_files for layer in checked), sum(layer.num_bytes for layer in checked)
    return {"num_files": num_files, "num_bytes": num_bytes, **shown}


def check_layer(layer: Path, declared: Sequence[Artifact] | None, workdir: str, image: Image) -> Artifacts:
    """Remove from a layer what must not reach the verifier. `declared`: None keeps all paths, as a shared verifier
    needs. `image`: what the layer lies over. Raises `ArtifactError` if too much is left."""
    entries = None if declared is None else _Declared(declared, workdir)
    artifacts = Artifacts(layer)
    for inside, path in _walk(layer):
        if _is_restored(inside) or (entries is not None and not entries.has(inside)):
            if entries is not None and entries.is_parent(inside) and path.is_dir() and not path.is_symlink():
                _show_below(path)
            else:
                _remove(path)
            continue
        _check_one(artifacts, inside, path, entries.top(inside) if entries is not None else "/", image)
        is_over = artifacts.num_files > MAX_FILES or artifacts.num_bytes > MAX_BYTES
        if is_over and entries is not None:
            raise ArtifactError(f"{inside}: over {MAX_FILES} files or {MAX_BYTES} bytes; declare what tests need")
    return artifacts


def own_layer(folder: Path, user: str) -> None:
    """Give a file or folder of a layer, and what it holds, to a user of the sandbox, where it has several."""
    if not shifts_ids():
        return
    uid, _, gid = user.partition(":")
    ids = [id_base() + (int(text) if text.isdigit() else 0) for text in (uid, gid or uid)]
    below = (path for _, path in _walk(folder)) if folder.is_dir() and not folder.is_symlink() else ()
    for path in (folder, *below):
        os.chown(path, ids[0], ids[1], follow_symlinks=False)


class _Declared:
    def __init__(self, declared: Sequence[Artifact], workdir: str) -> None:
        self._excluded = {
            posixpath.normpath(posixpath.join(workdir, entry.source)): entry.exclude for entry in declared
        }
        self._excluded.setdefault(CONVENTION, ())

    def top(self, inside: str) -> str:
        """The declared path that holds this one; the longest, "" if there is none."""
        tops = (source for source in self._excluded if inside == source or inside.startswith(source.rstrip("/") + "/"))
        return max(tops, key=len, default="")

    def has(self, inside: str) -> bool:
        top = self.top(inside)
        if not top:
            return False
        relative = inside.removeprefix(top).lstrip("/")
        names = (relative, posixpath.basename(inside))
        return not any(fnmatch.fnmatch(name, pattern) for name in names for pattern in self._excluded[top] if name)

    def is_parent(self, inside: str) -> bool:
        return any(source.startswith(inside + "/") for source in self._excluded)


def _walk(layer: Path) -> Iterator[tuple[str, Path]]:
    """All files below a layer by their path inside; a folder comes before what it holds and may be removed."""
    pending = [layer]
    while pending:
        folder = pending.pop()
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            yield f"/{path.relative_to(layer)}", path
            if is_folder and path.is_dir():
                pending.append(path)


def _is_restored(inside: str) -> bool:
    return any(inside == path or inside.startswith(path + "/") for path in RESTORED)


def _check_one(artifacts: Artifacts, inside: str, path: Path, top: str, image: Image) -> None:
    status = path.lstat()
    artifacts.num_files += 1
    artifacts.num_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    if stat.S_ISLNK(status.st_mode) and top != "/" and not _leads_inside(artifacts.layer, path, inside, top):
        artifacts.left_out.append(inside)
        path.unlink()
    elif _decides_runs(path, status) or _shadows_runner(inside, path, image) or (top == "/" and inside in SHELLS):
        artifacts.dropped.append(inside)
        _remove(path)
    elif path.name in RUNNER_SECTIONS and stat.S_ISREG(status.st_mode) and _restore_section(path, image, inside):
        artifacts.dropped.append(f"{inside}: [{RUNNER_SECTIONS[path.name]}]")


def _leads_inside(layer: Path, link: Path, inside: str, top: str) -> bool:
    if inside == top or os.readlink(link).startswith("/"):  # noqa: PTH115 (the text itself)
        return False
    folder = Path(os.path.realpath(layer)) / top.lstrip("/")
    return Path(os.path.realpath(link)).is_relative_to(folder)


def _decides_runs(path: Path, status: os.stat_result) -> bool:
    if stat.S_ISDIR(status.st_mode):
        return path.name in RUNNER_FOLDERS
    is_script = path.suffix == ".py" and path.stem in RUNNER_SCRIPTS
    if is_script or path.name in RUNNER_FILES or path.name.endswith(RUNNER_ENDINGS):
        return True
    if path.name != "entry_points.txt" or not stat.S_ISREG(status.st_mode):
        return False
    return status.st_size > MAX_CONFIG_BYTES or PLUGIN_GROUP.encode() in path.read_bytes()


def _shadows_runner(inside: str, path: Path, image: Image) -> bool:
    is_module = path.name.endswith((".py", ".so")) or "." not in path.name
    return is_module and path.name.partition(".")[0] in RUNNER_MODULES and _image_path(image, inside) is None


def _image_path(image: Image, inside: str) -> Path | None:
    for layer in reversed(image.layers):
        path = layer / inside.lstrip("/")
        if os.path.lexists(path):
            return None if stat.S_ISCHR(path.lstat().st_mode) else path
    return None


def _image_text(image: Image, inside: str) -> str:
    path = _image_path(image, inside)
    if path is None or path.is_symlink() or not path.is_file():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _show_below(folder: Path) -> None:
    """Let a folder show the image's files again, if the attempt replaced it."""
    try:
        os.removexattr(folder, "user.overlay.opaque", follow_symlinks=False)
    except OSError:
        return  # It is not set.


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# -- configurations of pytest in files of other programs --------------------------------------------------------------


def _restore_section(path: Path, image: Image, inside: str) -> bool:
    """Give a file the image's part for pytest; a file that cannot be read stays as it is, and pytest refuses it."""
    status = path.stat()
    if status.st_size > MAX_CONFIG_BYTES:
        path.write_text("")
        return True
    text, image_text = path.read_text(encoding="utf-8", errors="replace"), _image_text(image, inside)
    try:
        restored = _restored_toml(text, image_text) if path.suffix == ".toml" else _restored_ini(path, text, image_text)
    except (tomllib.TOMLDecodeError, configparser.Error, ValueError):
        return False
    if restored is not None:
        path.write_text(restored, encoding="utf-8")
    return restored is not None


def _restored_toml(text: str, image_text: str) -> str | None:
    """The text with the image's part; None if it has it already."""
    table = tomllib.loads(text)
    tool, wanted = table.get("tool", {}), _pytest_part(image_text)
    if not isinstance(tool, dict) or tool.get("pytest") == wanted:
        return None
    others = {key: value for key, value in tool.items() if key != "pytest"}
    return tomli_w.dumps(table | {"tool": others | ({} if wanted is None else {"pytest": wanted})})


def _pytest_part(text: str) -> TomlValue | None:
    try:
        tool = tomllib.loads(text).get("tool")
    except tomllib.TOMLDecodeError:
        return None
    return tool.get("pytest") if isinstance(tool, dict) else None


def _restored_ini(path: Path, text: str, image_text: str) -> str | None:
    section = RUNNER_SECTIONS[path.name]
    parser, image_parser = _parsed(text), _parsed(image_text)
    wanted = dict(image_parser[section]) if section in image_parser else None
    if (dict(parser[section]) if section in parser else None) == wanted:
        return None
    parser.remove_section(section)
    if wanted is not None:
        parser[section] = wanted
    output = io.StringIO()
    parser.write(output)
    return output.getvalue()


def _parsed(text: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names stay as written
    parser.read_string(text)
    return parser
