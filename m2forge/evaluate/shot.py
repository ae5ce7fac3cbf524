"""Many-shot in-context learning: examples of a mapping invented for the sample, then one input to apply it to.

Every input is an invented symbol that maps to a random label. Inputs cycle in random order, so k examples show
min(k, num_inputs) of them, and the queried input is one that was shown: chance is 1 / num_labels, and the answer can
always be known.
"""

from dataclasses import dataclass

import numpy as np

from m2forge.evaluate.sample import Sample
from m2forge.evaluate.wording import Wording, compose


@dataclass(frozen=True, slots=True)
class ShotTask:
    wording: Wording
    num_inputs: int = 16
    num_labels: int = 4

    def sample(self, rng: np.random.Generator, size: int, depth: float | None = None) -> Sample:
        """`size`: number of examples. `depth` is not used."""
        inputs = self.wording.draw(rng, "input", self.num_inputs)
        labels = self.wording.draw(rng, "label", self.num_labels)
        label_of = rng.integers(self.num_labels, size=self.num_inputs)
        rounds = -(-size // self.num_inputs)
        order = np.concatenate([rng.permutation(self.num_inputs) for _ in range(rounds)])[:size].tolist()
        prompt = list(self.wording.shots_head())
        for index in order:
            for piece in self.wording.shot(inputs[index], labels[label_of[index]]):
                prompt += piece.ids
        asked = int(rng.choice(order))
        return compose(prompt, self.wording.shot(inputs[asked], labels[label_of[asked]]), size=size)
