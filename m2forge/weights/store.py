"""Policy versions in a folder: a trainer publishes them, samplers load the newest.

    weights/step-00000012-9f86d081884c7d65/      a model folder like any other, tokenizer included: step and branch

A version is complete or absent, and always denotes the same weights: publishing a step twice is rejected. A trainer
that resumes from an older checkpoint calls `discard_after` first. It then publishes the same steps with other weights
under its own store's branch, so a removed version never equals its successor. The store retains the newest few, because
a sampler may still be reading an older one.
"""

import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from m2forge.errors import ConfigError, ExistsError
from m2forge.model.config_file import CONFIG_FILE
from m2forge.records import PolicyVersion

if TYPE_CHECKING:
    import torch

    from m2forge.model.transformer import Transformer

_NAME = re.compile(r"step-(\d{8,})(?:-([0-9a-f]+))?")
_BRANCH_BYTES = 8


class WeightStore:
    def __init__(self, folder: Path, lineage: str, *, keep: int = 2, companions: tuple[Path, ...] = ()) -> None:
        """`companions`: files to copy beside the weights, such as the tokenizer's."""
        if keep < 1:
            raise ConfigError(f"keep: expected 1 or more published versions, received {keep}")
        self.folder, self.lineage, self.branch = folder, lineage, secrets.token_hex(_BRANCH_BYTES)
        self._keep, self._companions = keep, companions

    def publish(self, model: "Transformer", step: int, *, dtype: "torch.dtype | None" = None) -> Path:
        """Write the weights as version `step` of this store's branch; every process can load them once this returns."""
        dest = self.folder / f"step-{step:08d}-{self.branch}"
        if (before := self._versions().get(step)) is not None:
            raise ExistsError(
                f"{before} is already published; call `discard_after` with an earlier step to publish step {step} again"
            )
        self._remove_torn()
        # Only a trainer, which publishes, needs torch: importing it would take the RL loop seconds.
        from m2forge.model.checkpoint import save_model

        save_model(model, dest, dtype=dtype, companions=self._companions)
        for path in list(self._versions().values())[: -self._keep]:
            self._remove(path)
        return dest

    def newest(self) -> tuple[PolicyVersion, Path] | None:
        for step, path in reversed(self._versions().items()):
            match = _NAME.fullmatch(path.name)
            assert match is not None
            return PolicyVersion(self.lineage, step, match[2] or ""), path
        return None

    def discard_after(self, step: int) -> None:
        """Remove every version after `step`, whose weights are lost."""
        for later, path in self._versions().items():
            if later > step:
                self._remove(path)

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
