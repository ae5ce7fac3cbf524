"""Unchecked completion calls in; one token tree per group out, and the problems of refused calls.

A broken call is refused by name and leaves no trace; the other calls are not affected.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.records import Call, FinishReason, Sampling
from m2forge.tree.token_tree import TokenTree


@dataclass(frozen=True, slots=True, eq=False)
class RawCall:
    """An unvalidated completion call."""

    name: str
    group: str
    """Calls of one group, which may share a prompt, are merged into one tree."""
    prompt_ids: npt.ArrayLike
    response_ids: npt.ArrayLike
    logprobs: npt.ArrayLike
    versions: npt.ArrayLike
    finish_reason: str = FinishReason.STOP
    started_s: float = 0.0
    finished_s: float = 0.0
    episode: str = ""
    advantage: float = 0.0
    weight: float = 1.0
    sampling: Sampling | Mapping[str, float] = field(default_factory=dict)
    """A checked `Sampling`, or its fields that differ from the defaults."""
    experts: npt.NDArray[np.integer] | None = None
    """Expert routing of the first tokens of prompt and response, (tokens, layers, chosen)."""

    def check(self) -> Call:
        try:
            for name in ("advantage", "weight", "started_s", "finished_s"):
                _require_number(name, getattr(self, name))
            return Call(
                prompt_ids=np.asarray(self.prompt_ids),
                response_ids=np.asarray(self.response_ids),
                logprobs=np.asarray(self.logprobs),
                versions=np.asarray(self.versions),
                finish_reason=FinishReason(self.finish_reason),
                started_s=self.started_s,
                finished_s=self.finished_s,
                sampling=_checked_sampling(self.sampling),
            )
        except (TypeError, ValueError, OverflowError) as error:
            # Lists that are not arrays, invalid finish reasons, missing numbers; a RecordError stays one.
            raise RecordError(str(error)) from error


def _require_number(name: str, value: object) -> None:
    try:
        is_number = isinstance(value, int | float | np.number) and math.isfinite(float(value))
    except OverflowError:
        is_number = False
    if not is_number:
        raise RecordError(f"Call: {name}: expected a finite number, received {repr(value)[:40]}")


@dataclass(frozen=True, slots=True)
class Problem:
    """A refused call."""

    name: str
    group: str
    reason: str


def build_trees(
    calls: Iterable[RawCall], vocab_size: int, max_tokens: int | None = None
) -> tuple[dict[str, TokenTree], tuple[Problem, ...]]:
    """Trees by group. `max_tokens`: maximum length of a call, such as the pack budget."""
    trees: dict[str, TokenTree] = {}
    problems = []
    for raw in calls:
        tree = trees.get(raw.group) or TokenTree(vocab_size)
        try:
            call = raw.check()
            num_tokens = call.prompt_ids.size + call.response_ids.size
            if max_tokens is not None and num_tokens > max_tokens:
                raise RecordError(f"Call: expected at most {max_tokens} tokens, received {num_tokens}")
            tree.add(
                call,
                raw.name,
                episode=raw.episode,
                advantage=raw.advantage,
                weight=raw.weight,
                experts=raw.experts,
            )
        except RecordError as error:
            problems.append(Problem(raw.name, raw.group, str(error)))
        else:
            trees[raw.group] = tree
    return trees, tuple(problems)


def _checked_sampling(sampling: Sampling | Mapping[str, float]) -> Sampling:
    return sampling if isinstance(sampling, Sampling) else Sampling(**sampling)  # type: ignore[arg-type]  # checked there
