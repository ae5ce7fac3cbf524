"""Why calls do not simply continue: each change that agents make has its class."""

import random
from collections.abc import Callable, Sequence

import pytest

from m2forge.gateway.history.history import Divergence, History
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message
from tests.gateway.dialogue import FORMATS, USER, chatml, minimax, read, sample, tool_loop
from tests.text.draw import TOOLS

BOTH = pytest.mark.parametrize("format", [minimax(), chatml()], ids=list(FORMATS))


def dropped(messages: Sequence[Message], first: int, last: int, *instead: Message) -> list[Message]:
    return [*messages[:first], *instead, *messages[last:]]


SUMMARY = Message("user", "What happened so far: much.")


@BOTH
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda sent: dropped(sent, 2, 6), Divergence.TRUNCATED),
        (lambda sent: dropped(sent, 1, 4), Divergence.TRUNCATED),
        (lambda sent: dropped(sent, 4, 8), Divergence.TRUNCATED),
        (lambda sent: dropped(sent, 0, 1), Divergence.TRUNCATED),
        (lambda sent: dropped(sent, 2, 8, SUMMARY), Divergence.SUMMARISED),
        (lambda sent: dropped(sent, 2, 12, SUMMARY), Divergence.SUMMARISED),
        (lambda sent: dropped(sent, 4, 12, SUMMARY), Divergence.SUMMARISED),
        (lambda sent: dropped(sent, 1, 12, SUMMARY), Divergence.NEW_CONVERSATION),
        (lambda sent: dropped(sent, 0, 12, SUMMARY), Divergence.NEW_CONVERSATION),
        (lambda sent: dropped(sent, 0, 1, Message("system", "Be long.")), Divergence.EDITED_TEXT),
        (lambda sent: dropped(sent, 3, 4, Message("tool", "(omitted)")), Divergence.EDITED_TEXT),
        (lambda sent: dropped(sent, 10, 11, Message("assistant", "I never said so.")), Divergence.EDITED_TEXT),
        (lambda sent: dropped(sent, 11, 12, Message("tool", "Another result")), Divergence.EDITED_TEXT),
        (lambda sent: sent, None),
        (lambda sent: sent[:8], None),
        (lambda sent: [*sent, Message("assistant", "Enough"), SUMMARY], None),
        (lambda sent: [*sent, SUMMARY], Divergence.EDITED_TEXT),
    ],
)
def test_changes_are_classed(
    format: ChatFormat, change: Callable[[list[Message]], list[Message]], expected: Divergence | None
) -> None:
    history = History(format)
    dialogue = tool_loop(format, history, 5)
    ids = sample(format, Message("assistant", "Enough"), random.Random(0))
    history.record(dialogue.open(), ids, read(format, ids))
    assert len(dialogue.sent) == 12
    sent = change(dialogue.sent)
    if sent[10:11] == [Message("assistant", "I never said so.")]:
        sent[11] = USER
    assert history.open(sent, TOOLS).divergence is expected


@BOTH
def test_few_shot_examples_are_no_answers_of_the_model(format: ChatFormat) -> None:
    """Conversations that begin with the same made-up answers are still different conversations."""
    history = History(format)
    shots = [USER, Message("assistant", "Like this."), USER, Message("assistant", "And this.")]
    opening = history.open([*shots, Message("user", "One")])
    assert opening.divergence is None
    ids = sample(format, Message("assistant", "Answer"), random.Random(0), ())
    history.record(opening, ids, read(format, ids, tools=()))
    assert history.open([*shots, Message("user", "Two")]).divergence is Divergence.NEW_CONVERSATION


@BOTH
def test_only_answered_calls_are_diverged_from(format: ChatFormat) -> None:
    """A prompt that failed in the engine was never part of what is recorded."""
    history = History(format)
    dialogue = tool_loop(format, history, 2)
    history.open([*dialogue.sent, Message("user", "Never answered")], TOOLS)
    assert history.open([*dialogue.sent, Message("user", "Asked instead")], TOOLS).divergence is None


@BOTH
def test_a_sliding_window_is_truncated_once_and_then_goes_on(format: ChatFormat) -> None:
    history = History(format)
    dialogue = tool_loop(format, history, 4)
    sent = [*dialogue.sent[:2], *dialogue.sent[6:]]
    for turn in range(3):
        opening = history.open(sent, TOOLS)
        assert opening.divergence is (Divergence.TRUNCATED if turn == 0 else None)
        ids = sample(format, Message("assistant", f"More {turn}"), random.Random(turn))
        history.record(opening, ids, read(format, ids))
        sent += [read(format, ids).message(), Message("user", f"Next {turn}")]
    assert history.open([*sent[:2], *sent[4:]], TOOLS).divergence is Divergence.TRUNCATED
