"""The scripted engine keeps the contract of engines, and its figures are those of a policy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RequestError
from m2forge.protocols import Engine
from m2forge.records import FinishReason, PolicyVersion, Sampling
from m2forge.testing.scripted import ScriptedEngine, ScriptedPolicy, shaped_logprobs
from tests.rollout import engine_contract
from tests.rollout.engine_contract import collect, complete, join, make_prompt

VERSION = PolicyVersion("scripted", 0)


@asynccontextmanager
async def scripted() -> AsyncIterator[Engine]:
    yield ScriptedEngine(engine_contract.VOCAB_SIZE, context=engine_contract.CONTEXT, delay_s=0.001)


@engine_contract.every_check
def test_contract(check: engine_contract.Check) -> None:
    engine_contract.run_check(check, scripted)


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.2, 3),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(0, 8),
    min_p=st.floats(0, 0.5),
)


@given(samplings, st.integers(0, 100))
def test_truncation_keeps_the_likeliest_tokens_and_renormalises(sampling: Sampling, seed: int) -> None:
    raw_V = np.log(np.random.default_rng(seed).dirichlet(np.ones(12)))
    shaped_V = shaped_logprobs(raw_V, sampling)
    allowed_V = np.isfinite(shaped_V)
    assert np.exp(shaped_V).sum() == pytest.approx(1)
    assert not allowed_V.all() or not sampling.is_truncated or sampling.top_p > 0.5 or sampling.min_p < 0.5
    if not allowed_V.all():
        assert raw_V[allowed_V].min() >= raw_V[~allowed_V].max()
    heat_V = np.exp(raw_V / sampling.temperature)
    left_V = np.sort(heat_V)[::-1]
    left_V = left_V[left_V >= sampling.min_p * left_V[0]][: sampling.top_k or 12]
    num_kept = int(np.searchsorted(left_V.cumsum() / left_V.sum(), sampling.top_p * (1 - 1e-12)) + 1)
    # A bound met exactly may fall on either side by rounding.
    assert abs(int(allowed_V.sum()) - min(num_kept, left_V.size)) <= 1
    ratio_V = shaped_V[allowed_V] - raw_V[allowed_V] / sampling.temperature
    assert np.allclose(ratio_V, ratio_V[0])


@pytest.mark.slow
def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    policy, sampling = ScriptedPolicy(8), Sampling(temperature=0.7, top_p=0.9)
    uniforms = (np.arange(4000) + 0.5) / 4000
    drawn = [policy.draw((1, 2), (), VERSION, sampling, float(u)) for u in uniforms]
    share_V = np.bincount([token.id for token in drawn], minlength=8) / 4000
    expected_V = np.exp(shaped_logprobs(policy.logits((1, 2), VERSION), sampling))
    assert np.abs(share_V - expected_V).max() < 1e-3  # the grid's step, both ends
    assert all(token.logprob == pytest.approx(np.log(expected_V[token.id])) for token in drawn)


def test_penalties_lower_what_is_there_already() -> None:
    policy, prompt_ids, sampled_ids = ScriptedPolicy(8), (1, 2), (2, 3, 3)
    logits = policy.logits((*prompt_ids, *sampled_ids), VERSION)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2)
    for id in (1, 2, 3):
        logits[id] *= 0.5 if logits[id] > 0 else 2
    logits[2] -= 0.75
    logits[3] -= 1.0
    expected = logits - np.log(np.exp(logits).sum())
    for id in range(8):
        drawn = policy.draw(prompt_ids, sampled_ids, VERSION, sampling, 0.5, forced_id=id)
        assert drawn.logprob == pytest.approx(expected[id])


def test_the_policy_depends_on_seed_version_and_every_token() -> None:
    base = ScriptedPolicy(16).logits((1, 2, 3), VERSION)
    assert (ScriptedPolicy(16).logits((1, 2, 3), VERSION) == base).all()
    for other in (
        ScriptedPolicy(16, seed=1).logits((1, 2, 3), VERSION),
        ScriptedPolicy(16).logits((1, 2, 3), PolicyVersion("scripted", 1)),
        ScriptedPolicy(16).logits((1, 2, 3), PolicyVersion("another", 0)),
        ScriptedPolicy(16).logits((0, 2, 3), VERSION),
    ):
        assert not np.allclose(other, base)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_k=1)])
def test_a_script_is_sampled_with_the_policys_own_figures(sampling: Sampling) -> None:
    engine = ScriptedEngine(16, script={(1, 2): (5, 6, 7)})
    (chunks,) = asyncio.run(collect(engine.generate(make_prompt((1, 2), sampling=sampling))))
    assert join(chunks) == [5, 6, 7]
    assert chunks[-1].finish_reason == FinishReason.STOP
    assert np.isfinite(join(chunks, "logprobs")).all()
    for place, raw in enumerate(join(chunks, "raw_logprobs")):
        logits = engine.policy.logits((1, 2, 5, 6, 7)[: 2 + place], VERSION)
        assert raw == pytest.approx(logits[5 + place] - np.log(np.exp(logits).sum()), abs=1e-6)
    (other,) = asyncio.run(collect(engine.generate(make_prompt((1, 3), sampling=sampling))))
    assert len(join(other)) == 8


def test_a_script_may_be_a_function_and_is_cut_at_max_tokens() -> None:
    engine = ScriptedEngine(16, script=lambda ids: [ids[-1]] * 5)
    (chunks,) = asyncio.run(collect(engine.generate(make_prompt((1, 9), max_tokens=3))))
    assert join(chunks) == [9, 9, 9]
    assert chunks[-1].finish_reason == FinishReason.LENGTH


def test_a_stop_text_ends_with_the_token_that_completes_it() -> None:
    engine = ScriptedEngine(128, script={(1,): list(b"ab\n\ncd")}, decode=bytes)
    (chunks,) = asyncio.run(collect(engine.generate(make_prompt((1,), stop_texts=("\n\n",)))))
    assert bytes(int(id) for id in join(chunks)) == b"ab\n\n"
    assert chunks[-1].finish_reason == FinishReason.STOP


def test_weights_changed_midway_change_the_tokens_after_them(tmp_path: Path) -> None:
    async def run() -> tuple[list[float], list[float]]:
        engine = ScriptedEngine(64)
        plain = await complete(engine, make_prompt(seed=1))
        mixed, versions = [], []
        async with aclosing(engine.generate(make_prompt(seed=1))) as chunks:
            async for chunk in chunks:
                mixed += chunk.ids.tolist()
                versions += chunk.versions.tolist()
                if len(mixed) == 3:
                    await engine.load(tmp_path, PolicyVersion("scripted", 1))
        assert mixed[:3] == plain[:3]
        assert mixed[3:] != plain[3:]
        return mixed, versions

    mixed, versions = asyncio.run(run())
    assert versions == [0] * 3 + [1] * 5
    assert asyncio.run(run()) == (mixed, versions)


def test_time_passes_by_the_clock_it_is_given() -> None:
    slept: list[float] = []

    async def sleep(duration_s: float) -> None:
        slept.append(duration_s)

    engine = ScriptedEngine(16, delay_s=10, sleep=sleep, clock=lambda: sum(slept))
    (chunks,) = asyncio.run(collect(engine.generate(make_prompt(timeout_s=45))))
    assert slept == [10] * 5
    assert len(join(chunks)) == 4
    assert chunks[-1].finish_reason == FinishReason.ABORT


def test_what_it_cannot_do_is_refused() -> None:
    engine = ScriptedEngine(16, script={(1,): ()})
    for prompt, problem in (
        (make_prompt((1,)), "empty response to a prompt of 1 tokens"),
        (make_prompt((2,), stop_texts=("a",)), "decode"),
        (make_prompt((2,), returns_experts=True), "no experts"),
    ):
        with pytest.raises(RequestError, match=problem):
            asyncio.run(complete(engine, prompt))
