"""Parts of a conversation become the messages that they were made of."""

import time

import pytest

from m2forge.gateway.dialects.conversation import REMINDER, Conversation, format_instruction, place_instructions
from m2forge.gateway.dialects.types import READ_DEFAULTS, BadRequestError, Notice, Reading
from m2forge.text.message import Message, ToolCall

HO = Message("assistant", "Ho")
ONE, TWO = ToolCall("look", {"at": 1}, "call_1"), ToolCall("look", {"at": 2}, "call_2")


def answer_calls(conversation: Conversation, *calls: ToolCall) -> None:
    for call in calls:
        conversation.answer_call(call.id, "ok", "")


def test_parts_in_a_row_are_one_turn() -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.say("user", "Hi")
    conversation.think("Hm.")
    conversation.write("Let me ")
    conversation.write("see.")
    conversation.call(ONE)
    conversation.call(TWO)
    assert conversation.ends_with_turn()
    answer_calls(conversation, ONE, TWO)
    assert conversation.messages()[:2] == (
        Message("user", "Hi"),
        Message("assistant", "Let me see.", "Hm.", (ONE, TWO)),
    )


def test_thinking_begins_a_turn() -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.write("One.")
    conversation.think("Hm.")
    conversation.write("Two.")
    assert conversation.messages() == (Message("assistant", "One."), Message("assistant", "Two.", "Hm."))


def test_words_begin_a_turn_where_messages_are_turns() -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.write("One.", begins=True)
    conversation.write("Two.", begins=True)
    conversation.call(ONE)
    conversation.write(" And on.", begins=True)
    answer_calls(conversation, ONE)
    assert conversation.messages()[:2] == (
        Message("assistant", "One."),
        Message("assistant", "Two. And on.", "", (ONE,)),
    )


def test_parts_of_one_answer_are_one_turn_across_results() -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.call(ONE, "a")
    conversation.answer_call("call_1", "1", "")
    conversation.call(TWO, "a")
    conversation.answer_call("call_2", "2", "")
    assert conversation.messages() == (
        Message("assistant", tool_calls=(ONE, TWO)),
        Message("tool", "1", tool_call_id="call_1"),
        Message("tool", "2", tool_call_id="call_2"),
    )


def test_parts_of_different_answers_are_different_turns() -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.write("One.", "a")
    conversation.write("Two.", "b")
    conversation.write("More.", "b", begins=True)
    assert conversation.messages() == (Message("assistant", "One."), Message("assistant", "Two.More."))


def test_without_sources_a_call_after_a_result_is_another_turn() -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.call(ONE)
    conversation.answer_call("call_1", "1", "")
    conversation.call(TWO)
    answer_calls(conversation, TWO)
    assert [message.role for message in conversation.messages()] == ["assistant", "tool", "assistant", "tool"]


def test_results_come_in_the_order_of_their_calls() -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.call(ONE)
    conversation.call(TWO)
    conversation.answer_call("call_2", "2", "")
    conversation.answer_call("call_1", "1", "")
    assert [message.content for message in conversation.messages()[1:]] == ["1", "2"]


def test_a_call_without_its_result_is_refused() -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.call(ONE)
    conversation.call(TWO)
    conversation.answer_call("call_2", "2", "")
    with pytest.raises(BadRequestError, match="'call_1' has no result") as caught:
        conversation.messages("input")
    assert caught.value.field == "input"


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_result_without_its_call_is_refused(is_interrupted: bool) -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.call(ONE)
    if is_interrupted:
        conversation.say("user", "Stop.")
    else:
        conversation.answer_call("call_1", "1", "here")
    with pytest.raises(BadRequestError) as caught:
        conversation.answer_call("call_1", "1", "there")
    assert caught.value.field == "there"


def test_system_messages_in_a_row_are_one() -> None:
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.say("system", "Be brief.")
    conversation.say("system", "Be kind.")
    conversation.say("user", "Hi")
    conversation.say("user", "Ho")
    assert conversation.messages() == (
        Message("system", "Be brief.\n\nBe kind."),
        Message("user", "Hi"),
        Message("user", "Ho"),
    )


def place(*messages: Message, format_instruction: str = "") -> tuple[tuple[Message, ...], tuple[Notice, ...]]:
    reading = Reading(READ_DEFAULTS)
    reading.format_instruction = format_instruction
    return place_instructions(messages, reading), reading.notices


def test_a_later_system_message_is_a_turn_in_its_position() -> None:
    one, two, hi, ho = Message("system", "Be brief."), Message("system", "Be kind."), Message("user", "Hi"), HO
    before, after = place(one, hi), place(one, hi, ho, two)
    assert before == ((one, hi), ())
    assert after == ((one, hi, ho, Message("user", REMINDER.format("Be kind."))), (Notice.SYSTEM_TURN,))
    assert after[0][-1].content == "<system-reminder>\nBe kind.\n</system-reminder>"


def test_an_answers_form_stands_once_in_the_first_message() -> None:
    form = format_instruction({"type": "object"}, "A count")
    assert form.endswith('nothing else (A count):\n{"type": "object"}')
    system, hi = Message("system", "Be brief."), Message("user", "Hi")
    assert place(system, hi, HO, format_instruction=form)[0] == (Message("system", f"Be brief.\n\n{form}"), hi, HO)
    assert place(hi, HO, hi, format_instruction=form)[0] == (Message("user", f"Hi\n\n{form}"), HO, hi)
    assert place(HO, hi, format_instruction=form)[0] == (Message("system", form), HO, hi)


@pytest.mark.slow
def test_the_most_system_messages_of_a_body_are_placed_in_time() -> None:
    messages = [Message("system", "Be brief.")] * 150_000
    started_s = time.process_time()
    (joined,), _ = place(*messages)
    assert len(joined.content) == 150_000 * 11 - 2
    assert len(place(Message("user", "Hi"), *messages)[0]) == 150_001
    assert time.process_time() - started_s < 5


def test_as_many_results_as_a_body_holds_are_read_in_time() -> None:
    started_s = time.process_time()
    conversation = Conversation(Reading(READ_DEFAULTS))
    conversation.say("user", "x")
    for number in range(40_000):
        conversation.call(ToolCall("f", {}, f"c{number}"))
    for number in range(40_000):
        conversation.answer_call(f"c{number}", "", "place")
    assert len(conversation.messages()) == 40_002
    assert time.process_time() - started_s < 5
