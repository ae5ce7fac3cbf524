"""Documents that grow one token at a time, and the logits of the next token.

`Rereading` runs a full forward pass over every document for each token: the simple reference. `Cached` prefills a KV
cache and then decodes only the newest tokens. Both give the same logits up to rounding.

Shapes: B documents, N tokens in total, L longest document, H query heads, G key/value heads, K head dimension.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels.precision import raised
from m2forge.model.config import WindowConfig
from m2forge.model.plan import Attend, Documents
from m2forge.model.transformer import Transformer
from m2forge.records import IntArray

ROOM = 64
"""Number of tokens by which a KV cache grows."""


class Continuation(Protocol):
    def logits(self) -> Tensor:
        """(B, V): logits of the token after each document."""
        ...

    def extend(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        """Append a token to each document, then keep only the documents at the indices `kept`."""
        ...


class ReadsAll(Protocol):
    """The part of a predictor that `Rereading` uses."""

    def logits(self, documents: Sequence[IntArray], positions: Sequence[IntArray]) -> Tensor: ...


class Rereading:
    def __init__(self, predictor: ReadsAll, documents: Sequence[IntArray]) -> None:
        self._predictor, self._documents = predictor, list(documents)

    def logits(self) -> Tensor:
        last = [np.array([len(document) - 1], np.int32) for document in self._documents]
        return self._predictor.logits(self._documents, last)

    def extend(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        grown = [np.append(document, np.int32(token)) for document, token in zip(self._documents, tokens, strict=True)]
        self._documents = [grown[place] for place in kept]


class Cached:
    @torch.no_grad()
    def __init__(self, model: Transformer, documents: Sequence[IntArray]) -> None:
        self._model, self._device = model, model.embedding.weight.device
        lengths = [len(document) for document in documents]
        plan = _Recording(lengths, self._device)
        tokens_N = torch.as_tensor(np.concatenate(documents), dtype=torch.int64).to(self._device)
        hidden_ND = model(tokens_N, plan, with_mtp=False).hidden_ND
        self._length_B = torch.tensor(lengths, device=self._device)
        self._hidden_BD = hidden_ND[self._length_B.cumsum(0) - 1]
        self._caches = {
            window: [_Cache(_rows(k, lengths), _rows(v, lengths)) for k, v in found]
            for window, found in plan.recorded.items()
        }

    @torch.no_grad()
    def logits(self) -> Tensor:
        return self._model.logits(self._hidden_BD)

    @torch.no_grad()
    def extend(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        place_B = torch.tensor(kept, dtype=torch.int64, device=self._device)
        self._length_B = self._length_B[place_B]
        for cache in (cache for found in self._caches.values() for cache in found):
            cache.select(place_B)
        if not len(kept):
            return
        newest_B = torch.tensor([tokens[place] for place in kept], device=self._device)
        plan = _Decoding(self._length_B, self._caches)
        self._hidden_BD = self._model(newest_B, plan, with_mtp=False).hidden_ND
        self._length_B = self._length_B + 1


class _Cache:
    """The KV cache of one layer."""

    def __init__(self, k_BLGK: Tensor, v_BLGK: Tensor) -> None:
        self.k_BLGK, self.v_BLGK = k_BLGK, v_BLGK

    def select(self, place_B: Tensor) -> None:
        self.k_BLGK, self.v_BLGK = self.k_BLGK[place_B], self.v_BLGK[place_B]

    def append(self, k_BGK: Tensor, v_BGK: Tensor, length_B: Tensor) -> None:
        if int(length_B.max()) >= self.k_BLGK.shape[1]:
            self.k_BLGK, self.v_BLGK = (F.pad(x, (0, 0, 0, 0, 0, ROOM)) for x in (self.k_BLGK, self.v_BLGK))
        row_B = torch.arange(len(length_B), device=length_B.device)
        self.k_BLGK[row_B, length_B], self.v_BLGK[row_B, length_B] = k_BGK, v_BGK


class _Recording(Documents):
    """A `Documents` plan that records the keys and values of every layer, by attention window and in layer order."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self.recorded: dict[WindowConfig | None, list[tuple[Tensor, Tensor]]] = {}

    def bind(self, window: WindowConfig | None) -> Attend:
        attend, found = super().bind(window), self.recorded.setdefault(window, [])

        def record(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            found.append((k_NGK, v_NGK))
            return attend(q_NHK, k_NGK, v_NGK)

        return record


class _Decoding:
    """A decode step: one new token of each document, attending to its KV cache."""

    def __init__(self, length_B: Tensor, caches: dict[WindowConfig | None, list[_Cache]]) -> None:
        self.position_N, self._caches = length_B, caches
        self.count_N: Tensor | None = None

    def bind(self, window: WindowConfig | None) -> Attend:
        layers, length_B = iter(self._caches[window]), self.position_N

        def attend(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            cache = next(layers)  # one token of each document, so N equals B here
            cache.append(k_NGK, v_NGK, length_B)
            back_BL = length_B[:, None] - torch.arange(cache.k_BLGK.shape[1], device=length_B.device)
            seen_BL = back_BL >= 0
            if window is not None:
                is_sink_BL = length_B[:, None] - back_BL < window.num_sinks
                seen_BL = seen_BL & ((back_BL < window.size) | is_sink_BL)
            q_BGRK = q_NHK.unflatten(1, (k_NGK.shape[1], -1)) * q_NHK.shape[-1] ** -0.5
            score_BGRL = torch.einsum("bgrk,blgk->bgrl", q_BGRK, cache.k_BLGK)
            score_BGRL = raised(score_BGRL).masked_fill(~seen_BL[:, None, None, :], -torch.inf)
            share_BGRL = score_BGRL.softmax(-1).to(q_NHK.dtype)
            return torch.einsum("bgrl,blgk->bgrk", share_BGRL, cache.v_BLGK).flatten(1, 2)

        return attend

    def to_parent(self, x_ND: Tensor) -> Tensor:
        raise NotImplementedError("decoding runs without prediction modules")


def _rows(x_NGK: Tensor, lengths: Sequence[int]) -> Tensor:
    """(B, L, G, K), right-padded."""
    return torch.nn.utils.rnn.pad_sequence(list(x_NGK.split(list(lengths))), batch_first=True)
