"""Steps that follow one another without the host: modules run over no token twice, and nothing changes by that."""

import copy

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.rollout.execution.decode import NUM_FIELDS, Decoder, Shape
from m2forge.rollout.execution.model_runner import PlainNetwork
from m2forge.rollout.kv.paged_plan import PagedCache, PagedPlan
from tests.conftest import FEW_CASES
from tests.rollout.draw import TINY, network

BLOCK_TOKENS, NUM_BLOCKS, NUM_STEPS, NUM_RUN = 4, 8, 5, 7
# So few tokens that drafts stand often.
CONFIG = TINY.model_copy(update={"vocab_size": 3, "num_mtp": 3})


class Counted(PlainNetwork):
    """Notes which rows each module runs."""

    num_sequences: int
    rows: list[list[int]]

    def module(self, index: int, parent_ND: Tensor, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor]:
        self.rows.append((plan.position_N >= 0).unflatten(0, (self.num_sequences, -1)).sum(1).tolist())
        return super().module(index, parent_ND, token_N, plan)


def sequences(shape: Shape, rng: np.random.Generator) -> Tensor:
    """With little room or much, fewer drafts than others, or none at all."""
    integers = np.zeros((shape.num_sequences, shape.num_integers), np.int64)
    for place, row in enumerate(integers):
        start = int(rng.integers(0, 8))
        room = int(rng.integers(1, BLOCK_TOKENS * NUM_BLOCKS - start + 1))
        num_drafts = min(int(rng.integers(0, shape.num_drafts + 1)), room - 1)
        if rng.random() < 0.1:
            num_drafts, room = -1, 0
        token = rng.integers(CONFIG.vocab_size)
        row[:NUM_RUN] = (token, start, num_drafts, room, place, rng.random() < 0.2, start)
        row[NUM_FIELDS : NUM_FIELDS + shape.num_drafts] = rng.integers(0, CONFIG.vocab_size, shape.num_drafts)
        row[NUM_FIELDS + shape.num_drafts :] = place * NUM_BLOCKS + rng.permutation(NUM_BLOCKS)
    return torch.from_numpy(integers)


@FEW_CASES
@given(depth=st.integers(1, 3), num_sequences=st.integers(1, 6), is_greedy=st.booleans(), seed=st.integers(0, 2**16))
def test_what_a_module_ran_it_does_not_run_again(depth: int, num_sequences: int, is_greedy: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = network(CONFIG, seed=seed)
    cache = PagedCache(CONFIG, num_sequences * NUM_BLOCKS, BLOCK_TOKENS, torch.device("cpu"), torch.float64, 3)
    for x in (cache.k_YPTGK, cache.v_YPTGK, cache.state_MPTD):
        x.normal_()
    shape = Shape(num_sequences, depth, depth, NUM_BLOCKS, is_greedy, NUM_STEPS)
    logq_SKV = torch.randn(num_sequences, 3, CONFIG.vocab_size, dtype=torch.float64).log_softmax(-1)
    reals = torch.from_numpy(rng.random((num_sequences, sum(shape.widths_of_reals))))
    reals[:, 0] = 0.0 if is_greedy else 1.0
    decoders, networks, caches = [], [], [cache, copy.deepcopy(cache)]
    for own in caches:
        networks.append(Counted(model))
        networks[-1].num_sequences = num_sequences
        decoders.append(Decoder(model, networks[-1], own, logq_SKV.clone()))
    integers = [sequences(shape, rng)]
    integers.append(integers[0].clone())
    has_begun = False
    for _ in range(NUM_STEPS):
        before = integers[0].clone()
        integers[1][:, NUM_RUN] = 0
        for network_of in networks:
            network_of.rows = []
        outs = [decoder.step(shape, own, reals)[0] for decoder, own in zip(decoders, integers, strict=True)]
        torch.testing.assert_close(outs[0], outs[1])
        assert torch.equal(integers[0], integers[1])
        for name in ("k_YPTGK", "v_YPTGK", "state_MPTD"):
            # The last block is where rows that are none are written.
            ours, other = (getattr(own, name)[:, :-1] for own in caches)
            torch.testing.assert_close(ours, other)
        if has_begun:
            num_run_B = torch.where(before[:, 2] < 0, 0, (before[:, 3] - 1).clamp(0, depth))
            assert torch.equal(before[:, NUM_RUN], num_run_B)
        has_begun = True
        num_accepted = (outs[0][:, shape.num_rows].long() - 1).tolist()
        for module, (ours, all_rows) in enumerate(zip(networks[0].rows, networks[1].rows, strict=True)):
            for place, stood in enumerate(num_accepted):
                num_done = min(stood, module) + 1 if module < int(before[place, NUM_RUN]) else 0
                assert ours[place] == max(all_rows[place] - num_done, 0)
