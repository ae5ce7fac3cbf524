"""The model interface of evaluation: logits at chosen positions of some documents, in one forward pass, and completions
of prompts.

The caller decides which documents share a pass and what to do with the logits, so a scripted predictor can replace the
model. `batches` limits the tokens of a pass.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from m2forge.evaluate.completion import Completes, EngineDecoder
from m2forge.model.plan import AttentionPlan, CausalRows, Documents
from m2forge.model.transformer import Transformer
from m2forge.protocols import Prompt
from m2forge.records import IntArray

MAX_PADDING = 0.25
"""Share of padding up to which padded rows still run faster on a GPU than packed documents with a mask."""


class Predictor(Completes, Protocol):
    @property
    def max_context(self) -> int: ...

    def logits(self, documents: Sequence[IntArray], positions: Sequence[IntArray]) -> Tensor:
        """(M, V): logits of the token after each of `positions[d]` of each document d, in that order."""
        ...


class ModelPredictor:
    """Runs a `Transformer` over all documents in one pass: packed, or as rows padded to the longest. Its weights must
    not change while the predictor is in use."""

    def __init__(self, model: Transformer, layout: Literal["auto", "documents", "rows"] = "auto") -> None:
        """auto: rows on a GPU if their lengths are similar, else packed documents. Both give the same logits, up to
        rounding."""
        self._model, self._layout = model, layout
        self._decoder = EngineDecoder(model)

    @property
    def max_context(self) -> int:
        return self._model.config.max_context

    @torch.no_grad()
    def logits(self, documents: Sequence[IntArray], positions: Sequence[IntArray]) -> Tensor:
        device = self._model.embedding.weight.device
        lengths = [len(document) for document in documents]
        plan: AttentionPlan
        if self._takes_rows(lengths):
            longest = max(lengths)
            tokens, starts = _padded(documents, longest), np.arange(len(lengths)) * longest
            plan = CausalRows(len(lengths), longest, device)
        else:
            tokens, starts = np.concatenate(documents), np.cumsum([0, *lengths[:-1]])
            plan = Documents(lengths, device)
        places = np.concatenate([start + where for start, where in zip(starts, positions, strict=True)])
        tokens_N = torch.as_tensor(tokens, dtype=torch.int64).to(device)
        hidden_ND = self._model(tokens_N, plan, with_mtp=False).hidden_ND
        return self._model.logits(hidden_ND[torch.as_tensor(places, dtype=torch.int64).to(device)])

    def complete(
        self, prompts: Sequence[Prompt], *, cache_tokens: int, advance: Callable[[int], None]
    ) -> list[list[int]]:
        return self._decoder.complete(prompts, cache_tokens=cache_tokens, advance=advance)

    def _takes_rows(self, lengths: Sequence[int]) -> bool:
        if self._layout != "auto":
            return self._layout == "rows"
        on_gpu = self._model.embedding.weight.device.type == "cuda"
        return on_gpu and max(lengths) * len(lengths) <= (1 + MAX_PADDING) * sum(lengths)


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices into `lengths`, longest first, in batches of at most `max_tokens` tokens when padded to the batch's
    longest; a longer one runs alone."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _padded(documents: Sequence[IntArray], length: int) -> IntArray:
    # Padding is at the end of its row, so causal attention never reads it.
    return np.concatenate([np.pad(document, (0, length - len(document))) for document in documents])
