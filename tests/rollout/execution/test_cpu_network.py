"""The joined network computes what the plain one does, and no less exactly."""

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels import arithmetic as native
from m2forge.kernels import linear
from m2forge.kernels.linear import KERNELS
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.transformer import Transformer
from m2forge.rollout.execution.decode import Network
from m2forge.rollout.execution.model_runner import CPUNetwork, PlainNetwork, serves_on_cpu
from m2forge.rollout.kv.paged_plan import PagedCache, Span, planned
from tests.model.bias import set_biases
from tests.model.draw import SMALL, model_configs

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")

SPANS = (Span(0, 7, [0, 1]), Span(7, 2, [0, 1, 2]), Span(0, 9, [3, 5, 4]))
"""The second goes on where the first ends, in a step of its own."""


KINDS = [
    kind for kind in range(len(KERNELS)) if native.library() is not None and native.ask("linear_kinds") >> kind & 1
]


@pytest.fixture(autouse=True, params=KINDS)
def kernel(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every product that this machine can run, whichever is fastest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "fastest_kernel", lambda: request.param)
        yield request.param


def network(config: ModelConfig, seed: int) -> Transformer:
    """Every expert is chosen: a choice that rounding decides would tell nothing."""
    if config.moe is not None:
        moe = config.moe.model_copy(update={"top_k": config.moe.num_experts})
        config = config.model_copy(update={"moe": moe})
    model = build(config, dtype=torch.bfloat16, seed=seed)
    set_biases(model, std=0.1, seed=seed)
    return model


@torch.no_grad()
def run(of: Network, cache: PagedCache, token_N: Tensor) -> list[Tensor]:
    """States and what the head takes, of the main model and a module, over two steps."""
    num_layers, outs, first = cache.k_YPTGK.shape[0] - 1, list[Tensor](), 0
    for spans in (SPANS[:1], SPANS[1:]):
        plan = planned(cache, spans)
        step_N = token_N[first : first + plan.slot_N.numel()]
        first += plan.slot_N.numel()
        state_ND, hidden_ND, _ = of.main(step_N, plan)
        outs += [state_ND, hidden_ND, *of.module(0, state_ND, step_N, planned(cache, spans, num_layers))]
    return outs


@given(config=model_configs(num_mtp=1), seed=st.integers(0, 99))
def test_its_error_is_that_of_the_plain_network(config: ModelConfig, seed: int) -> None:
    model = network(config, seed)
    exact_model = copy.deepcopy(model).double()
    token_N = torch.randint(config.vocab_size, (18,), generator=torch.Generator().manual_seed(seed))
    caches = [PagedCache(config, 6, 4, token_N.device, dtype, 1) for dtype in (torch.bfloat16,) * 2 + (torch.float64,)]
    assert serves_on_cpu(model, caches[0])
    joined = run(CPUNetwork(model, caches[0]), caches[0], token_N)
    plain = run(PlainNetwork(model), caches[1], token_N)
    exact = run(PlainNetwork(exact_model), caches[2], token_N)
    for ours, other, true in zip(joined, plain, exact, strict=True):
        error, other_error = ((x.double() - true).square().mean().sqrt() for x in (ours, other))
        # Two random errors of one size, over a few hundred numbers each; 2^-9 is the least that rounding leaves.
        assert error <= 1.5 * other_error + 2.0**-9 * true.square().mean().sqrt()


@torch.no_grad()
def test_the_experts_are_told() -> None:
    model = build(SMALL, dtype=torch.bfloat16, seed=0)
    cache = PagedCache(SMALL, 6, 4, torch.device("cpu"), torch.bfloat16, 1)
    plan = planned(cache, SPANS[:1])
    _, _, experts_NLK = CPUNetwork(model, cache).main(torch.arange(7), plan)
    assert experts_NLK is not None
    assert experts_NLK.shape == (7, 4, 2)


def test_other_types_are_not_served() -> None:
    model = build(SMALL, seed=0)
    assert not serves_on_cpu(model, PagedCache(SMALL, 6, 4, torch.device("cpu"), torch.float32, 1))
