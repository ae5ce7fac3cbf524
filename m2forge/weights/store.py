"""Policy versions in a folder: a trainer publishes them, samplers load the newest.

    weights/step-00000012-9f86d081884c7d65/      a model folder like any other, tokenizer included: step and branch

With `anchor_every` above 1 most versions hold only the elements that changed since the one before (model/delta.py);
every reader of model folders reads them.

A version is complete or absent, and always denotes the same weights: publishing a step twice is rejected. A trainer
that resumes from an older checkpoint calls `discard_after` first. It then publishes the same steps with other weights
under its own store's branch, so a removed version never equals its successor. The store retains the newest few, because
a sampler may still be reading an older one, and those that they build on.
"""

import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from m2forge.errors import ConfigError, ExistsError
from m2forge.model.config_file import CONFIG_FILE
from m2forge.records import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

    from m2forge.model.transformer import Transformer

_NAME = re.compile(r"step-(\d{8,})(?:-([0-9a-f]+))?")
_BRANCH_BYTES = 8


class WeightStore:
    def __init__(
        self,
        folder: Path,
        lineage: str,
        *,
        keep: int = 2,
        anchor_every: int = 1,
        companions: tuple[Path, ...] = (),
    ) -> None:
        """`anchor_every`: see `WeightsConfig`. `companions`: files to copy beside the weights, such as the
        tokenizer's."""
        if keep < 1:
            raise ConfigError(f"keep: expected 1 or more published versions, received {keep}")
        self._anchor_every, self._num_deltas = anchor_every, 0
        self._published: tuple[str, dict[str, Tensor]] | None = None
        """The folder of the last version and, unless each is whole, its tensors, which the next is compared with."""
        self.folder, self.lineage, self.branch = folder, lineage, secrets.token_hex(_BRANCH_BYTES)
        self._keep, self._companions = keep, companions

    def publish(self, model: "Transformer", step: int) -> Path:
        """Write the weights as version `step` of this store's branch; every process can load them once this returns."""
        dest = self.folder / f"step-{step:08d}-{self.branch}"
        if (before := self._versions().get(step)) is not None:
            raise ExistsError(
                f"{before} is already published; call `discard_after` with an earlier step to publish step {step} again"
            )
        self._remove_torn()
        self._write(model, dest)
        kept = {path for last in list(self._versions().values())[-self._keep :] for path in self._chain(last)}
        # The newest first: at any moment, what a remaining version builds on is there.
        for path in reversed(self._versions().values()):
            if path not in kept:
                self._remove(path)
        return dest

    def _write(self, model: "Transformer", dest: Path) -> None:
        # Only a trainer, which publishes, needs torch: importing it would take the RL loop seconds.
        from m2forge.model.checkpoint import copy_tensors, save_delta, save_model

        published, self._published = self._published, None  # None while a version is being written
        if published is not None and self._num_deltas + 1 < self._anchor_every:
            base, tensors = published
            save_delta(model, dest, base, tensors, companions=self._companions)
            self._num_deltas += 1
        else:
            save_model(model, dest, companions=self._companions)
            tensors = copy_tensors(model) if self._anchor_every > 1 else {}
            self._num_deltas = 0
        self._published = dest.name, tensors

    def newest(self) -> tuple[PolicyVersion, Path] | None:
        for step, path in reversed(self._versions().items()):
            match = _NAME.fullmatch(path.name)
            assert match is not None
            return PolicyVersion(self.lineage, step, match[2] or ""), path
        return None

    def discard_after(self, step: int) -> None:
        """Remove every version after `step`, whose weights are lost."""
        self._published = None
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
            if (match := _NAME.fullmatch(path.name)) and (path / CONFIG_FILE).is_file()
        }
        return dict(sorted(found.items()))

    def _remove(self, path: Path) -> None:
        # A folder without config.json is not a version, so an interrupted removal never leaves a partial one.
        (path / CONFIG_FILE).unlink()
        shutil.rmtree(path)

    def _remove_torn(self) -> None:
        """Delete what an interrupted removal, or a trainer killed while publishing, left behind."""
        torn = [path for path in self.folder.glob("step-*") if not (path / CONFIG_FILE).is_file()]
        for path in (*torn, *self.folder.glob(".step-*.partial")):
            if _NAME.search(path.name):
                shutil.rmtree(path, ignore_errors=True)
