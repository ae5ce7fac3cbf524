"""What was measured: one record, written as `eval.json` and read back equal.

A cell is the mean score of the samples of one suite at one size and depth, with its 95% interval.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from m2forge.errors import DataError, NotFoundError
from m2forge.files import write_atomic

JSON_FILE = "eval.json"
Z_95 = 1.959964
"""Standard deviations that hold 95% of a normal distribution on both sides."""


class _Record(BaseModel):
    # Written as JSON, which has no NaN: a network that diverged still gets its report.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings", protected_namespaces=())


class Cell(_Record):
    suite: str
    task: str
    length: int | None = None
    depth: float | None = None
    num_shots: int | None = None
    num_samples: int
    score: float
    """Mean share of right answers, 0 to 1."""
    exact: float
    """Share of samples with every answer right."""
    low: float
    high: float
    """95% Wilson interval of the score."""
    beyond_context: bool = False
    """Its samples are longer than the network's max_context."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


class ModuleLoss(_Record):
    """A multi-token prediction module, measured on the positions where the state it starts from exists."""

    depth: int
    """From 1: how many tokens old that state is."""
    nats_per_token: float
    agreement: float
    """Share of positions where its likeliest token is the main model's: where a draft would be accepted."""


class DomainLoss(_Record):
    domain: str
    num_tokens: int
    nats_per_token: float
    bits_per_byte: float | None
    """None where the tokenizer is not known."""
    modules: tuple[ModuleLoss, ...] = ()


class Failure(_Record):
    """One completion that did not pass, for a person to read."""

    suite: str
    line: int
    """Of the file with the prompts."""
    completion: str
    reasons: tuple[str, ...]


class EvalReport(_Record):
    model: str
    num_parameters: int
    max_context: int
    seed: int
    cells: tuple[Cell, ...] = ()
    losses: tuple[DomainLoss, ...] = ()
    """One per domain, and all together first."""
    failures: tuple[Failure, ...] = ()
    """The first few of each suite."""
    notes: tuple[str, ...] = ()
    """What a reader of the figures should know: skipped lines, random weights, lengths beyond the context."""

    @property
    def suites(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.suite for cell in self.cells))

    def cells_of(self, suite: str) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.suite == suite)

    def score(self, suite: str) -> float:
        """The mean over the samples of all cells of a suite."""
        cells = self.cells_of(suite)
        return sum(cell.score * cell.num_samples for cell in cells) / sum(cell.num_samples for cell in cells)

    def save(self, folder: Path) -> None:
        write_atomic(folder / JSON_FILE, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / JSON_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise NotFoundError(
                f"{path}: cannot be read ({error.strerror}); give a folder that an eval wrote"
            ) from error
        except ValidationError as error:
            raise DataError(f"{path}: not an evaluation report ({error.error_count()} problems)") from error


def make_cell(
    suite: str,
    task: str,
    scores: Sequence[float],
    exact: Sequence[bool],
    *,
    length: int | None = None,
    depth: float | None = None,
    num_shots: int | None = None,
    beyond_context: bool = False,
) -> Cell:
    mean = sum(scores) / len(scores)
    low, high = wilson(mean, len(scores))
    return Cell(
        suite=suite,
        task=task,
        length=length,
        depth=depth,
        num_shots=num_shots,
        num_samples=len(scores),
        score=mean,
        exact=sum(exact) / len(exact),
        low=low,
        high=high,
        beyond_context=beyond_context,
    )


def wilson(mean: float, num_samples: int) -> tuple[float, float]:
    """The 95% Wilson interval of a proportion. For means of scores between 0 and 1 it is conservative, because no such
    score varies more than a coin of the same mean."""
    z2_n = Z_95**2 / num_samples
    centre = (mean + z2_n / 2) / (1 + z2_n)
    half = Z_95 * math.sqrt(mean * (1 - mean) / num_samples + z2_n / (4 * num_samples)) / (1 + z2_n)
    # At 0 and 1 the bound is met exactly; rounding must not step past the mean.
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
