"""Scores of networks that answer right, wrong or in part; and one forced pass against greedy decoding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.evaluate.predictor import ModelPredictor, batches
from m2forge.evaluate.prompts.scored_sample import Sample
from m2forge.evaluate.prompts.wording import TextWording, TokenWording, make_alphabet
from m2forge.evaluate.report import wilson
from m2forge.evaluate.suites.ruler import HopTask, NeedleTask, RandomFiller, noise_filler
from m2forge.evaluate.suites.suite import score_forced, score_free
from m2forge.model.build import build
from m2forge.model.transformer import Transformer
from tests.evaluate.letters import ByteEncoder, answer_ids, decode
from tests.evaluate.oracle import Oracle
from tests.model.draw import SMALL
from tests.model.generate import generate

ALPHABET = make_alphabet(256, num_symbols=64)
QUERIES = NeedleTask(TokenWording(ALPHABET), RandomFiller(ALPHABET.filler), num_needles=4, num_queries=4)
HOPS = HopTask(TokenWording(ALPHABET), RandomFiller(ALPHABET.filler), num_hops=3)


def draw(task: NeedleTask | HopTask, count: int, size: int = 120) -> list[Sample]:
    return [task.sample(np.random.default_rng(seed), size + seed) for seed in range(count)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = build(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # fresh weights give nearly even logits; these give clear choices
    return model


def test_an_oracle_scores_all_and_its_opposite_nothing() -> None:
    samples = draw(QUERIES, 6)
    assert [outcome.recall for outcome in score_forced(Oracle(samples, vocab_size=256), samples)] == [1.0] * 6
    wrong = Oracle(samples, vocab_size=256, is_right=lambda index, answer: False)
    assert [outcome.recall for outcome in score_forced(wrong, samples)] == [0.0] * 6


@given(
    right=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=8), bound=st.integers(1, 600)
)
def test_each_answer_counts_by_itself_in_shared_passes(right: list[list[bool]], bound: int) -> None:
    samples = draw(QUERIES, len(right))
    oracle = Oracle(samples, vocab_size=256, is_right=lambda index, answer: right[index][answer])
    outcomes = score_forced(oracle, samples, max_pack_tokens=bound)
    assert [list(outcome.right) for outcome in outcomes] == right
    assert [outcome.sample for outcome in outcomes] == samples
    assert [outcome.is_exact for outcome in outcomes] == [all(each) for each in right]
    assert oracle.largest_pass <= max(bound, 128)


def test_free_completions_count_answers_wherever_they_stand() -> None:
    samples = draw(HOPS, 4)
    oracle = Oracle(samples, vocab_size=256, is_right=lambda index, answer: answer != 1 or index < 2)
    assert [outcome.recall for outcome in score_free(oracle, samples)] == [1.0, 1.0, 0.75, 0.75]
    backwards = [
        Sample(
            np.concatenate((sample.prompt_ids, answer_ids(sample)[::-1])).astype(np.int32), sample.spans, sample.size
        )
        for sample in samples
    ]
    reader = Oracle(backwards, vocab_size=256)
    assert [outcome.recall for outcome in score_free(reader, samples)] == [1.0] * 4
    assert [outcome.is_exact for outcome in score_forced(reader, samples)] == [False] * 4


def test_free_completions_of_text_are_compared_as_text() -> None:
    task = NeedleTask(TextWording(ByteEncoder()), noise_filler(ByteEncoder()), num_needles=3, num_queries=3)
    samples = [task.sample(np.random.default_rng(seed), 900) for seed in range(3)]
    oracle = Oracle(samples, vocab_size=256, is_right=lambda index, answer: index != 1 or answer != 2)
    outcomes = score_free(oracle, samples, decode=decode)
    assert [outcome.right for outcome in outcomes] == [(True,) * 3, (True, True, False), (True,) * 3]
    with pytest.raises(ValueError, match="need `decode`"):
        score_free(oracle, samples)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_batches_hold_everything_once_within_the_bound(lengths: list[int], bound: int) -> None:
    groups = list(batches(lengths, bound))
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[index] for index in group) <= bound


def test_one_forced_pass_is_right_where_greedy_decoding_is(model: Transformer) -> None:
    """Answers of greedy decoding, and ones that differ from it in one token, packed with unlike lengths."""
    rng, samples, expected = np.random.default_rng(0), [], []
    for number in range(12):
        prompt = rng.integers(0, SMALL.vocab_size, 5 + 3 * number).tolist()
        answer = generate(model, prompt, max_new_tokens=4)
        if number % 3 == 0:
            place = number % 4
            answer[place] = (answer[place] + 1) % SMALL.vocab_size
        samples.append(Sample(np.array(prompt + answer, np.int32), ((len(prompt), len(prompt) + 4),), 0))
        expected.append(number % 3 != 0)
    for bound in (1, 100, 10_000):
        outcomes = score_forced(ModelPredictor(model), samples, max_pack_tokens=bound)
        assert [outcome.is_exact for outcome in outcomes] == expected
    free = score_free(ModelPredictor(model), samples)
    assert [outcome.is_exact for outcome in free] == expected


def test_documents_and_padded_rows_give_the_same_logits(model: Transformer) -> None:
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, SMALL.vocab_size, length).astype(np.int32) for length in (7, 30, 12)]
    positions = [np.array([0, 6], np.int32), np.array([29], np.int32), np.array([3, 4, 11], np.int32)]
    packed = ModelPredictor(model, "documents").logits(documents, positions)
    padded = ModelPredictor(model, "rows").logits(documents, positions)
    assert packed.shape == (6, SMALL.vocab_size)
    # Logits of a few units, summed in another order in float32.
    torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-4)
    alone = model.logits(model(torch.tensor(documents[2][None], dtype=torch.int64)).hidden_ND)[[3, 4, 11]]
    torch.testing.assert_close(packed[3:], alone.detach(), rtol=1e-4, atol=1e-4)


def test_the_interval_is_wilsons() -> None:
    # Brown, Cai and DasGupta 2001: 95% intervals of 0, 10 and 15 of 20.
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0.5, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)
    assert wilson(0.75, 20) == pytest.approx((0.5313, 0.8881), abs=1e-4)


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_the_interval_holds_the_mean_and_stays_a_share(mean: float, num_samples: int) -> None:
    low, high = wilson(mean, num_samples)
    assert 0 <= low <= mean <= high <= 1
