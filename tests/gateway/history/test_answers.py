"""Which answer a message is, where several read the same; and prompts that are given up."""

import random
from dataclasses import replace

import pytest

from m2forge.gateway.history.history import Divergence, History, Opening
from m2forge.gateway.history.turn import Turn
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool
from tests.gateway.dialogue import FORMATS, USER, call, chatml, minimax, read, sample, tool_loop
from tests.text.draw import TOOLS

BOTH = pytest.mark.parametrize("format", [minimax(), chatml()], ids=list(FORMATS))


def answer(
    history: History, format: ChatFormat, sent: list[Message], said: Message, number: int
) -> tuple[Opening, Message]:
    """One call, answered in tokens that no other answer has: its prompt, and what the client was told."""
    opening = history.open(sent, TOOLS)
    ids = sample(format, said, random.Random(number))
    completion = read(format, ids, number)
    history.record(opening, ids, completion)
    history.release(opening)
    return opening, completion.message()


@pytest.mark.slow
@BOTH
def test_work_for_an_edited_conversation_is_linear_in_its_length(
    format: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call rewrites the system's message, as agents with a clock do, and the model says the same each time."""
    num_looks = [0]
    echo, below = Turn.echo, Turn.is_below

    def count_echo(self: Turn, message: Message) -> object:
        num_looks[0] += 1
        return echo(self, message)

    def count_below(self: Turn, other: Turn) -> bool:
        num_looks[0] += self.depth - other.depth
        return below(self, other)

    monkeypatch.setattr(Turn, "echo", count_echo)
    monkeypatch.setattr(Turn, "is_below", count_below)
    history, messages, looks = History(format), [], []
    for number in range(61):
        messages.append(Message("user", f"u{number}"))
        before = num_looks[0]
        opening, received = answer(
            history, format, [Message("system", f"step {number}"), *messages], Message("assistant", "ok", "t"), number
        )
        looks.append(num_looks[0] - before)
        assert opening.divergence is (Divergence.EDITED_TEXT if number else None)
        messages.append(received)
    assert looks[60] < 2.2 * looks[30]
    assert looks[60] < 10 * 60


@BOTH
def test_equal_answers_keep_their_tokens_in_an_edited_history(format: ChatFormat) -> None:
    history, messages, sampled = History(format), [], []
    for number in range(6):
        messages.append(Message("user", "Go on."))
        opening = history.open(messages, TOOLS)
        ids = sample(format, Message("assistant", "The same words. " * 8, "The same thoughts."), random.Random(number))
        history.record(opening, ids, read(format, ids))
        sampled.append(ids.tolist())
        messages.append(read(format, ids).message())
    assert len({tuple(ids) for ids in sampled}) == 6
    for sent in ([Message("system", "Now."), *messages, USER], [replace(USER, content="Other"), *messages[1:], USER]):
        ids, at = history.open(sent, TOOLS).ids.tolist(), 0
        for each in sampled:
            at = next(at for at in range(at, len(ids)) if ids[at : at + len(each)] == each) + len(each)


@BOTH
def test_the_ids_of_calls_say_which_answer_it_is(format: ChatFormat) -> None:
    """In another place than any of those that read the same; where one stands already, that one is followed."""
    history = History(format)
    said = Message("assistant", "Look", "t", (call(query="q"),))
    received = [answer(history, format, [Message("user", f"Place {number}")], said, number)[1] for number in range(80)]
    for number in (0, 40, 79):
        opening = history.open([USER, received[number], Message("tool", "r")], TOOLS)
        history.release(opening)
        own, ids = sample(format, said, random.Random(number)).tolist(), opening.ids.tolist()
        assert any(ids[at : at + len(own)] == own for at in range(len(ids)))


# -- given up ---------------------------------------------------------------------------------------------------------


def num_turns(history: History) -> int:
    """All that a history holds."""
    ahead = [root for roots in history._beginnings.values() for _, root in roots]
    count = 0
    while ahead:
        turn = ahead.pop()
        count += 1
        ahead += [child for same in turn.children.values() for child in same]
    return count


@BOTH
def test_of_a_prompt_that_is_given_up_nothing_stays(format: ChatFormat) -> None:
    history = History(format)
    for number in range(3):
        opening = history.open([Message("system", f"s{number}"), USER], [*TOOLS, Tool(f"extra{number}")])
        history.release(opening)
    assert not history._beginnings
    assert not history._tools_of
    dialogue = tool_loop(format, history, 2)
    known = num_turns(history)
    for sent in ([*dialogue.sent, USER], [replace(USER, content="Edited"), *dialogue.sent[1:]], dialogue.sent[:1]):
        history.release(history.open(sent, TOOLS))
        assert num_turns(history) == known
    opening = dialogue.open()
    assert num_turns(history) == known + 1, "the result that is not answered yet"
    assert opening.ids.tolist() == dialogue.ids


@BOTH
def test_what_others_need_stays(format: ChatFormat) -> None:
    history = History(format)
    first, second = history.open([USER], TOOLS), history.open([USER], TOOLS)
    longer = history.open([USER, Message("assistant", "Made up."), USER], TOOLS)
    history.release(first)
    ids = sample(format, Message("assistant", "ok", "t"), random.Random(0))
    history.record(second, ids, read(format, ids))
    history.release(second)
    history.record(longer, ids, read(format, ids))
    history.release(longer)
    for opening, before in ((second, []), (longer, [USER, Message("assistant", "Made up.")])):
        sent = [*before, USER, read(format, ids).message(), Message("user", "On")]
        following = history.open(sent, TOOLS)
        assert following.divergence is None
        assert following.num_recorded >= opening.ids.size + ids.size
