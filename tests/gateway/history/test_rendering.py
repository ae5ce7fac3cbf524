"""What formats are shown of a conversation, and what becomes of those that rewrite what they wrote."""

import random
from collections.abc import Sequence

import pytest

from m2forge.errors import FormatError
from m2forge.gateway.history.history import Divergence, History
from m2forge.gateway.history.turn import is_local, keeps_thinking, shows_systems
from m2forge.text.format import ChatFormat, Rendered
from m2forge.text.message import Message, Tool
from tests.gateway.dialogue import (
    FORMATS,
    SYSTEM,
    TEMPLATE,
    USER,
    Dialogue,
    array,
    call,
    chatml,
    minimax,
    read,
    sample,
    tool_loop,
)
from tests.text.draw import TOOLS
from tests.text.own_template import CODER, GLM, QWEN, R1, template_format

BOTH = pytest.mark.parametrize("format", [minimax(), chatml()], ids=list(FORMATS))


@pytest.mark.parametrize(
    "format",
    [minimax(drop_thinking=True), chatml(drop_thinking=True), template_format(QWEN)],
    ids=[*FORMATS, "template"],
)
def test_dropping_old_thinking_branches_once_per_user_message(format: ChatFormat) -> None:
    history = History(format)
    dialogue = tool_loop(format, history, 3)
    assert dialogue.open().divergence is None
    sent = [*dialogue.sent, Message("user", "And b?")]
    opening = history.open(sent, TOOLS)
    assert opening.divergence is Divergence.TEMPLATE
    assert opening.ids.tolist() == format.render(sent, TOOLS, generation=True).ids
    assert opening.num_recorded == len(format.render(sent[:2], TOOLS).ids)
    ids = sample(format, Message("assistant", "", "Once more", (call(query="b"),)), random.Random(0))
    history.record(opening, ids, read(format, ids))
    following = history.open([*sent, read(format, ids).message(), Message("tool", "r")], TOOLS)
    assert following.divergence is None
    assert following.ids[: opening.ids.size + ids.size].tolist() == opening.ids.tolist() + ids.tolist()


def test_a_template_that_rewrites_nothing_continues_its_samples() -> None:
    format = template_format(CODER)
    assert is_local(format)
    dialogue = tool_loop(format, History(format), 3)
    opening = dialogue.open()
    assert (opening.ids.tolist(), opening.divergence) == (dialogue.ids, None)
    assert opening.num_encoded == dialogue.num_new


def test_a_template_that_drops_all_thinking_branches_each_turn() -> None:
    """The generation prompt opens thinking, and no rendered answer has it; sampled tokens stay in their branch."""
    format = template_format(R1)
    history = History(format)
    sent, prompts = [USER], []
    for turn in range(3):
        opening = history.open(sent)
        assert opening.divergence is (Divergence.TEMPLATE if turn else None)
        assert opening.ids.tolist() == format.render(sent, generation=True).ids
        ids = sample(format, Message("assistant", f"a{turn}", "t"), random.Random(turn), ())
        history.record(opening, ids, read(format, ids, tools=()))
        prompts.append(opening.ids.size)
        sent += [read(format, ids, tools=()).message(), Message("user", f"u{turn}")]
    again = history.open(sent[:3])
    assert again.num_encoded == 0
    assert again.ids.size == prompts[1]


def test_an_answer_that_another_stop_token_ended_is_closed() -> None:
    """This template ends an answer by the token that opens the next turn, which a sampler may leave out."""
    format = template_format(GLM)
    history = History(format)
    opening = history.open([USER])
    ids = sample(format, Message("assistant", "a", "t"), random.Random(0), ()).tolist()
    end = format.tokenizer.special("</s>")
    assert end in format.stop_ids
    assert end not in format.closing_ids
    stopped = array([*ids[:-1], end])
    history.record(opening, stopped, read(format, stopped))
    following = history.open([USER, read(format, stopped).message(), Message("user", "b")])
    assert following.divergence is None
    text = format.tokenizer.decode(following.ids.tolist())
    assert text.endswith("a</s><|user|>\nb<|assistant|>")


def test_a_result_joined_to_sent_ones_is_the_templates_fault() -> None:
    format = chatml()
    history = History(format)
    message = Message("assistant", "", "", (call(query="a"), call(query="b")))
    ids = sample(format, message, random.Random(0))
    opening = history.open([USER], TOOLS)
    history.record(opening, ids, read(format, ids))
    sent = [USER, read(format, ids).message(), Message("tool", "1")]
    partial = history.open(sent, TOOLS)
    other = sample(format, Message("assistant", "Waiting"), random.Random(0))
    history.record(partial, other, read(format, other))
    both = history.open([*sent, Message("tool", "2")], TOOLS)
    path = opening.ids.tolist() + ids.tolist()
    assert both.ids[: len(path)].tolist() == path
    assert format.tokenizer.decode(both.ids[len(path) :].tolist()).count("<tool_response>") == 2
    assert both.divergence is Divergence.EDITED_TEXT


NUMBERED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (loop.index | string if m.role == 'user' else '') }}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_only_formats_that_look_no_further_are_shown_less() -> None:
    assert is_local(minimax())
    assert is_local(chatml())
    assert not is_local(chatml(NUMBERED))
    assert not is_local(chatml(TEMPLATE, drop_thinking=True))


def test_what_a_format_passes_over_is_found_out() -> None:
    assert keeps_thinking(minimax())
    assert keeps_thinking(chatml())
    assert not keeps_thinking(minimax(drop_thinking=True))
    assert not keeps_thinking(chatml(TEMPLATE, drop_thinking=True))
    assert shows_systems(chatml(NUMBERED))
    assert not shows_systems(chatml())


def test_a_system_message_that_would_not_be_shown_is_refused() -> None:
    """The template, as many do, writes the first one alone."""
    later = Message("system", "Be long.")
    for sent in ([SYSTEM, USER, later], [USER, later, USER], [SYSTEM, USER, Message("assistant", "a"), later, USER]):
        for tools in ((), TOOLS):
            history = History(chatml())
            with pytest.raises(FormatError, match="only at the beginning"):
                history.open(sent, tools)
            assert not history._beginnings
    shown = chatml(NUMBERED)
    assert "Be long." in shown.tokenizer.decode(History(shown).open([SYSTEM, USER, later, USER]).ids.tolist())


def test_a_template_that_counts_messages_is_shown_them_all() -> None:
    format = chatml(NUMBERED)
    dialogue = Dialogue(format, History(format), [USER], ())
    for number in range(5):
        opening = dialogue.open()
        assert opening.ids.tolist() == dialogue.ids
        dialogue.answer(opening, sample(format, Message("assistant", f"a{number}"), random.Random(number), ()))
        dialogue.say(USER)


def test_an_answer_the_format_cannot_rewrite_is_still_continued() -> None:
    """A model may write what no message can be rendered to, such as a thinking tag at the head of the content."""
    format = chatml()
    history = History(format)
    opening = history.open([USER])
    ids = array([format.tokenizer.special("<think>"), format.tokenizer.special("</think>")] * 2 + list(format.stop_ids))
    completion = read(format, ids)
    history.record(opening, ids, completion)
    with pytest.raises(FormatError):
        format.extend([USER, completion.message()], [USER])
    following = history.open([USER, completion.message(), USER])
    assert following.ids[: opening.ids.size + ids.size].tolist() == [*opening.ids.tolist(), *ids.tolist()]
    assert following.divergence is None


# -- cost -------------------------------------------------------------------------------------------------------------


class Watched:
    """A format that tells how much it was given."""

    def __init__(self, format: ChatFormat) -> None:
        self.format, self.name = format, format.name
        self.tokenizer, self.stop_ids, self.parser = format.tokenizer, format.stop_ids, format.parser
        self.closing_ids = format.closing_ids
        self.num_messages = 0

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = False) -> Rendered:
        return self.extend((), messages, tools, generation=generation)

    def extend(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation: bool = False,
    ) -> Rendered:
        self.num_messages += len(history) + len(new)
        return self.format.extend(history, new, tools, generation=generation)


@BOTH
def test_a_formats_input_does_not_grow_with_the_conversation(format: ChatFormat) -> None:
    watched = Watched(format)
    history = History(watched)
    sent = [SYSTEM, USER]
    given_messages, encoded = [], []
    for turn in range(60):
        before = watched.num_messages
        opening = history.open(sent, TOOLS)
        given_messages.append(watched.num_messages - before)
        encoded.append(opening.num_encoded)
        ids = sample(format, Message("assistant", "Look", "t", (call(query=f"{turn:03}"),)), random.Random(turn))
        history.record(opening, ids, read(format, ids, turn))
        sent += [read(format, ids, turn).message(), Message("tool", "r")]
    assert given_messages[5:] == [4] * 55, "the beginning, the last answer, its result"
    assert len(set(encoded[1:])) == 1
