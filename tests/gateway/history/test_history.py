"""Which tokens a call's messages are: what the model sampled stays, new messages alone are encoded, edits branch."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import FormatError
from m2forge.gateway.history.history import Divergence, History
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool, ToolCall
from tests.gateway.dialogue import (
    FORMATS,
    SYSTEM,
    USER,
    Dialogue,
    array,
    call,
    chatml,
    echo,
    minimax,
    read,
    sample,
    tool_loop,
)
from tests.text.draw import TOOLS, assistants, hostile_text

MARKERS = ("<minimax:tool_call>", "[e~", "<think>", "</think>", "<|im_end|>", "<tool_call>", "</tool_call>")
ANSWERS = assistants(content=MARKERS, thinking=MARKERS, arguments=("</parameter>", "</tool_call>"))
BOTH = pytest.mark.parametrize("format", [minimax(), chatml()], ids=list(FORMATS))


# -- continuing -------------------------------------------------------------------------------------------------------


@st.composite
def openings(draw: st.DrawFn) -> list[Message]:
    messages = [Message("system", draw(hostile_text))] if draw(st.booleans()) else []
    return [*messages, Message("user", draw(hostile_text))]


@BOTH
@given(
    beginning=openings(),
    answers=st.lists(ANSWERS, max_size=5),
    texts=st.lists(hostile_text, min_size=5),
    data=st.data(),
)
def test_a_conversation_keeps_tokens_and_encodes_new_messages(
    format: ChatFormat, beginning: list[Message], answers: list[Message], texts: list[str], data: st.DataObject
) -> None:
    rng = random.Random(data.draw(st.integers(0, 1000)))
    keeps_thinking = data.draw(st.booleans())
    history = History(format, restores_thinking=not keeps_thinking)
    dialogue = Dialogue(format, history, beginning, TOOLS)
    for answer in answers:
        opening = dialogue.open()
        assert opening.ids.tolist() == dialogue.ids
        assert opening.divergence is None
        assert opening.num_encoded == dialogue.num_new
        assert opening.num_recorded == opening.ids.size - opening.num_encoded
        ids = sample(format, answer, rng)
        is_cut = data.draw(st.integers(0, 3)) == 0
        completion = dialogue.answer(opening, ids[: data.draw(st.integers(0, ids.size))] if is_cut else ids)
        dialogue.sent = [
            echo(message, rng, keeps_thinking=keeps_thinking) if message.role == "assistant" else message
            for message in dialogue.said
        ]
        results = [Message("tool", rng.choice(texts)) for _ in completion.tool_calls]
        dialogue.say(*results, *([Message("user", rng.choice(texts))] if not results or rng.random() < 0.3 else []))
    opening = dialogue.open()
    assert opening.ids.tolist() == dialogue.ids
    assert opening.divergence is None


@BOTH
@pytest.mark.parametrize("num_kept", [0, 3, 9, 20])
def test_a_truncated_completion_is_ended_by_the_stop_token_alone(format: ChatFormat, num_kept: int) -> None:
    """Inside the thinking, the content or a call: what was sampled stays, and reads as what the client was sent."""
    history = History(format)
    dialogue = Dialogue(format, history, [USER], TOOLS)
    message = Message("assistant", "Some content", "Some thinking", (call(query="a"),))
    ids = sample(format, message, random.Random(0))[:num_kept]
    opening = dialogue.open()
    completion = dialogue.answer(opening, ids)
    dialogue.say(Message("user", "Go on."))
    following = dialogue.open()
    path = [*opening.ids.tolist(), *ids.tolist(), format.stop_ids[0]]
    assert following.ids[: len(path)].tolist() == path
    assert following.divergence is None
    closed = read(format, array([*ids.tolist(), format.stop_ids[0]]))
    assert (closed.thinking, closed.content, closed.tool_calls) == (completion.thinking, completion.content, ())


@BOTH
def test_a_stop_text_is_sampled_but_not_sent(format: ChatFormat) -> None:
    history = History(format)
    dialogue = Dialogue(format, history, [USER], ())
    ids = sample(format, Message("assistant", "One. END of it"), random.Random(0), ())
    ids = ids[: ids.size // 2 + 3]
    opening = dialogue.open()
    received = replace(read(format, ids, tools=()), content="One. ")
    history.record(opening, ids, received)
    following = history.open([USER, received.message(), USER])
    path = [*opening.ids.tolist(), *ids.tolist(), format.stop_ids[0]]
    assert following.ids[: len(path)].tolist() == path
    assert following.divergence is None


@BOTH
def test_an_inexpressible_conversation_leaves_no_trace(format: ChatFormat) -> None:
    history = History(format)
    dialogue = tool_loop(format, history, 2)
    bad = Message("assistant", "".join(MARKERS))
    with pytest.raises(FormatError):
        history.open([*dialogue.sent, bad, USER], TOOLS)
    assert history._beginnings.keys() == {tuple(tool.name for tool in TOOLS)}
    with pytest.raises(FormatError):
        history.open([bad, USER], [Tool("other")])
    assert history._beginnings.keys() == {tuple(tool.name for tool in TOOLS)}
    opening = dialogue.open()
    assert opening.ids.tolist() == dialogue.ids
    assert opening.divergence is None


# -- several samples, several conversations ---------------------------------------------------------------------------


@BOTH
def test_samples_of_one_prompt_match_by_id_thinking_then_age(format: ChatFormat) -> None:
    history = History(format)
    rng = random.Random(1)
    opening = history.open([USER], TOOLS)
    assert history.open([USER], TOOLS).num_encoded == 0
    made = []
    for number in range(3):
        ids = sample(format, Message("assistant", "Same", f"Thought {number}", (call(query="q"),)), rng)
        completion = read(format, ids, number)
        history.record(history.open([USER], TOOLS), ids, completion)
        made.append((ids, completion.message()))
    result = Message("tool", "r")
    for ids, message in made:
        path = [*opening.ids.tolist(), *ids.tolist()]
        without_thinking = replace(message, thinking="")
        without_ids = replace(message, tool_calls=(replace(message.tool_calls[0], id=""),))
        for sent in (message, without_thinking, without_ids):
            following = history.open([USER, sent, result], TOOLS)
            assert following.ids[: len(path)].tolist() == path
    bare = replace(made[0][1], thinking="", tool_calls=(call(query="q"),))
    latest = [*opening.ids.tolist(), *made[2][0].tolist()]
    assert history.open([USER, bare, Message("tool", "other")], TOOLS).ids[: len(latest)].tolist() == latest


@BOTH
def test_calls_in_flight_at_once_do_not_disturb_each_other(format: ChatFormat) -> None:
    history = History(format)
    dialogue = tool_loop(format, history, 2)
    conversations = [[*dialogue.sent, Message("user", f"Branch {number}")] for number in range(4)]
    opened = [history.open(messages, TOOLS) for messages in conversations]
    kept = [opening.ids.tolist() for opening in opened]
    for number in (2, 0, 3, 1):
        ids = sample(format, Message("assistant", f"Answer {number}"), random.Random(number))
        history.record(opened[number], ids, read(format, ids))
        assert [opening.ids.tolist() for opening in opened] == kept
        messages = [*conversations[number], read(format, ids).message(), USER]
        path = kept[number] + ids.tolist()
        assert history.open(messages, TOOLS).ids[: len(path)].tolist() == path
    with pytest.raises(ValueError, match="read-only"):
        opened[0].ids[0] = 1


@BOTH
def test_a_sub_agent_shares_the_system_prompt_and_is_counted(format: ChatFormat) -> None:
    history = History(format)
    dialogue = tool_loop(format, history, 2)
    opening = history.open([SYSTEM, Message("user", "You are a sub-agent.")], TOOLS)
    assert opening.divergence is Divergence.NEW_CONVERSATION
    assert opening.num_recorded == len(format.render([SYSTEM], TOOLS).ids)
    assert (
        opening.ids.tolist()
        == format.render([SYSTEM, Message("user", "You are a sub-agent.")], TOOLS, generation=True).ids
    )
    assert dialogue.open().divergence is None


# -- where clients change something -----------------------------------------------------------------------------------


@BOTH
def test_thinking_that_is_not_restored_branches_where_missing(format: ChatFormat) -> None:
    history = History(format, restores_thinking=False)
    dialogue = tool_loop(format, history, 3)
    whole = dialogue.open()
    assert whole.divergence is None
    sent = [replace(message, thinking="") if message.role == "assistant" else message for message in dialogue.sent]
    opening = history.open(sent, TOOLS)
    assert opening.divergence is Divergence.DROPPED_THINKING
    assert opening.ids.tolist() == format.render(sent, TOOLS, generation=True).ids
    assert opening.num_recorded == len(format.render(sent[:2], TOOLS).ids)


@BOTH
@given(answers=st.lists(ANSWERS, min_size=1, max_size=4), data=st.data())
def test_an_edit_branches_and_later_answers_keep_their_tokens(
    format: ChatFormat, answers: list[Message], data: st.DataObject
) -> None:
    rng = random.Random(data.draw(st.integers(0, 1000)))
    dialogue = Dialogue(format, History(format), [SYSTEM, USER], TOOLS)
    sampled = {}
    for answer in answers:
        ids = sample(format, answer, rng)
        completion = dialogue.answer(dialogue.open(), ids)
        sampled[len(dialogue.sent) - 1] = ids.tolist()
        dialogue.say(*[Message("tool", "r") for _ in completion.tool_calls], Message("user", "Go on"))
    place = data.draw(st.integers(0, len(dialogue.sent) - 1))
    sent = [echo(message, rng, keeps_thinking=False) for message in dialogue.sent]
    sent[place] = replace(dialogue.said[place], content=dialogue.said[place].content + "EDITED")
    said = [*dialogue.said[:place], sent[place], *dialogue.said[place + 1 :]]
    opening = dialogue.history.open(sent, TOOLS)
    ids = opening.ids.tolist()
    assert opening.divergence is (Divergence.EDITED_TEXT if place <= max(sampled) else None)
    kept = max(end for num_messages, end in dialogue.ends.items() if num_messages <= place)
    assert ids[:kept] == dialogue.ids[:kept]
    assert opening.num_recorded >= kept + sum(len(ids) for index, ids in sampled.items() if index > place)
    assert format.tokenizer.decode(ids) == format.tokenizer.decode(format.render(said, TOOLS, generation=True).ids)
    at = kept
    for index in range(place + 1, len(sent)):
        if index in sampled:
            at = next(at for at in range(at, len(ids)) if ids[at : at + len(sampled[index])] == sampled[index])


@BOTH
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ToolCall("search", {"limit": 1}), ToolCall("search", {"limit": True})),
        (ToolCall("search", {"query": "a"}), ToolCall("search", {"query": "a "})),
        (ToolCall("search", {"tags": ["a", "b"]}), ToolCall("search", {"tags": ["b", "a"]})),
        (ToolCall("search", {"note": None}), ToolCall("search", {})),
        (ToolCall("search", {"exact": False}), ToolCall("stop", {})),
    ],
)
def test_calls_that_differ_as_json_are_edits(format: ChatFormat, one: ToolCall, other: ToolCall) -> None:
    history = History(format)
    message = Message("assistant", "Call", "", (one,))
    ids = sample(format, message, random.Random(0))
    completion = replace(read(format, ids), tool_calls=(one,))
    history.record(history.open([USER], TOOLS), ids, completion)
    same = history.open([USER, completion.message(), Message("tool", "r")], TOOLS)
    assert same.divergence is None
    edited = replace(completion.message(), tool_calls=(other,))
    assert history.open([USER, edited, Message("tool", "r")], TOOLS).divergence is Divergence.EDITED_TEXT


@BOTH
def test_other_tools_are_another_beginning(format: ChatFormat) -> None:
    history = History(format)
    dialogue = tool_loop(format, history, 2)
    renamed = (*TOOLS, Tool("extra", "", {"type": "object"}))
    opening = history.open(dialogue.sent, renamed)
    assert opening.divergence is Divergence.EDITED_TEXT
    head = format.render([SYSTEM, USER], renamed, generation=True).ids
    assert opening.ids[: len(head)].tolist() == head
    same = tuple(Tool(tool.name, tool.description, dict(reversed(list(tool.parameters.items())))) for tool in TOOLS)
    assert dialogue.history.open(dialogue.sent, same).divergence is None


@BOTH
def test_a_truncated_conversation_keeps_tokens_and_thinking(format: ChatFormat) -> None:
    history = History(format)
    dialogue = tool_loop(format, history, 5, drops_thinking=True)
    sent = [*dialogue.sent[:2], *dialogue.sent[-4:]]
    opening = history.open(sent, TOOLS)
    assert opening.divergence is Divergence.TRUNCATED
    said = [*dialogue.said[:2], *dialogue.said[-4:]]
    text = format.tokenizer.decode(format.render(said, TOOLS, generation=True).ids)
    assert format.tokenizer.decode(opening.ids.tolist()) == text
    assert "Think 4" in text
    num_client = len(format.extend(said[:3], said[3:4], TOOLS, generation=True).ids)
    assert opening.num_encoded < opening.ids.size // 2
    assert num_client < opening.num_encoded
    # And goes on from there as any other.
    ids = sample(format, Message("assistant", "Done"), random.Random(3))
    history.record(opening, ids, read(format, ids))
    following = history.open([*sent, read(format, ids).message(), USER], TOOLS)
    assert following.divergence is None
    assert following.ids[: opening.ids.size + ids.size].tolist() == opening.ids.tolist() + ids.tolist()
