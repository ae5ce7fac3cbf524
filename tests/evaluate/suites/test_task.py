"""What every task promises of its samples: exact length, the answer in the haystack, fresh draws, equal seeds equal."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import ConfigError
from m2forge.evaluate.prompts.scored_sample import Sample, Task
from m2forge.evaluate.prompts.wording import Marker, ShotTask, TextWording, TokenWording, Wording, make_alphabet
from m2forge.evaluate.suites.ruler import (
    Filling,
    HopTask,
    Insert,
    NeedleTask,
    RandomFiller,
    SentenceFiller,
    WindowFiller,
    WordCountTask,
    lay,
    noise_filler,
    text_filler,
)
from tests.evaluate.letters import ByteEncoder, answer_ids, decode

VOCAB = 512
ALPHABET = make_alphabet(VOCAB, num_symbols=64)
TOKENS = TokenWording(ALPHABET)
RANDOM = RandomFiller(ALPHABET.filler)
TEXT = TextWording(ByteEncoder())
NOISE = noise_filler(ByteEncoder())
NUM_WORDS = len(ALPHABET.symbols) + len(ALPHABET.filler)

TASKS: dict[str, Task] = {
    "needle": NeedleTask(TOKENS, RANDOM),
    "multi_key": NeedleTask(TOKENS, RANDOM, num_needles=5),
    "multi_query": NeedleTask(TOKENS, RANDOM, num_needles=5, num_queries=3),
    "multi_hop": HopTask(TOKENS, RANDOM, num_chains=2, num_hops=3),
    "common_words": WordCountTask(TOKENS, 5, NUM_WORDS),
    "text needle": NeedleTask(TEXT, NOISE),
    "text multi_query": NeedleTask(TEXT, NOISE, num_needles=4, num_queries=2),
    "text multi_hop": HopTask(TEXT, NOISE),
}


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def find(row: list[int], part: list[int]) -> list[int]:
    return [start for start in range(len(row) - len(part) + 1) if row[start : start + len(part)] == part]


def needles_of(sample: Sample) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
    """Key → (where the needle starts, value), read back from the tokens."""
    needle, is_, end = (ALPHABET.markers[marker] for marker in (Marker.NEEDLE, Marker.IS, Marker.END))
    row, found = sample.prompt_ids.tolist(), {}
    for start in find(row, [needle]):
        middle, stop = row.index(is_, start), row.index(end, start)
        key = tuple(row[start + 1 : middle])
        assert key not in found, "two needles have one key"
        found[key] = (start, tuple(row[middle + 1 : stop]))
    return found


@pytest.mark.parametrize("name", TASKS)
@given(seed=st.integers(0, 10_000), size=st.integers(620, 1500))
def test_samples_have_the_requested_length_and_repeat_by_seed(name: str, seed: int, size: int) -> None:
    sample = TASKS[name].sample(rng(seed), size, 0.5)
    assert len(sample.ids) == size == sample.size
    assert 0 <= sample.ids.min() <= sample.ids.max() < VOCAB
    again, other = TASKS[name].sample(rng(seed), size, 0.5), TASKS[name].sample(rng(seed + 1), size, 0.5)
    assert sample.ids.tolist() == again.ids.tolist()
    assert sample.spans == again.spans
    assert sample.ids.tolist() != other.ids.tolist()


@given(
    seed=st.integers(0, 10_000),
    size=st.integers(80, 400),
    depth=st.floats(0, 1),
    num_needles=st.integers(1, 6),
    widths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_the_needle_lies_at_its_depth_and_no_other_has_its_key(
    seed: int, size: int, depth: float, num_needles: int, widths: tuple[int, int]
) -> None:
    wording = TokenWording(ALPHABET, *widths)
    sample = NeedleTask(wording, RANDOM, num_needles).sample(rng(seed), size, depth)
    needles = needles_of(sample)
    assert len(needles) == num_needles
    ask, is_ = ALPHABET.markers[Marker.ASK], ALPHABET.markers[Marker.IS]
    row = sample.prompt_ids.tolist()
    asked = tuple(row[row.index(ask) + 1 : len(row) - 1])
    assert row[-1] == is_
    start, value = needles[asked]
    assert sample.answers == (value,)
    assert sample.depth == depth
    # Filler before the needle, other needles not counted.
    before = start - sum(len(key) + len(value) + 3 for key, (at, value) in needles.items() if at < start)
    num_filler = size - num_needles * (sum(widths) + 3) - 2 - sum(widths)
    assert abs(before - depth * num_filler) <= 0.5 + 1e-6
    assert sum(token in set(ALPHABET.filler.tolist()) for token in row) == num_filler


@given(seed=st.integers(0, 10_000))
def test_every_query_is_answered_by_the_needle_of_its_key(seed: int) -> None:
    sample = NeedleTask(TOKENS, RANDOM, num_needles=6, num_queries=4).sample(rng(seed), 200)
    needles, row, ask = needles_of(sample), sample.ids.tolist(), ALPHABET.markers[Marker.ASK]
    assert len(sample.spans) == 4
    for start, stop in sample.spans:
        key = tuple(row[start - 3 : start - 1])
        assert row[start - 4] == ask
        assert needles[key][1] == tuple(row[start:stop])
    assert sample.depth is None


@given(seed=st.integers(0, 10_000), num_chains=st.integers(1, 3), num_hops=st.integers(1, 4))
def test_following_the_assignments_gives_the_chains_variables(seed: int, num_chains: int, num_hops: int) -> None:
    sample = HopTask(TOKENS, RANDOM, num_chains, num_hops).sample(rng(seed), 200)
    set_, is_, end, ask = (ALPHABET.markers[each] for each in (Marker.SET, Marker.IS, Marker.END, Marker.ASK))
    row = sample.prompt_ids.tolist()
    held: dict[tuple[int, ...], tuple[int, ...]] = {}
    for start in find(row, [set_]):
        middle, stop = row.index(is_, start), row.index(end, start)
        variable, source = tuple(row[start + 1 : middle]), tuple(row[middle + 1 : stop])
        # The source is a value or was assigned before: chains stand in their order.
        held[variable] = held.get(source, source)
    asked = tuple(row[row.index(ask) + 1 : len(row) - 1])
    assert len(held) == num_chains * (num_hops + 1)
    assert tuple(variable for variable, value in held.items() if value == asked) == sample.answers


@given(seed=st.integers(0, 10_000), size=st.integers(200, 6000), num_common=st.integers(1, 6))
def test_the_common_words_are_the_commonest_by_far(seed: int, size: int, num_common: int) -> None:
    sample = WordCountTask(TOKENS, num_common, NUM_WORDS).sample(rng(seed), size)
    words = sample.prompt_ids.tolist()[1:-2]
    assert len(sample.ids) == size
    counts = Counter(words)
    commonest = [word for word, _ in counts.most_common(num_common)]
    assert set(commonest) == set(answer_ids(sample))
    assert min(counts[word] for word in commonest) >= 5 * max(
        count for word, count in counts.items() if word not in commonest
    )
    assert answer_ids(sample) == sorted(answer_ids(sample), key=words.index)


@given(seed=st.integers(0, 10_000), num_shots=st.integers(1, 40))
def test_the_examples_decide_the_answer(seed: int, num_shots: int) -> None:
    sample = ShotTask(TOKENS, num_inputs=6, num_labels=3).sample(rng(seed), num_shots)
    shots = sample.ids.reshape(num_shots + 1, 4)
    label_of: dict[int, int] = {}
    for _, given_, _, label in shots[:-1].tolist():
        assert label_of.setdefault(given_, label) == label
    assert len(label_of) == min(num_shots, 6)
    assert answer_ids(sample) == [label_of[int(shots[-1, 1])]]


@given(seed=st.integers(0, 10_000), depth=st.floats(0, 1))
def test_a_text_needle_is_between_sentences_near_its_depth(seed: int, depth: float) -> None:
    sample = NeedleTask(TEXT, NOISE).sample(rng(seed), 2000, depth)
    text = decode(sample.ids.tolist())
    (value,) = sample.references
    key = text.rpartition(" of ")[2].split(" ")[0]
    fact = f" The secret number of {key} is {value}."
    assert text.count(fact) == 1
    assert text.endswith(f"The secret number of {key} is {value}")
    head = text.index("\n") + 1
    before, after = text[head:].split("\nQuestion")[0].split(fact)
    assert before == "" or before.endswith((".", "\n"))
    # The first sentence is cut, so at depth 0 the needle stands before the rest of one.
    assert after == "" or after.startswith(" ") or before == ""
    # The nearest place between two sentences is at most half of the longest away.
    assert abs(len(before) - depth * len(before + after)) <= max(map(len, NOISE.sentences)) / 2 + 1


def test_a_text_task_names_all_it_asks_for() -> None:
    sample = NeedleTask(TEXT, NOISE, num_needles=4, num_queries=3).sample(rng(1), 1500)
    text = decode(sample.ids.tolist())
    tail = text.rpartition("Answer: ")[2]
    keys = tail.removeprefix("The secret numbers of ").split(" are")[0].replace(" and ", ", ").split(", ")
    for key, reference in zip(keys, sample.references, strict=True):
        assert f" The secret number of {key} is {reference}." in text
    assert [decode(list(answer)).strip() for answer in sample.answers] == list(sample.references)


def test_a_list_of_text_counts_right_and_fits() -> None:
    sample = WordCountTask(TEXT, 4).sample(rng(2), 3000)
    text = decode(sample.ids.tolist())
    items = text.split("\n")[1].split()
    words = items[1::2]
    assert items[::2] == [f"{number}." for number in range(1, len(words) + 1)]
    assert {word for word, _ in Counter(words).most_common(4)} == set(sample.references)
    assert 3000 - 20 < len(sample.ids) <= 3000


def test_a_list_that_was_too_long_loses_words_everywhere() -> None:
    common: set[str] = set()

    class Uneven(ByteEncoder):
        """The common words, by which the number of items is judged, are far shorter than the others."""

        def encode(self, text: str) -> list[int]:
            return [1] if text.strip() in common else super().encode(text)

    wording = TextWording(Uneven())
    common.update(term.text for term in wording.draw(rng(2), "word", 4))
    sample = WordCountTask(wording, 4).sample(rng(2), 6000)
    assert set(sample.references) == common
    row, line_end = sample.prompt_ids.tolist(), ord("\n")
    items = row[row.index(line_end) + 1 :]
    items = items[: items.index(line_end)]
    assert items.count(1) == 4 * 30
    letters = [token >= ord("a") for token in items]
    assert sum(letters[-300:]) > 0.5 * sum(letters[:300])


def test_examples_of_text_end_before_the_label() -> None:
    sample = ShotTask(TEXT, num_inputs=4, num_labels=2).sample(rng(3), 8)
    text = decode(sample.prompt_ids.tolist())
    assert text.count("Input: ") == 9
    assert text.endswith("\nLabel:")
    word = text.rpartition("Input: ")[2].split("\n")[0]
    assert f"Input: {word}\nLabel: {sample.references[0]}\n" in text


@pytest.mark.parametrize("wording", [TOKENS, TEXT], ids=["tokens", "text"])
@given(seed=st.integers(0, 10_000))
def test_terms_of_one_draw_are_different(wording: Wording, seed: int) -> None:
    for kind, count in (("key", 30), ("value", 30), ("variable", 60), ("word", 200), ("input", 60), ("label", 8)):
        drawn = wording.draw(rng(seed), kind, count)  # type: ignore[arg-type]  # the kinds are spelt out above
        assert len({term.ids for term in drawn}) == count


def test_a_haystack_of_text_is_a_stretch_of_it() -> None:
    text = "First one. Second one here! A third? And the fourth."
    filling = text_filler(ByteEncoder(), text).draw(rng(0), 37)
    shown = decode(filling.ids.tolist())
    assert len(shown) == 37
    assert shown in f" {text}" * 3
    for place in filling.positions.tolist()[1:-1]:
        assert shown[place] == " "
        assert shown[place - 1] in ".!?"
    window = WindowFiller(np.arange(10, dtype=np.int32)).draw(rng(0), 25)
    assert ((window.ids[1:] - window.ids[:-1]) % 10 == 1).all()
    assert SentenceFiller((np.array([1, 2], np.int32),)).draw(rng(0), 0).positions.tolist() == [0]


def test_inserts_that_meet_stand_in_the_order_given() -> None:
    filling = Filling(np.array([1, 2, 3, 4], np.int32), np.array([0, 2, 4], np.int32))
    ids = lay(filling, [Insert([9], 1.0), Insert([7], 0.5), Insert([8, 8], 0.5)])
    assert ids.tolist() == [1, 2, 7, 8, 8, 3, 4, 9]


@pytest.mark.parametrize(
    ("task", "size", "message"),
    [
        (TASKS["multi_key"], 20, "length 20: num_needles = 5 needs at least"),
        (TASKS["common_words"], 40, "length 40: a list of"),
        (NeedleTask(TokenWording(ALPHABET, 1, 1), RANDOM, 65), 9999, "65 different terms of 1 tokens cannot be drawn"),
        (ShotTask(TEXT, num_labels=9), 4, "9 labels: text knows 8"),
    ],
)
def test_what_cannot_be_made_is_refused(task: Task, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task.sample(rng(0), size)


@pytest.mark.parametrize(
    ("vocab_size", "markers", "message"),
    [(16, (), "leave 4 symbols"), (512, (1, 2, 3), "expected 7 different"), (512, range(506, 513), "below 512")],
)
def test_an_alphabet_that_does_not_fit_is_refused(vocab_size: int, markers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_alphabet(vocab_size, marker_ids=markers)


@pytest.mark.parametrize("spans", [(), ((0, 1),), ((2, 2),), ((3, 5), (4, 6)), ((3, 9),)])
def test_answers_out_of_place_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="do not lie in order"):
        Sample(np.zeros(8, np.int32), spans, 8)
