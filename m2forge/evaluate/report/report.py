"""The evaluation report, saved as `eval.json` and loaded back equal.

A cell is the mean score of the samples of one suite at one size and depth, with its 95% confidence interval.

Decodes ids that a model sampled, including ids unknown to the tokenizer: model vocabularies are padded.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from m2forge.errors import DataError, NotFoundError
from m2forge.files import write_atomic
from m2forge.text.tokenizer import Tokenizer

JSON_FILE = "eval.json"
Z_95 = 1.959964
"""Two-sided 95% quantile of the normal distribution."""


class _Record(BaseModel):
    # JSON has no NaN: as strings, a diverged model still gets its report.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings", protected_namespaces=())


class Cell(_Record):
    suite: str
    task: str
    length: int | None = None
    depth: float | None = None
    num_shots: int | None = None
    num_samples: int
    score: float
    """Mean share of correct answers, 0 to 1."""
    exact: float
    """Share of samples with every answer correct."""
    low: float
    high: float
    """95% Wilson interval of the score."""
    beyond_context: bool = False
    """Whether its samples are longer than the model's max_context."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


class ModuleLoss(_Record):
    """Loss of an MTP module, measured at the positions where the hidden state it starts from exists."""

    depth: int
    """From 1: age of that hidden state in tokens."""
    nats_per_token: float
    agreement: float
    """Share of positions where its argmax token equals the main model's: where a draft would be accepted."""


class DomainLoss(_Record):
    domain: str
    num_tokens: int
    nats_per_token: float
    bits_per_byte: float | None
    """None if the tokenizer is unknown."""
    modules: tuple[ModuleLoss, ...] = ()


class Failure(_Record):
    """One failed completion, for inspection."""

    suite: str
    line: int
    """Line number in the prompt file."""
    completion: str
    reasons: tuple[str, ...]


class EvalReport(_Record):
    model: str
    num_parameters: int
    max_context: int
    seed: int
    cells: tuple[Cell, ...] = ()
    losses: tuple[DomainLoss, ...] = ()
    """Loss over all domains first, then one per domain."""
    failures: tuple[Failure, ...] = ()
    """The first few failures of each suite."""
    notes: tuple[str, ...] = ()
    """Caveats: skipped lines, random weights, lengths beyond the context."""

    @property
    def suites(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.suite for cell in self.cells))

    def cells_of(self, suite: str) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.suite == suite)

    def score(self, suite: str) -> float:
        """Mean over the samples of all cells of a suite."""
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
    """The 95% Wilson interval of a proportion. It is conservative for means of scores between 0 and 1, because such a
    score has at most the variance of a Bernoulli variable with the same mean."""
    z2_n = Z_95**2 / num_samples
    centre = (mean + z2_n / 2) / (1 + z2_n)
    half = Z_95 * math.sqrt(mean * (1 - mean) / num_samples + z2_n / (4 * num_samples)) / (1 + z2_n)
    # At 0 and 1 the bound equals the mean; rounding must not step past it.
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def readable_bytes(tokenizer: Tokenizer, ids: Sequence[int], *, unknown: bytes = UNKNOWN) -> bytes:
    """The bytes of `ids`, with `unknown` for each id that the tokenizer does not have."""
    try:
        return tokenizer.decode_bytes(ids)
    except NotFoundError:
        if len(ids) == 1:
            return unknown
    return b"".join(readable_bytes(tokenizer, [token], unknown=unknown) for token in ids)


def readable_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return readable_bytes(tokenizer, ids).decode(errors="replace")
