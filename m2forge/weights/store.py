"""Policy versions in a folder: a trainer publishes them, whoever samples takes the newest.

    weights/step-00000012/      a model folder like any other, tokenizer included

A version is there whole or not at all, and means one state of the weights for good: publishing it a second time is
refused. A trainer that went back to an older checkpoint says so by `go_back` before it trains on. The newest few are
kept, because somebody may be reading the one before.
"""

import re
import shutil
from pathlib import Path

import torch

from m2forge.errors import ConfigError
from m2forge.model.checkpoint import save_model
from m2forge.model.folder import CONFIG_FILE
from m2forge.model.transformer import Transformer
from m2forge.records import PolicyVersion

_NAME = re.compile(r"step-(\d{8,})")


class WeightStore:
    def __init__(self, folder: Path, lineage: str, *, keep: int = 2, companions: tuple[Path, ...] = ()) -> None:
        """`companions`: files to lie beside the weights, such as the tokenizer's."""
        if keep < 1:
            raise ConfigError(f"keep: expected 1 or more published versions, received {keep}")
        self.folder, self.lineage = folder, lineage
        self._keep, self._companions = keep, companions

    def publish(self, model: Transformer, step: int, *, dtype: torch.dtype | None = None) -> Path:
        """Write the weights as version `step`; when this returns anybody can load them."""
        dest = self.folder / f"step-{step:08d}"
        self._remove_torn()
        save_model(model, dest, dtype=dtype, companions=self._companions)
        for path in list(self._found().values())[: -self._keep]:
            self._remove(path)
        return dest

    def newest(self) -> tuple[PolicyVersion, Path] | None:
        for step, path in reversed(self._found().items()):
            return PolicyVersion(self.lineage, step), path
        return None

    def go_back(self, step: int) -> None:
        """Forget every version behind `step`: those weights are lost, and others will bear their numbers."""
        for later, path in self._found().items():
            if later > step:
                self._remove(path)

    def _found(self) -> dict[int, Path]:
        """Folders by step, the oldest first."""
        found = {
            int(match[1]): path
            for path in self.folder.glob("step-*")
            if (match := _NAME.fullmatch(path.name)) and (path / CONFIG_FILE).is_file()
        }
        return dict(sorted(found.items()))

    def _remove(self, path: Path) -> None:
        # Without its configuration a folder is no version, so a removal that is cut short leaves none that is torn.
        (path / CONFIG_FILE).unlink()
        shutil.rmtree(path)

    def _remove_torn(self) -> None:
        """What a removal, or a trainer that was killed while it published, has left."""
        torn = [path for path in self.folder.glob("step-*") if not (path / CONFIG_FILE).is_file()]
        for path in (*torn, *self.folder.glob(".step-*.partial")):
            if _NAME.search(path.name):
                shutil.rmtree(path, ignore_errors=True)
