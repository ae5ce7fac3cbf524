"""Held-out loss during training: the packs that a stage holds out in, metrics under `eval/` out.

Every evaluation reads the same packs from their beginning and runs them without gradient, so figures of one run are
comparable across steps and phases, and training is bit-identical with and without them. The loss that selects the best
checkpoint is `eval/loss`; in a phase that trains only the MTP modules, it is the mean of their losses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from m2forge.errors import DataError
from m2forge.records import Pack
from m2forge.train.config import EvalConfig, PhaseConfig
from m2forge.train.engine import TrainEngine

PREFIX = "eval/"


class HeldOutPacks(Protocol):
    """Packs that are never trained on."""

    @property
    def domains(self) -> tuple[str, ...]:
        """Names that `Pack.tags` index into."""
        ...

    def packs(self) -> Iterator[Pack]:
        """The packs of one evaluation, the same at each call."""
        ...


@dataclass(frozen=True)
class Evaluation:
    config: EvalConfig
    held_out: HeldOutPacks
    pack_tokens: int
    """Maximum tokens of a pack."""

    def measure(self, engine: TrainEngine, phase: PhaseConfig) -> dict[str, float]:
        """The metrics of the current weights. All ranks call this together."""
        num_tokens = 0

        def counted() -> Iterator[Pack]:
            nonlocal num_tokens
            for pack in self.held_out.packs():
                num_tokens += pack.tokens.size
                yield pack

        figures = engine.eval_rows(
            counted(),
            tag_names=self.held_out.domains,
            pack_tokens=self.pack_tokens,
            mtp_loss=phase.mtp_loss,
            mtp_top_k=phase.mtp_top_k,
        )
        if not figures:
            raise DataError("the held-out data has no pack to evaluate; hold out more")
        return {f"{PREFIX}{name}": value for name, value in figures.items()} | {f"{PREFIX}num_tokens": num_tokens}


def selection_loss(phase: PhaseConfig, metrics: dict[str, float]) -> float:
    """The loss by which the best checkpoint of `phase` is selected."""
    if phase.trains == "all":
        return metrics[f"{PREFIX}loss"]
    losses = [value for name, value in metrics.items() if name.startswith(f"{PREFIX}mtp_loss/")]
    return sum(losses) / len(losses)
