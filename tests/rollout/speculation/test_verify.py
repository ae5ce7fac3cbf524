"""Drafts change how fast tokens come, never which: under any traffic, at any depth, by any sampling."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.errors import ConfigError
from m2forge.model.transformer import MTPModule, Transformer
from m2forge.protocols import Prompt
from m2forge.records import FinishReason, Sampling
from m2forge.rollout.config import OnWeightUpdate, RolloutConfig, StaleCache
from m2forge.rollout.core import Core
from m2forge.rollout.speculation import verify as speculation
from m2forge.rollout.speculation.adaptive_depth import FixedDepth
from tests.conftest import FEW_CASES
from tests.model.generate import generate
from tests.rollout.draw import (
    GREEDY,
    TINY,
    Completions,
    Served,
    Traffic,
    check_completion,
    check_end,
    check_served,
    collect,
    finish,
    ids_of,
    network,
    serve,
    tiny,
    traffics,
    version,
)
from tests.rollout.plain import plain_distribution

# -- exactness --------------------------------------------------------------------------------------------------------


@FEW_CASES
@given(traffics(max_depth=3))
def test_every_token_is_what_the_plain_computation_draws(traffic: Traffic) -> None:
    """With a seed the very token; without one the distribution that it was drawn from, at its log-probabilities."""
    check_served(traffic)


@FEW_CASES
@given(traffics(samplings=(GREEDY,), max_depth=3))
def test_greedy_completions_equal_the_plain_loop_with_any_drafts(traffic: Traffic) -> None:
    """After prefix hits, copies of tails, preemption, and steps without drafts: the modules never miss a token."""
    served = serve(traffic)
    check_drafts(served)
    for place, arrival in enumerate(traffic.arrivals):
        prompt = arrival.prompt
        new = generate(
            served.weights[0], prompt.ids.tolist(), max_new_tokens=prompt.max_tokens, stop_ids=prompt.stop_ids
        )
        for sample in range(prompt.num_samples):
            completion = served.completions[str(place), sample]
            aborted = completion.finish_reason is FinishReason.ABORT
            assert completion.ids == (new[: len(completion.ids)] if aborted else new)


@FEW_CASES
@given(
    data=st.data(),
    on_weight_update=st.sampled_from(("finish", "continue", "restart")),
    stale_cache=st.sampled_from(("drop", "keep")),
)
def test_weights_that_arrive_leave_every_token_exact(
    on_weight_update: OnWeightUpdate, stale_cache: StaleCache, data: st.DataObject
) -> None:
    traffic = data.draw(traffics(on_weight_update=on_weight_update, stale_cache=stale_cache, max_loads=2, max_depth=3))
    served = serve(traffic)
    for place, arrival in enumerate(traffic.arrivals):
        for sample in range(arrival.prompt.num_samples):
            key = str(place), sample
            check_end(served.completions[key], arrival.prompt, arrival.abort_step is not None)
            check_completion(served, key, arrival.prompt)


@torch.no_grad()
def check_drafts(served: Served) -> None:
    """They are the likeliest tokens by the modules of the network run over the whole sequence."""
    model = served.weights[0]
    made = [(ids, drafts) for ids, drafts in served.drafts if drafts]
    if not made:
        return
    # All sequences in one pass: the network is causal, so zeros behind a shorter one change nothing before them.
    rows = [[*ids, *drafts[:-1]] for ids, drafts in made]
    length = max(map(len, rows))
    hidden = [
        hidden_ND.view(len(rows), length, -1)
        for hidden_ND in model(torch.tensor([row + [0] * (length - len(row)) for row in rows])).mtp_hidden_ND
    ]
    for row, (ids, drafts) in enumerate(made):
        for place, token in enumerate(drafts):
            logits = model.logits(hidden[place][row, len(ids) + place - 1])
            assert float(logits.max() - logits[token]) < 1e-9


# -- distribution -----------------------------------------------------------------------------------------------------

NUM_SYMBOLS, NUM_SAMPLES = 4, 1600


def chi_square(sampling: Sampling, depth: int, multi_step: bool = False) -> tuple[float, float]:
    """Of tokens 1, 2 and 3 behind a prompt, together, against their exact probabilities; and what it may be at 1%."""
    # Room for all at once: one that enters or reads would keep a step from running as one.
    config = RolloutConfig(
        block_tokens=4, num_blocks=8192, max_running=2048, step_tokens=8192, speculation=depth, seed=11
    )
    model = network(TINY.model_copy(update={"num_mtp": depth, "vocab_size": NUM_SYMBOLS}), seed=3)
    with torch.no_grad():
        model.head_weight.mul_(0.8)  # so that no token is too rare
    core = Core(model, config, version(0), depth=FixedDepth(depth), multi_step=multi_step)
    core.add("a", Prompt(ids_of(1, 2), 5, sampling, num_samples=NUM_SAMPLES))
    completions: Completions = {}
    while not core.is_idle:
        collect(completions, core.step())
    assert (core.metrics()["total_whole_steps"] > 0) == multi_step
    counts = Counter(tuple(completion.ids[1:4]) for completion in completions.values())
    metrics = core.metrics()
    for place in range(1, depth + 1):
        assert 0.1 < metrics[f"total_accepted_{place}"] / metrics[f"total_drafted_{place}"] < 0.95
    expected = joint(model, sampling)
    # Cells of fewer than 5 are one, as the test requires.
    rare = [cell for cell, p in expected.items() if p * NUM_SAMPLES < 5]
    cells = [[cell] for cell in expected if cell not in rare] + [rare] * bool(rare)
    total = 0.0
    for cell in cells:
        number = NUM_SAMPLES * sum(expected[part] for part in cell)
        total += (sum(counts[part] for part in cell) - number) ** 2 / max(number, 1e-300)
    assert not set(counts) - set(expected)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the 99th percentile.
    return total, freedom * (1 - 2 / (9 * freedom) + 2.3263 * math.sqrt(2 / (9 * freedom))) ** 3


def joint(model: Transformer, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Exact probabilities of tokens 1, 2 and 3 behind the prompt, token 0 summed over."""
    found: dict[tuple[int, ...], float] = {}
    paths = list(itertools.product(range(NUM_SYMBOLS), repeat=4))
    with torch.no_grad():
        hidden_ND = model(torch.tensor([[1, 2, *tokens] for tokens in paths]), with_mtp=False).hidden_ND
        logits_BLV = model.logits(hidden_ND).view(len(paths), 6, NUM_SYMBOLS)
    for tokens, logits_LV in zip(paths, logits_BLV, strict=True):
        p = 1.0
        for place, token in enumerate(tokens):
            p *= float(plain_distribution(logits_LV[1 + place], sampling, [1, 2], tokens[:place])[token])
        if p:
            found[tokens[1:]] = found.get(tokens[1:], 0.0) + p
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6, top_p=0.95)])
def test_three_tokens_in_a_row_have_the_policys_distribution(sampling: Sampling, depth: int) -> None:
    found, most = chi_square(sampling, depth)
    assert found < most


@pytest.mark.parametrize(("temperature", "depth"), [(1.0, 1), (0.6, 3)])
def test_steps_that_run_as_one_draw_from_the_policy_too(temperature: float, depth: int) -> None:
    found, most = chi_square(Sampling(temperature), depth, multi_step=True)
    assert found < most


def pick_without_total(logprob_BV: Tensor, uniform_B: Tensor) -> Tensor:
    cumulated_BV = logprob_BV.double().exp().cumsum(-1)
    return torch.searchsorted(cumulated_BV, uniform_B[:, None], right=True)[:, 0].clamp(max=logprob_BV.shape[1] - 1)


def residual_without_total(logp_BKV: Tensor, logq_BKV: Tensor) -> Tensor:
    return (logp_BKV.exp() - logq_BKV.exp()).clamp(min=0).log()


def test_a_draft_replaced_from_a_wrong_distribution_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(speculation, "residual", lambda logp, logq: logp)
        found, most = chi_square(Sampling(), 2)
        assert found > 1.3 * most
    monkeypatch.setattr(speculation, "residual", residual_without_total)
    monkeypatch.setattr(speculation, "pick", pick_without_total)
    found, most = chi_square(Sampling(), 2)
    assert found > 1.3 * most


# -- use --------------------------------------------------------------------------------------------------------------


def make_sure(model: Transformer) -> None:
    """Let the last token alone decide what comes, and the modules know it."""
    with torch.no_grad():
        for name, parameter in model.blocks.named_parameters():
            if name.endswith(("attention.out.weight", "ffn.w2.weight")):
                parameter.zero_()
        for module in model.mtp:
            assert isinstance(module, MTPModule)
            size = model.config.hidden_size
            module.projection.weight.copy_(torch.cat((torch.zeros(size, size), torch.eye(size)), 1))
            module.block.load_state_dict(model.blocks[-1].state_dict())


@pytest.mark.parametrize("multi_step", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_that_are_right_save_steps(depth: int, multi_step: bool) -> None:
    model = network(TINY.model_copy(update={"num_mtp": depth}))
    make_sure(model)
    config = RolloutConfig(
        block_tokens=4, num_blocks=16, max_running=8, step_tokens=64, speculation=depth, steps_per_sync=1
    )
    core = Core(model, config, version(0), depth=FixedDepth(depth), multi_step=multi_step)
    core.add("a", Prompt(ids_of(1, 2, 3), 25, GREEDY))
    completion = finish(core)["a", 0]
    assert completion.ids == generate(model, [1, 2, 3], max_new_tokens=25)
    metrics = core.metrics()
    assert metrics["total_steps"] == completion.num_chunks == 1 + -(-24 // (depth + 1))
    assert metrics["total_accepted_1"] == metrics["total_drafted_1"] > 0


def test_drafts_push_nobody_out() -> None:
    """The cache holds both requests to the last token and not one draft more."""
    core = tiny(num_blocks=4, step_tokens=64, speculation=3)
    for id in "ab":
        core.add(id, Prompt(ids_of(1, 2, 3), 6, GREEDY))
    finish(core)
    metrics = core.metrics()
    assert metrics["total_preemptions"] == 0
    assert metrics["total_drafted_1"] > 0


def test_prompts_and_those_who_wait_come_before_drafts() -> None:
    core = tiny(step_tokens=8, speculation=3)
    core.add("a", Prompt(ids_of(1), 20, GREEDY))
    core.step()
    core.add("b", Prompt(ids_of(*range(14)), 1, GREEDY))
    before = core.metrics()["total_computed_tokens"]
    for _ in range(2):
        core.step()
    assert core.metrics()["total_drafted_1"] == 0
    assert core.metrics()["total_computed_tokens"] == before + 2 + 14


def test_modules_that_are_broken_cost_nothing_but_time() -> None:
    core, plain = tiny(speculation=2), tiny(speculation=2)
    for parameter in core.model.mtp.parameters():
        parameter.data.fill_(math.nan)
    for sampling in (GREEDY, Sampling()):
        core.add(str(sampling), Prompt(ids_of(1, 2), 8, sampling))
    completions = finish(core)
    assert completions[str(GREEDY), 0].ids == generate(plain.model, [1, 2], max_new_tokens=8)
    assert all(completion.finish_reason is FinishReason.LENGTH for completion in completions.values())
    assert core.metrics()["total_accepted_1"] == 0


def test_more_drafts_than_modules_are_refused() -> None:
    config = RolloutConfig(speculation=2)
    with pytest.raises(ConfigError, match="2 drafts need as many MTP modules; this model has 1"):
        Core(network(TINY.model_copy(update={"num_mtp": 1})), config, version(0))
    with pytest.raises(ValueError, match="less than or equal to 3"):
        RolloutConfig(speculation=4)
