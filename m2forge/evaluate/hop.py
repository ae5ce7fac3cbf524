"""Multi-hop tracing (RULER's variable tracking): chains of assignments scattered over a haystack.

    x1 = value … x2 = x1 … x3 = x2 …      which variables hold the value?

The assignments of a chain occur in order. Every chain has its own value; the question asks for one of them, and the
answer is the set of its variables, in chain order if an order is needed.
"""

from dataclasses import dataclass

import numpy as np

from m2forge.evaluate.haystack import Filler, Insert, filler_tokens, lay
from m2forge.evaluate.sample import Sample
from m2forge.evaluate.wording import Wording, compose, num_ids


@dataclass(frozen=True, slots=True)
class HopTask:
    wording: Wording
    filler: Filler
    num_chains: int = 1
    num_hops: int = 4
    """Assignments from one variable to the next; a chain has one variable more."""

    def sample(self, rng: np.random.Generator, size: int, depth: float | None = None) -> Sample:
        """The chains are at random depths: `depth` is not used."""
        per_chain = self.num_hops + 1
        values = self.wording.draw(rng, "value", self.num_chains)
        variables = self.wording.draw(rng, "variable", self.num_chains * per_chain)
        inserts: list[Insert] = []
        for chain, value in enumerate(values):
            members = variables[chain * per_chain : (chain + 1) * per_chain]
            sources = [value, *members[:-1]]
            depths = np.sort(rng.random(per_chain)).tolist()
            for variable, source, place in zip(members, sources, depths, strict=True):
                inserts.append(Insert(self.wording.assignment(variable, source), place))
        head = self.wording.chain_head()
        tail = self.wording.chain_tail(values[0], variables[:per_chain])
        num_fixed = len(head) + sum(len(insert.ids) for insert in inserts) + num_ids(tail)
        filling = self.filler.draw(rng, filler_tokens(size, num_fixed, f"a task of {len(inserts)} assignments"))
        haystack = lay(filling, inserts)
        return compose([*head, *haystack.tolist()], tail, size=size)
