"""Each family's own rules, on examples worked out by hand."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.records import Domain, JsonValue, Submission, Task
from m2forge.tasks.agent import KEYS, Chain, Copies, Gather, behind
from m2forge.tasks.answer import plain
from m2forge.tasks.family import read_int
from m2forge.tasks.puzzle import COUNTS, JOINERS, LETTER_CASES, ORDERS, Counters, StackProgram, Words
from m2forge.tasks.stack_machine import MAX_WORDS, ProgramError, run_program
from m2forge.text.minimax_m2 import MINIMAX_M2_SPECIALS
from m2forge.text.tokenizer import train_tokenizer


def test_counters_run_modulo_ten() -> None:
    metadata: dict[str, JsonValue] = {"family": "counters", "a": 4, "b": 7, "steps": "a+3 b-2 a+b b-a"}
    task = Task("t", Domain.REASONING, "…", 4.0, metadata)
    (_, answer) = Counters().demonstrate(task, random.Random(0))
    assert answer.thinking == "a+3 a=7 b-2 b=5 a+b a=2 b-a b=3"
    assert Counters().verify(task, Submission(" 2  3. ")).perf == 1
    assert Counters().verify(task, Submission("3 2")).perf == 0


def test_a_chain_follows_what_the_tool_says() -> None:
    task = Chain().draw(3, 11)
    key = str(task.metadata["start"])
    assert f"Start at {key}. Follow 3 links." == task.instruction
    for _ in range(3):
        key = Chain().call(task, "look", {"key": key})
    assert Chain().verify(task, Submission(key)).perf == 1
    assert Chain().draw(1, 11).instruction.endswith("Follow 1 link.")


def test_values_behind_keys_are_spread_evenly() -> None:
    counts = Counter(behind(secret, "5A") for secret in range(10_000))
    # Each is due a hundred times; five standard deviations.
    assert counts.keys() == set(KEYS)
    assert all(50 < count < 150 for count in counts.values())


@pytest.mark.parametrize("vocab_size", [280, 320, 400])
def test_a_key_is_the_same_two_tokens_everywhere(vocab_size: int) -> None:
    texts = [f"Start at {key}. Read {key} and {key}. <response>{key}</response>" for key in KEYS] * 5
    tokenizer = train_tokenizer(texts, vocab_size, MINIMAX_M2_SPECIALS)
    for key in KEYS:
        alone = tokenizer.encode(key)
        assert len(alone) == 2
        for before, after in (("Start at ", "."), (">", "</"), ("", "\n"), ("Read 1A, ", ", 2B")):
            ids, start = tokenizer.encode(before + key + after), len(tokenizer.encode(before))
            assert ids[start : start + 2] == alone


def test_gathering_is_shown_one_by_one_and_all_at_once() -> None:
    task = Gather().draw(5, 1)
    sizes: Counter[int] = Counter()
    for seed in range(300):
        turns = [len(message.tool_calls) for message in Gather().demonstrate(task, random.Random(seed))]
        sizes[max(turns)] += 1
        assert sum(turns) == 5
    assert sizes.keys() == {1, 5}
    assert 0.6 < sizes[1] / sizes.total() < 0.73
    assert task.instruction.count(",") == 3
    assert " and " in task.instruction


@given(st.integers(0, 16), st.integers(0, 1000))
def test_a_copy_is_stale_at_as_many_links_as_the_difficulty(difficulty: int, seed: int) -> None:
    task = Copies().draw(difficulty, seed)
    key, num_old = str(task.metadata["start"]), 0
    for _ in range(read_int(task, "num_links")):
        value = Copies().call(task, "look", {"key": key})
        copied = Copies().call(task, "recall", {"key": key})
        assert copied in KEYS
        key, num_old = value, num_old + (copied != value)
    assert num_old == difficulty
    assert Copies().verify(task, Submission(key)).perf == 1


def test_whoever_trusts_the_copy_fails_and_nobody_notices_before() -> None:
    num_solved = 0
    for seed in range(300):
        task = Copies().draw(1, seed)
        key = str(task.metadata["start"])
        for _ in range(read_int(task, "num_links")):
            key = Copies().call(task, "recall", {"key": key})
        num_solved += Copies().verify(task, Submission(key)).perf == 1
    assert num_solved < 15


def test_demonstrations_use_a_correct_copy_two_times_of_three() -> None:
    counts: Counter[str] = Counter()
    for seed in range(300):
        task = Copies().draw(seed % 2, seed)
        for message in Copies().demonstrate(task, random.Random(seed)):
            for call in message.tool_calls:
                is_old = call.arguments["key"] in str(task.metadata["old"]).split()
                assert not (is_old and call.name == "recall")
                counts[call.name] += not is_old
    assert 0.6 < counts["recall"] / counts.total() < 0.73


def test_only_gathering_takes_time() -> None:
    assert Gather().latency_s(Gather().draw(2, 0), "look") == 1.0
    assert Gather(call_s=2.0).latency_s(Gather().draw(2, 0), "look") == 2.0
    assert Chain().latency_s(Chain().draw(2, 0), "look") == 0.0


def test_any_program_that_computes_the_expression_is_right() -> None:
    metadata = {"family": "stack", "program": "a 3 + b *"}
    task = Task("t", Domain.CODING, "Write a stack program for (a+3)*b.", 2.0, metadata)
    for right in ("a 3 + b *", "b a 3 + *", "3 a + b *", "a b * b 3 * +", "b dup a * swap 3 * +", "7 drop a 3 + b *"):
        assert StackProgram().verify(task, Submission(right)).perf == 1, right
    for wrong in ("a 3 b + *", "(a+3)*b", "a 3 + b", "a b *", "a 3 + c *", "a 3 + b * *", "", "0"):
        assert StackProgram().verify(task, Submission(wrong)).perf == 0, wrong


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("", "0 values are left"),
        ("1 2", "2 values are left"),
        ("1 +", "1 values on the stack, expected 2"),
        ("swap", "expected 2"),
        ("x", "unknown word"),
        ("__import__('os')", "unknown word"),
        ("²", "unknown word"),
        ("-3", "unknown word"),
        ("9999999999", "unknown word"),
        ("999999999 dup * dup *", "a value above"),
        ("1 " * (MAX_WORDS + 1), "words, at most"),
    ],
)
def test_a_program_that_cannot_run_says_why(program: str, problem: str) -> None:
    with pytest.raises(ProgramError, match=problem):
        run_program(program, {"a": 1})


@given(st.lists(st.sampled_from(("a", "b", "2", "+", "-", "*", "dup", "drop", "swap", "over")), max_size=200))
def test_programs_end_with_a_bounded_value_or_an_error(words: list[str]) -> None:
    try:
        result = run_program(" ".join(words), {"a": 12, "b": -12})
    except ProgramError:
        return
    assert abs(result) <= 10**15


def test_the_stack_words_do_what_they_say() -> None:
    assert run_program("a b -", {"a": 1, "b": 5}) == -4
    assert run_program("a b swap -", {"a": 1, "b": 5}) == 4
    assert run_program("a b over - +", {"a": 1, "b": 5}) == 5
    assert run_program("a dup *", {"a": 7}) == 49
    assert run_program("a 3 drop", {"a": 7}) == 7


def test_words_are_written_as_asked() -> None:
    seen = set()
    for seed in range(400):
        task = Words().draw(2, seed)
        head, _, asked = task.instruction.removeprefix("Write ").partition(": ")
        order, case, count, joiner = asked.split(", ")
        words = ORDERS[order](head.split(", "))
        copies = [LETTER_CASES[case](word) for word in words for _ in range(COUNTS[count.removesuffix(" each")])]
        answer = joiner.removeprefix("joined by ").join(copies)
        assert Words().verify(task, Submission(f" {answer}. ")).perf == 1
        assert Words().verify(task, Submission(answer.swapcase())).perf == 0
        seen.add((order, case, count, joiner))
    assert len(seen) == len(ORDERS) * len(LETTER_CASES) * len(COUNTS) * len(JOINERS)


def test_words_know_backwards_from_sorted() -> None:
    assert ORDERS["backwards"](["sun", "cat", "red"]) == ["red", "cat", "sun"]
    assert ORDERS["sorted"](["sun", "cat", "red"]) == ["cat", "red", "sun"]
    assert LETTER_CASES["one capital"]("sun") == "Sun"


def test_plain_text_keeps_what_counts() -> None:
    assert plain(" 2\n 5. ") == "2 5"
    assert plain("2.5") == "2.5"
    assert plain("A") != plain("a")
    assert plain("5 .") == "5"
