"""All trajectories of one source: a file, or a folder with files of either kind, in path order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from m2forge.errors import NotFoundError
from m2forge.sft.archive import plain_suffix
from m2forge.sft.atif import read_atif
from m2forge.sft.config import SourceConfig
from m2forge.sft.jsonl import read_jsonl
from m2forge.sft.report import Report
from m2forge.sft.trajectory import Trajectory

_KIND_OF: dict[str, Literal["jsonl", "atif"]] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "atif"}


def list_files(source: SourceConfig) -> list[Path]:
    """The files of `source`. A folder yields its files of the requested kind, except hidden ones."""
    path = Path(source.path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NotFoundError(f"{path}: no such file or folder; give the path of trajectories as JSONL or ATIF")
    wanted = {suffix for suffix, kind in _KIND_OF.items() if source.kind in ("auto", kind)}
    files = sorted(
        file
        for file in path.rglob("*")
        if plain_suffix(file) in wanted
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.is_file()
    )
    if not files:
        raise NotFoundError(f"{path}: the folder holds no {' or '.join(sorted(wanted))} file")
    return files


def read_source(source: SourceConfig, report: Report) -> Iterator[Trajectory]:
    """Yields valid trajectories in an order that depends only on paths and contents; problems go to `report`."""
    is_folder = Path(source.path).is_dir()
    for file in list_files(source):
        kind = _KIND_OF.get(plain_suffix(file), "jsonl") if source.kind == "auto" else source.kind
        if kind == "atif":
            yield from read_atif(file, report, source.unpack, foreign=is_folder)
        else:
            yield from read_jsonl(file, report, source.unpack)
