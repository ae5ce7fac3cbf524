"""From messages to ids and loss mask: exactly the assistant's tokens, whole turns, no untrained end."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.sft.encode import Encoded, encode, find_spans
from m2forge.sft.report import Note, Problem, Rejection
from m2forge.sft.trajectory import Trajectory
from m2forge.text.format import make_format
from m2forge.text.message import Message, ToolCall
from m2forge.text.tokenizer import train_tokenizer
from tests.sft.sample import ADD, chat_format, trajectories
from tests.text.draw import with_chat_template

PLENTY = 1 << 20


def last_trained(trajectory: Trajectory) -> int:
    """Messages up to the last trained one of the assistant; 0 if there is none."""
    pairs = enumerate(zip(trajectory.messages, trajectory.trained, strict=True), start=1)
    return max((end for end, (message, trained) in pairs if message.role == "assistant" and trained), default=0)


@given(trajectories())
def test_the_mask_is_exactly_what_the_assistant_samples(trajectory: Trajectory) -> None:
    end = last_trained(trajectory)
    encoded = encode(trajectory, chat_format(), PLENTY)
    if not end:
        assert encoded is Note.UNTRAINED
        return
    assert isinstance(encoded, Encoded)
    messages = trajectory.messages[:end]
    expected = np.zeros(len(encoded.ids), np.bool_)
    for index, message in enumerate(messages):
        if message.role == "assistant" and trajectory.trained[index]:
            prompt = chat_format().render(messages[:index], trajectory.tools, generation=True).ids
            whole = chat_format().render(messages[: index + 1], trajectory.tools)
            assert encoded.ids[: len(whole.ids)].tolist() == whole.ids
            stop = 1 + max(place for place, id in enumerate(whole.ids) if id in chat_format().stop_ids)
            expected[len(prompt) : stop] = True
    assert encoded.trained.tolist() == expected.tolist()
    assert encoded.ids.tolist() == chat_format().render(messages, trajectory.tools).ids
    assert not encoded.cut


def test_thinking_content_calls_and_end_marker_are_trained() -> None:
    call = ToolCall("add", {"a": 1, "b": 2}, "c1")
    messages = (
        Message("system", "PROMPT"),
        Message("user", "ASKED"),
        Message("assistant", "SAID", thinking="THOUGHT", tool_calls=(call,)),
        Message("tool", "RESULT", tool_call_id="c1"),
        Message("assistant", "ANSWER", thinking="REFLECTED"),
        Message("user", "THANKS"),
    )
    encoded = encode(Trajectory(messages, (ADD,), (True,) * 6, "a:1"), chat_format(), PLENTY)
    assert isinstance(encoded, Encoded)
    tokenizer = chat_format().tokenizer
    first, second = (tokenizer.decode(encoded.ids[a:b].tolist()) for a, b in find_spans(encoded.trained.tolist()))
    assert "THOUGHT" in first
    assert first.index("THOUGHT") < first.index("SAID") < first.index("add") < first.index("</minimax:tool_call>")
    assert first.endswith("[e~[")
    assert second.index("REFLECTED") < second.index("ANSWER") < second.index("[e~[")
    untrained = tokenizer.decode(encoded.ids[~encoded.trained].tolist())
    assert all(word in untrained for word in ("PROMPT", "ASKED", "RESULT"))
    assert "THANKS" not in tokenizer.decode(encoded.ids.tolist())
    assert encoded.num_turns == 2


@given(trajectories(), st.integers(1, 400))
def test_a_long_trajectory_keeps_its_longest_whole_turns(trajectory: Trajectory, context: int) -> None:
    end = last_trained(trajectory)
    ends = [
        index
        for index in range(1, end + 1)
        if trajectory.messages[index - 1].role == "assistant" and trajectory.trained[index - 1]
    ]
    rendered = {index: chat_format().render(trajectory.messages[:index], trajectory.tools).ids for index in ends}
    fitting = [index for index in ends if len(rendered[index]) <= context]
    encoded = encode(trajectory, chat_format(), context)
    if not ends:
        assert encoded is Note.UNTRAINED
    elif not fitting:
        assert encoded is Note.TOO_LONG
    else:
        assert isinstance(encoded, Encoded)
        assert encoded.ids.tolist() == rendered[fitting[-1]]
        assert encoded.cut == (fitting[-1] != ends[-1])
    dropped = encode(trajectory, chat_format(), context, "drop")
    assert isinstance(dropped, Encoded) == (bool(ends) and fitting == ends)


def test_a_format_that_drops_thinking_trains_the_last_turn() -> None:
    dropping = make_format("minimax_m2", chat_format().tokenizer, drop_thinking=True)
    roles = ("user", "assistant", "user", "assistant", "assistant")
    messages = tuple(
        Message("assistant", f"SAID{index}", thinking="THOUGHT") if role == "assistant" else Message("user", "ASKED")
        for index, role in enumerate(roles)
    )
    for untrained in (1, 3):
        trained = tuple(index != untrained for index in range(5))
        encoded = encode(Trajectory(messages, (), trained, "a:1"), dropping, PLENTY)
        assert isinstance(encoded, Encoded)
        text = dropping.tokenizer.decode(encoded.ids[encoded.trained].tolist())
        assert "SAID1" not in text
        assert ("SAID3" in text) == (untrained != 3)
        assert "SAID4" in text


def test_messages_without_loss_differ_where_thinking_is_dropped() -> None:
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer = with_chat_template(train_tokenizer(["ASKED SAID THOUGHT"], 300, specials), template)
    dropping = make_format("chatml", tokenizer, drop_thinking=True)
    messages = (
        Message("user", "ASKED"),
        Message("assistant", "SAID1"),
        Message("user", "ASKED"),
        Message("assistant", "SAID3", thinking="THOUGHT"),
        Message("user", "ASKED"),
        Message("assistant", "SAID5", thinking="THOUGHT"),
    )
    # The second turn is rewritten; the first, which has no thinking, is as it was sampled but carries no loss.
    trajectory = Trajectory(messages, (), (True, False, True, True, True, True), "a:1")
    encoded = encode(trajectory, dropping, PLENTY)
    assert isinstance(encoded, Encoded)
    text = tokenizer.decode(encoded.ids[encoded.trained].tolist())
    assert text == "<think>\nTHOUGHT\n</think>\n\nSAID5<|im_end|>"


def test_inexpressible_messages_are_refused_with_their_index() -> None:
    messages = (Message("tool", "RESULT", tool_call_id="c1"), Message("assistant", "x"))
    with pytest.raises(Rejection, match=r"a\.jsonl:7") as caught:
        encode(Trajectory(messages, (), (True, True), "a.jsonl:7"), chat_format(), PLENTY)
    assert caught.value.problem is Problem.INEXPRESSIBLE


def test_text_that_is_no_unicode_is_rejected_with_its_place() -> None:
    messages = (Message("user", "\ud800"), Message("assistant", "x"))
    with pytest.raises(Rejection, match=r"a\.jsonl:7"):
        encode(Trajectory(messages, (), (True, True), "a.jsonl:7"), chat_format(), PLENTY)


@given(st.lists(st.booleans()))
def test_spans_are_the_stretches_of_true(flags: list[bool]) -> None:
    rebuilt = [False] * len(flags)
    spans = find_spans(flags)
    for start, stop in spans:
        rebuilt[start:stop] = [True] * (stop - start)
    assert rebuilt == flags
    assert all(stop < start for (_, stop), (start, _) in pairwise(spans))
