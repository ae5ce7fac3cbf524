"""The folder in which a build keeps the output of finished stages, so that a killed build can resume.

It is `.NAME.work/FINGERPRINT` next to the destination; the fingerprint covers the configuration and the path, size and
mtime of every input file, so different builds never share it. Everything in it is written atomically. A lock prevents
a second process from building the same destination concurrently.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from m2forge.corpus.config import CorpusConfig, SourceKind
from m2forge.corpus.read.source import FileSpan, Part, list_parts
from m2forge.errors import ExistsError

PARTS_NAME = "parts.jsonl"


class StageStore:
    def __init__(self, folder: Path, fingerprint: str, num_parts: int) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.num_parts = num_parts

    def parts(self) -> Iterator[Part]:
        with (self.folder / PARTS_NAME).open(encoding="utf-8") as file:
            for line in file:
                data = json.loads(line)
                spans = tuple(FileSpan(**{**span, "kind": SourceKind(span["kind"])}) for span in data["spans"])
                yield Part(data["source"], spans, data["num_bytes"])

    def stage(self, name: str, part: int) -> Path:
        """Folder of a stage's output for a part."""
        return self.folder / name / f"{part:06d}"

    def stage_folders(self, name: str) -> list[Path]:
        return [self.stage(name, part) for part in range(self.num_parts)]


@contextmanager
def open_stage_store(config: CorpusConfig, dest: Path) -> Iterator[StageStore]:
    """Create or reopen the work folder of a build. The caller removes it with `remove_work` at the end."""
    root = work_root(dest)
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ExistsError(f"{dest} is being built by another process; wait for it, or end it first") from error
        listed = root / PARTS_NAME
        num_parts = 0
        digest = hashlib.sha256(config.model_dump_json().encode())
        digest.update(json.dumps(_beside(config)).encode())
        try:
            with listed.open("w", encoding="utf-8") as file:
                for part in list_parts(config.sources, config.part_bytes):
                    line = json.dumps(asdict(part), sort_keys=True)
                    digest.update(line.encode())
                    file.write(line + "\n")
                    num_parts += 1
        except BaseException:
            # Refused sources leave nothing behind, except what other builds have started.
            listed.unlink(missing_ok=True)
            if not any(path.is_dir() for path in root.iterdir()):
                remove_work(dest)
            raise
        fingerprint = digest.hexdigest()
        folder = root / fingerprint[:32]
        folder.mkdir(exist_ok=True)
        # Partial output of a killed run.
        for partial in [*folder.glob(".*.partial"), *folder.glob("*/.*.partial")]:
            shutil.rmtree(partial)
        listed.replace(folder / PARTS_NAME)
        yield StageStore(folder, fingerprint, num_parts)


def remove_work(dest: Path) -> None:
    shutil.rmtree(work_root(dest), ignore_errors=True)


def _beside(config: CorpusConfig) -> list[list[str | int]]:
    """Path, size and mtime of other files that a build reads: a tokenizer, the classifier's examples."""
    roots = [] if config.tokenizer.path is None else [Path(config.tokenizer.path)]
    if config.quality.classifier is not None:
        examples = (*config.quality.classifier.positive, *config.quality.classifier.negative)
        return _stamps(roots) + [
            [span.path, span.size, span.modified_ns]
            for part in list_parts(examples, config.part_bytes)
            for span in part.spans
        ]
    return _stamps(roots)


def _stamps(roots: list[Path]) -> list[list[str | int]]:
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.glob("*")))]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def work_root(dest: Path) -> Path:
    """The folder with the results of an unfinished build of `dest`."""
    dest = dest.absolute()
    return dest.with_name(f".{dest.name}.work")
