"""A decoding step in few launches gives what its twin gives: tokens, drafts, and all that the next step reads."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from m2forge.model.build import build
from m2forge.model.config import RopeScaling
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.rollout.execution.cuda_decode import FusedDecoder
from m2forge.rollout.execution.cuda_network import FusedNetwork
from m2forge.rollout.execution.decode import NUM_FIELDS, Decoder, Shape
from m2forge.rollout.execution.model_runner import PlainNetwork
from m2forge.rollout.kv.paged_plan import PagedCache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

BLOCK_TOKENS, NUM_BLOCKS, NUM_STEPS = 8, 4, 3


def drawn_integers(shape: Shape, vocab_size: int, rng: np.random.Generator) -> Tensor:
    """Sequences with fewer drafts than others, with little room behind them, seeded, or none at all."""
    integers = np.zeros((shape.num_sequences, shape.num_integers), np.int64)
    blocks = rng.permutation(shape.num_sequences * NUM_BLOCKS).reshape(-1, NUM_BLOCKS)
    for place, row in enumerate(integers):
        start = int(rng.integers(0, 18))
        most = BLOCK_TOKENS * NUM_BLOCKS - start
        room = int(rng.integers(1, most + 1)) if rng.random() < 0.3 else most
        num_drafts = int(rng.integers(0, shape.num_drafts + 1)) if rng.random() < 0.3 else shape.num_drafts
        num_drafts = min(num_drafts, room - 1)
        if place % 8 == 7:
            num_drafts, room = -1, 0
        row[: NUM_FIELDS - 1] = (rng.integers(vocab_size), start, num_drafts, room, place, rng.random() < 0.2, start)
        row[NUM_FIELDS : NUM_FIELDS + shape.num_drafts] = rng.integers(0, vocab_size, shape.num_drafts)
        row[NUM_FIELDS + shape.num_drafts :] = blocks[place]
    return torch.from_numpy(integers).cuda()


class Twins:
    """The step and its twin, each with a cache and drafts of its own that are equal at first."""

    def __init__(self, model: Transformer, num_sequences: int) -> None:
        config, device = model.config, torch.device("cuda")
        cache = PagedCache(config, num_sequences * NUM_BLOCKS, BLOCK_TOKENS, device, torch.float32, len(model.mtp))
        for x in (cache.k_YPTGK, cache.v_YPTGK, cache.state_MPTD):
            x.normal_()
        logq_SKV = torch.randn(num_sequences, len(model.mtp), config.vocab_size, device=device).log_softmax(-1)
        self.caches, self.logqs = (cache, copy.deepcopy(cache)), (logq_SKV, logq_SKV.clone())
        self.plain = Decoder(model, PlainNetwork(model), self.caches[0], self.logqs[0])
        self.fused = FusedDecoder(model, FusedNetwork(model, self.caches[1]), self.caches[1], self.logqs[1])

    def foretold(self, model: Transformer, shape: Shape, integers: Tensor, reals: Tensor) -> Tensor:
        """The same sequences, most of them with drafts that will stand."""
        integers = integers.clone()
        for place in range(shape.num_drafts):
            decoder = Decoder(model, PlainNetwork(model), copy.deepcopy(self.caches[0]), self.logqs[0].clone())
            out, _ = decoder.step(shape, integers.clone(), reals)
            is_changed = torch.arange(shape.num_sequences, device="cuda") % 3 != 2
            column = integers[:, NUM_FIELDS + place]
            column[is_changed] = out[is_changed, place].long()
        return integers


def is_looked_at(shape: Shape, before: Tensor, out: Tensor) -> Tensor:
    """Which numbers of `out` anybody reads: of tokens that count and have room, of drafts that have room."""
    num_rows, room_B1 = shape.num_rows, before[:, 3:4]
    count_B1 = out[:, num_rows : num_rows + 1]
    row_J = torch.arange(num_rows, device="cuda")
    rows = (row_J < count_B1) & (row_J < room_B1)
    drafts = torch.arange(shape.depth, device="cuda") + count_B1 < room_B1
    counts = torch.ones_like(rows[:, :1]).expand(-1, 2)
    return torch.cat((rows, counts, drafts, rows, rows), 1) & (before[:, 2:3] >= 0)


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize(("num_drafts", "depth"), [(0, 0), (1, 1), (2, 2), (3, 3), (3, 0), (3, 1)])
@pytest.mark.parametrize("num_sequences", [1, 5, 48])
@torch.no_grad()
def test_the_step_is_its_twin(num_sequences: int, num_drafts: int, depth: int, is_greedy: bool) -> None:
    config = preset("m2-nano").model_copy(update={"num_mtp": 3, "vocab_size": 500})
    # YaRN multiplies the cos and sin that the step's first kernel writes.
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=64)
    attention = config.attention.model_copy(update={"rope_scaling": scaling, "qkv_bias": True})
    config = config.model_copy(update={"attention": attention})
    model = build(config, "cuda", torch.float32, seed=1)
    for parameter in model.parameters():
        parameter.data.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.data.mul_(3.0)
    torch.manual_seed(num_sequences)
    rng = np.random.default_rng(num_sequences)
    shape = Shape(num_sequences, num_drafts, depth, NUM_BLOCKS, is_greedy, NUM_STEPS)
    twins = Twins(model, num_sequences)
    reals = torch.from_numpy(rng.random((num_sequences, sum(shape.widths_of_reals)))).cuda()
    reals[:, 0] = 0.0 if is_greedy else torch.tensor(rng.choice([1.0, 0.7, 2.0, 0.1], num_sequences))
    integers = twins.foretold(model, shape, drawn_integers(shape, config.vocab_size, rng), reals)
    for _ in range(NUM_STEPS if num_drafts == depth else 1):
        before, (plain_integers, fused_integers) = integers.clone(), (integers.clone(), integers.clone())
        plain, plain_experts = twins.plain.step(shape, plain_integers, reals)
        fused, fused_experts = twins.fused.step(shape, fused_integers, reals)
        seen = is_looked_at(shape, before, plain)
        # Rounding may tip a draw, and all that follows from it: of few sequences.
        is_equal = ((plain - fused).abs() < 1e-3 * (1 + plain.abs())) | ~seen
        tipped_B = ~is_equal.all(1)
        assert int(tipped_B.sum()) <= num_sequences // 16
        is_whole_B = ~tipped_B & (before[:, 3] > plain[:, shape.num_rows] + depth) & (before[:, 2] >= 0)
        assert torch.equal(plain_integers[is_whole_B], fused_integers[is_whole_B])
        counted = [own[~tipped_B][:, [1, 2, 3, 7]] for own in (plain_integers, fused_integers)]
        assert torch.equal(*counted)
        if not is_greedy and depth:
            slots = before[is_whole_B, 4]
            plain_logq, fused_logq = (logq[slots, :depth].exp() for logq in twins.logqs)
            assert float((plain_logq - fused_logq).abs().max()) < 1e-3 if slots.numel() else True
        assert plain_experts is not None
        assert fused_experts is not None
        is_there = (fused_experts < config.moe.num_experts) if config.moe else None
        assert is_there is not None
        assert float((plain_experts == fused_experts)[is_there].float().mean()) > 0.99
        for name in ("k_YPTGK", "v_YPTGK", "state_MPTD"):
            difference = (getattr(twins.caches[0], name) - getattr(twins.caches[1], name))[:, :-1].abs()
            assert float((difference > 1e-2).float().mean()) < 0.01
            # A draw that tipped is not made again in the next step.
            getattr(twins.caches[1], name).copy_(getattr(twins.caches[0], name))
        twins.logqs[1].copy_(twins.logqs[0])
        integers = plain_integers
