"""A predictor that knows the samples: it answers right, or wrong where it is told to, and needs no network."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from m2forge.evaluate.prompts.scored_sample import Sample
from m2forge.protocols import Prompt
from m2forge.records import IntArray


class Oracle:
    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        vocab_size: int,
        is_right: Callable[[int, int], bool] = lambda index, answer: True,
        max_context: int = 1 << 20,
    ) -> None:
        """`is_right(index of the sample, index of the answer)`; a wrong answer is wrong in its last token."""
        self.vocab_size, self.max_context = vocab_size, max_context
        self.num_passes, self.largest_pass = 0, 0
        self._next: dict[bytes, tuple[Sample, IntArray]] = {}
        for index, sample in enumerate(samples):
            told = sample.ids.copy()
            for answer, (_, stop) in enumerate(sample.spans):
                if not is_right(index, answer):
                    told[stop - 1] = (told[stop - 1] + 1) % vocab_size
            self._next[sample.prompt_ids.tobytes()] = (sample, told)

    def logits(self, documents: Sequence[IntArray], positions: Sequence[IntArray]) -> Tensor:
        self.num_passes += 1
        self.largest_pass = max(self.largest_pass, sum(map(len, documents)))
        chosen = [
            self._choose(document, int(p)) for document, where in zip(documents, positions, strict=True) for p in where
        ]
        return torch.nn.functional.one_hot(torch.tensor(chosen), self.vocab_size).float()

    def complete(
        self, prompts: Sequence[Prompt], *, cache_tokens: int, advance: Callable[[int], None]
    ) -> list[list[int]]:
        return [self._complete(prompt) for prompt in prompts]

    def _complete(self, prompt: Prompt) -> list[int]:
        """Greedy decoding, one token after the other."""
        new: list[int] = []
        while len(new) < prompt.max_tokens and not (new and new[-1] in prompt.stop_ids):
            ids = np.concatenate((prompt.ids, np.array(new, np.int32)))
            (logits_V,) = self.logits([ids], [np.array([len(ids) - 1], np.int32)])
            new.append(int(logits_V.argmax()))
        return new

    def _choose(self, document: IntArray, position: int) -> int:
        for stop in range(position + 1, 0, -1):
            found = self._next.get(np.ascontiguousarray(document[:stop], np.int32).tobytes())
            if found is not None and position + 1 < len(found[1]):
                return int(found[1][position + 1])
        return 0
