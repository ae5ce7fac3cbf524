"""What every family promises, checked for all of them: the same tasks every time, honest verifiers, quiet tools."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import ConfigError, NotFoundError, RecordError
from m2forge.records import Domain, Submission, Task
from m2forge.tasks.agent import KEYS, Chain, Gather
from m2forge.tasks.answer import plain
from m2forge.tasks.catalog import EMBEDDED, family_of, find_family
from m2forge.tasks.family import Family, Verdict
from m2forge.tasks.library_family import GymFamily
from m2forge.tasks.puzzle import Counters, StackProgram, Words
from m2forge.tasks.task_set import HELD_OUT_EVERY, TaskSet, split_of
from m2forge.text.format import make_format
from m2forge.text.message import Message
from m2forge.text.minimax_m2 import MINIMAX_M2_SPECIALS
from m2forge.text.tokenizer import train_tokenizer

FAMILIES: tuple[Family, ...] = (*EMBEDDED, GymFamily("chain_sum"), GymFamily("gcd"))
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
SEEDS = st.integers(0, 2**48)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = JSON | st.fixed_dictionaries({"key": JSON | st.sampled_from(KEYS)})
ANY_TEXT = st.text(st.characters(), max_size=300) | st.text("0123456789 abAB+-*/.,()\n", max_size=300)


def draw(family: Family, data: st.DataObject) -> Task:
    return family.draw(data.draw(st.sampled_from(family.levels)), data.draw(SEEDS))


def solve(family: Family, task: Task, seed: int = 0) -> str:
    return family.demonstrate(task, random.Random(seed))[-1].content


def copied(task: Task) -> Task:
    """As it comes back from a file."""
    metadata = json.loads(json.dumps(task.metadata))
    return Task(task.id, task.domain, task.instruction, task.difficulty, metadata)


@every_family
@given(data=st.data())
def test_the_same_difficulty_and_seed_give_the_same_task(family: Family, data: st.DataObject) -> None:
    level, seed = data.draw(st.sampled_from(family.levels)), data.draw(SEEDS)
    task = family.draw(level, seed)
    assert task == family.draw(level, seed) == copied(task)
    assert (task.domain, task.difficulty, family_of(task)) == (family.domain, level, family)


@every_family
@given(data=st.data())
def test_a_demonstration_solves_its_task(family: Family, data: st.DataObject) -> None:
    task, seed = draw(family, data), data.draw(SEEDS)
    messages = family.demonstrate(task, random.Random(seed))
    assert messages == family.demonstrate(copied(task), random.Random(seed))
    assert messages[0] == Message("user", task.instruction)
    assert messages[-1].role == "assistant"
    assert not messages[-1].tool_calls
    assert family.verify(copied(task), Submission(messages[-1].content)).perf == 1.0
    assert family.verify(task, Submission(f"  {messages[-1].content}\n")).perf == 1.0


@every_family
@given(data=st.data())
def test_demonstrated_calls_have_the_tools_real_results(family: Family, data: st.DataObject) -> None:
    task = draw(family, data)
    messages = family.demonstrate(task, random.Random(data.draw(SEEDS)))
    calls = {call.id: call for message in messages for call in message.tool_calls}
    results = [message for message in messages if message.role == "tool"]
    assert [message.tool_call_id for message in results] == list(calls)
    for message in results:
        call = calls[message.tool_call_id]
        assert family.call(task, call.name, call.arguments) == message.content
    if isinstance(family, Chain | Gather):
        assert len(calls) == task.difficulty


@every_family
@given(data=st.data())
def test_no_answer_makes_a_verifier_raise(family: Family, data: st.DataObject) -> None:
    task, answer = draw(family, data), data.draw(ANY_TEXT)
    verdict = family.verify(task, Submission(answer))
    json.dumps(verdict.evidence, allow_nan=False, ensure_ascii=False).encode()
    assert len(json.dumps(family.verify(task, Submission(answer * 100)).evidence)) < 4000
    right = plain(solve(family, task))
    assert verdict.perf in (0, 1)
    if verdict.perf and not isinstance(family, StackProgram | GymFamily):
        assert plain(answer) == right


@every_family
@given(data=st.data())
def test_an_answer_with_one_sign_changed_is_wrong(family: Family, data: st.DataObject) -> None:
    task = draw(family, data)
    right = solve(family, task)
    signs = list(right)
    place = data.draw(st.integers(0, len(signs) - 1))
    signs[place] = data.draw(st.sampled_from("0123456789").filter(lambda sign: sign != right[place]))
    if not isinstance(family, StackProgram):
        assert family.verify(task, Submission("".join(signs))).perf == 0
    for wrong in ("", "?", f"{right} {right}", right[: len(right) // 2]):
        assert family.verify(task, Submission(wrong)).perf == 0, wrong


@every_family
@given(data=st.data(), name=st.sampled_from(("look", "Look", "", "open")) | st.text(), arguments=ARGUMENTS)
def test_a_call_that_cannot_be_served_is_answered_with_an_error(
    family: Family, data: st.DataObject, name: str, arguments: object
) -> None:
    task = draw(family, data)
    answer = family.call(task, name, arguments)  # type: ignore[arg-type]  # whatever JSON a policy wrote
    assert answer == family.call(task, name, arguments)  # type: ignore[arg-type]
    answer.encode()
    served = (
        name in {tool.name for tool in family.tools(task)}
        and isinstance(arguments, dict)
        and arguments.keys() == {"key"}
        and arguments["key"] in KEYS
    )
    assert answer.startswith("error:") != served
    assert len(answer) < 1000
    assert family.latency_s(task, name) >= 0


@pytest.mark.parametrize("key", [9, True, None, "", "9", "A9", "9a", "9K", "3G ", ["3G"]])
def test_a_key_that_does_not_exist_is_an_error(key: object) -> None:
    task = Chain().draw(1, 0)
    assert Chain().call(task, "look", {"key": key}).startswith("error:")  # type: ignore[dict-item]
    assert not Chain().call(task, "look", {"key": "3G"}).startswith("error:")
    assert Chain().call(task, "look", {"key": "3G", "more": 1}).startswith("error: look: 'more' is no parameter")


@pytest.mark.parametrize("family", EMBEDDED, ids=lambda family: family.name)
def test_no_answer_is_right_for_more_than_a_few_tasks(family: Family) -> None:
    # The easiest level is where guessing pays most. Each of the commonest answers is tried on every task.
    stream = TaskSet(family, "train", seed=3)
    tasks = [stream.next(family.levels[0], family.levels[0]) for _ in range(400)]
    commonest = Counter(solve(family, task) for task in tasks).most_common(10)
    for answer, _ in commonest:
        share = sum(family.verify(task, Submission(answer)).perf for task in tasks) / len(tasks)
        # Of a hundred equally likely answers, the commonest in 400 draws is expected below 3.5%.
        assert share < 0.035, answer
    guesses = [solve(family, task) for task in tasks[1:] + tasks[:1]]
    pairs = zip(tasks, guesses, strict=True)
    assert sum(family.verify(task, Submission(guess)).perf for task, guess in pairs) / len(tasks) < 0.035


@every_family
@given(level_seed=st.tuples(SEEDS, SEEDS, SEEDS))
def test_no_instruction_is_in_both_splits(family: Family, level_seed: tuple[int, int, int]) -> None:
    first, second, seed = level_seed
    lowest = family.levels[0]
    train = TaskSet(family, "train", first).next(lowest, lowest)
    held_out = TaskSet(family, "held_out", second).next(lowest, lowest)
    assert split_of(train) == "train"
    assert split_of(held_out) == "held_out"
    assert train.instruction != held_out.instruction
    # What lies behind the tools does not move a task to the other split.
    other = Task("other", train.domain, train.instruction, 9.0, {**train.metadata, "secret": seed})
    assert split_of(other) == "train"


@every_family
def test_one_instruction_in_five_is_held_out_and_many_are(family: Family) -> None:
    for level in family.levels[:2]:
        tasks = [family.draw(level, seed) for seed in range(1000)]
        splits = {task.instruction: split_of(task) for task in tasks}
        held_out = sum(split == "held_out" for split in splits.values())
        # 1/5 of the instructions that occurred, give or take four standard deviations.
        assert abs(held_out - len(splits) / HELD_OUT_EVERY) < 4 * (0.16 * len(splits)) ** 0.5
        assert len({task.id for task in tasks if split_of(task) == "held_out"}) > 20


def test_every_domain_has_a_family() -> None:
    assert {family.domain for family in EMBEDDED} == set(Domain)
    with pytest.raises(NotFoundError, match="did you mean 'counters'"):
        find_family("counter")


@every_family
def test_a_difficulty_that_the_family_lacks_is_refused(family: Family) -> None:
    for level in (family.levels[0] - 1, family.levels[-1] + 1):
        with pytest.raises(ConfigError, match=f"difficulty: expected .*received {level}"):
            family.draw(level, 0)


def test_a_task_without_its_metadata_is_refused() -> None:
    bare = Task("t", Domain.AGENT, "Start at 3.", 1.0, {"family": "chain", "start": [3], "keys": 1, "secret": "x"})
    for family in (Chain(), Gather(), Counters(), StackProgram(), Words()):
        with pytest.raises(RecordError, match="Task t: metadata"):
            family.verify(bare, Submission("4"))
    with pytest.raises(RecordError, match="perf"):
        Verdict(1.5)


def test_instructions_are_few_tokens_and_fit_a_small_context() -> None:
    conversations = []
    for family in EMBEDDED:
        for seed in range(60):
            task = family.draw(family.levels[seed % 3], seed)
            conversations.append((family.tools(task), family.demonstrate(task, random.Random(seed))))
    texts = [message.content + message.thinking for _, messages in conversations for message in messages]
    chat_format = make_format("minimax_m2", train_tokenizer(texts * 3, 512, MINIMAX_M2_SPECIALS))
    for tools, messages in conversations:
        assert len(chat_format.tokenizer.encode(messages[0].content)) <= 40
        assert len(chat_format.render(messages, tools).ids) < 1024
