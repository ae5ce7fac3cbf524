"""Policy versions in a folder: a trainer publishes them, samplers load the newest.

    weights/step-00000012-9f86d081884c7d65/      a model folder like any other, tokenizer included: step and branch

With `anchor_every` above 1 most versions hold only the elements that changed since the one before (model/delta.py);
every reader of model folders reads them. A manifest states each file's digest (model/manifest.py), which readers
compare.

A version of a network with adapters is these and the path of their base model. With `has_merged` its folder also holds
the merged model, in a folder of its own, for samplers that do not merge adapters.

The ranks of a trainer publish together: each writes the files of its share of the tensors, rank 0 the rest, and
renames the folder once all are there.

A version is complete or absent, and always denotes the same weights: publishing a step twice is rejected. A trainer
that resumes from an older checkpoint calls `discard_after` first. It then publishes the same steps with other weights
under its own store's branch, so a removed version never equals its successor. The store retains the newest versions,
because a sampler may still be reading an older one, and the versions that they build on.
"""

import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from m2forge.errors import ConfigError, ExistsError
from m2forge.files import commit_folder
from m2forge.model.config_file import CONFIG_FILE
from m2forge.records import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

    from m2forge.model.transformer import Transformer

_NAME = re.compile(r"step-(\d{8,})(?:-([0-9a-f]+))?")
_BRANCH_BYTES = 8


@dataclass(frozen=True)
class Share:
    """One rank's share of a published version."""

    rank: int
    tensors: "Mapping[str, Tensor]"
    """By public name; each tensor is in the share of one rank."""
    exchange: Callable[[Any], list[Any]]
    """Returns what each rank passed, once all ranks have called it."""


Send = Callable[[PolicyVersion, Iterator[Path]], None]
"""Sends this rank's files of a version to the samplers, in a thread of its own. The iterator waits for each until it is
written, and raises a RuntimeError if the version cannot be."""


class WeightStore:
    def __init__(
        self,
        folder: Path,
        lineage: str,
        *,
        keep: int = 2,
        anchor_every: int = 1,
        has_merged: bool = False,
        companions: tuple[Path, ...] = (),
    ) -> None:
        """`anchor_every`: see `WeightsConfig`. `has_merged`: whether a version of a network with adapters also holds
        the merged model. `companions`: files to copy beside the weights, such as the tokenizer's."""
        if keep < 1:
            raise ConfigError(f"keep: expected 1 or more published versions, received {keep}")
        self._anchor_every, self._num_deltas = anchor_every, 0
        self._base: str | None = None
        """The folder of the last version that this store has published."""
        self._published: Mapping[str, Tensor] = {}
        """Its tensors, or this rank's share of them, with which the next is compared; empty if each is whole."""
        self.folder, self.lineage, self.branch = folder, lineage, secrets.token_hex(_BRANCH_BYTES)
        self._keep, self._has_merged, self._companions = keep, has_merged, companions

    def publish(self, model: "Transformer", step: int, share: Share | None = None, send: Send | None = None) -> Path:
        """Write the weights as version `step` of this store's branch; every process can load them once this returns.
        `share`: this rank's part, if several ranks call this together; `model` then needs no weights. `send`: called on
        every rank, with its files."""
        dest: Path = self._exchange(share, lambda: self._begin(step))
        base = self._write(model, dest, share, send)
        self._base, self._num_deltas = dest.name, 0 if base is None else self._num_deltas + 1
        if share is None or share.rank == 0:
            self._remove_old()
        return dest

    def _begin(self, step: int) -> Path:
        if (before := self._versions().get(step)) is not None:
            raise ExistsError(
                f"{before} is already published; call `discard_after` with an earlier step to publish step {step} again"
            )
        self._remove_torn()
        dest = self.folder / f"step-{step:08d}-{self.branch}"
        _partial(dest).mkdir(parents=True)
        return dest

    def _exchange(self, share: Share | None, lead: Callable[[], Any]) -> Any:
        """Rank 0's result of `lead`, on all ranks."""
        if share is None:
            return lead()
        return share.exchange(lead() if share.rank == 0 else None)[0]

    def _write(self, model: "Transformer", dest: Path, share: Share | None, send: Send | None) -> str | None:
        """Write and commit a version; returns the folder that it changes, None for a whole one."""
        # Only a trainer, which publishes, needs torch: importing it would take the RL loop seconds.
        from m2forge.model.checkpoint import complete_version, public_tensors, write_merged, write_share
        from m2forge.model.manifest import NUM_THREADS, Entry, describe

        partial, tensors = _partial(dest), public_tensors(model) if share is None else share.tensors
        has_base = self._base is not None and self._num_deltas + 1 < self._anchor_every
        base: str | None = self._exchange(share, lambda: self._base if has_base else None)
        published, self._published, self._base = self._published, {}, None  # None while a version is being written
        rank = None if share is None else share.rank
        with _sending(send, self._version_of(dest)) as written, ThreadPoolExecutor(NUM_THREADS) as pool:
            described = dict[str, Future[Entry]]()
            for path in write_share(model, tensors, partial, rank, None if base is None else published):
                written.put(path)
                described[path.name] = pool.submit(describe, path)
            written.put(None)
            if base is None and self._anchor_every > 1:
                published = {
                    name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
                }
            self._published = published
            entries = {name: entry.result() for name, entry in described.items()}
            by_rank = [entries] if share is None else share.exchange(entries)
            if share is None or share.rank == 0:
                files = {name: entry for found in by_rank for name, entry in found.items()}
                complete_version(model, partial, files, base, self._companions)
                if self._has_merged and model.lora is not None:
                    write_merged(model, partial, self._companions)
        # Each rank has sent its files before their folder is renamed, and goes on once it is.
        self._exchange(share, lambda: None)
        self._exchange(share, lambda: commit_folder(partial, dest))
        return base

    def _remove_old(self) -> None:
        kept = {path for last in list(self._versions().values())[-self._keep :] for path in self._chain(last)}
        # The newest first: at any moment, the versions that a remaining one builds on are there.
        for path in reversed(self._versions().values()):
            if path not in kept:
                self._remove(path)

    def newest(self) -> tuple[PolicyVersion, Path] | None:
        for path in reversed(self._versions().values()):
            return self._version_of(path), path
        return None

    def _version_of(self, path: Path) -> PolicyVersion:
        match = _NAME.fullmatch(path.name)
        assert match is not None
        return PolicyVersion(self.lineage, int(match[1]), match[2] or "")

    def discard_after(self, step: int) -> None:
        """Remove every version after `step`, whose weights are lost."""
        self._base = None
        for later, path in reversed(self._versions().items()):
            if later > step:
                self._remove(path)

    def _chain(self, path: Path) -> Iterator[Path]:
        """The version in `path` and those that it builds on."""
        from m2forge.model.delta import delta_base, is_delta_folder

        yield path
        while is_delta_folder(path):
            path = delta_base(path)
            yield path

    def _versions(self) -> dict[int, Path]:
        """Folders by step, the oldest first."""
        found = {
            int(match[1]): path
            for path in self.folder.glob("step-*")
            if (match := _NAME.fullmatch(path.name)) and is_version(path)
        }
        return dict(sorted(found.items()))

    def _remove(self, path: Path) -> None:
        # Not a version any more, so an interrupted removal never leaves a partial one.
        (path / CONFIG_FILE).unlink()
        shutil.rmtree(path)

    def _remove_torn(self) -> None:
        """Delete what an interrupted removal, or a trainer killed while publishing, left behind."""
        torn = [path for path in self.folder.glob("step-*") if not is_version(path)]
        for path in (*torn, *self.folder.glob(".step-*.partial")):
            if _NAME.search(path.name):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _sending(send: Send | None, version: PolicyVersion) -> Iterator["SimpleQueue[Path | BaseException | None]"]:
    """Yields a queue for the files of a version, which `send` takes from it in a thread, and None after the last."""
    written = SimpleQueue[Path | BaseException | None]()
    with ThreadPoolExecutor(1, "m2forge-broadcast") as pool:
        sent = None if send is None else pool.submit(send, version, _until_none(written))
        try:
            yield written
        except BaseException as error:
            written.put(error)
            raise
        if sent is not None:
            sent.result()


def _until_none(written: "SimpleQueue[Path | BaseException | None]") -> Iterator[Path]:
    while (found := written.get()) is not None:
        if isinstance(found, BaseException):
            raise RuntimeError("the version could not be written") from found
        yield found


def is_version(folder: Path) -> bool:
    """Whether a version is there; one that is being removed is not."""
    return (folder / CONFIG_FILE).is_file()


def _partial(dest: Path) -> Path:
    return dest.with_name(f".{dest.name}.partial")
