"""Anthropic Messages, the conversation: reads system and messages into a `Conversation`, or raises `AskError`.

    user        text, tool_result
    assistant   text, thinking, tool_use; consecutive messages are one turn, as at the vendor
    system      text

A result with `is_error` gets the prefix `Error: `, because chat templates show the model no flag. Signatures of
thinking blocks are not verified: comparing the thinking with the recorded one shows whether it was sampled here. If a
block's thinking is empty, it is read from the signature, provided it is one of ours (`seal.py`).

`cache_control` is allowed anywhere, because it cannot change the response. Images, documents, citations, blocks of the
vendor's server-side tools, and redacted thinking are refused: the model cannot read them.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from m2forge.gateway.conversation import Conversation
from m2forge.gateway.exchange import AskError
from m2forge.gateway.reading import Fields, read_list, read_object, read_text, refuse_value, shown
from m2forge.gateway.seal import unseal
from m2forge.records import JsonValue
from m2forge.text.message import ToolCall

TEXT_FIELDS = frozenset({"type", "text", "cache_control", "citations"})
THINKING_FIELDS = frozenset({"type", "thinking", "signature"})
USE_FIELDS = frozenset({"type", "id", "name", "input", "cache_control", "caller", "toolset_name"})
RESULT_FIELDS = frozenset({"type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"})


def read_conversation(fields: Fields) -> Conversation:
    conversation = Conversation()
    if fields.has("system"):
        conversation.say("system", _text(fields.value("system"), "system"))
    values = read_list(fields.value("messages"), "messages")
    if not values:
        raise AskError("messages: expected at least one message, received none", "messages")
    for index, value in enumerate(values):
        message = Fields(value, {"role", "content"}, f"messages[{index}]")
        role, place = message.choice("role", ("user", "assistant", "system")), message.path("content")
        content = message.value("content")
        if role == "assistant":
            _read_assistant(conversation, content, place)
        elif role == "user":
            _read_user(conversation, content, place)
        elif role == "system":
            conversation.say("system", _text(content, place))
        else:
            refuse_value(message.path("role"), "'user', 'assistant' or 'system'", None)
    return conversation


def check_cache_control(fields: Fields) -> None:
    control = fields.object("cache_control", {"type", "ttl", "scope"})
    if control is not None:
        control.choice("type", ("ephemeral",))
        control.choice("ttl", ("5m", "1h"))


def _read_user(conversation: Conversation, content: JsonValue, place: str) -> None:
    """Consecutive text blocks become one message."""
    if isinstance(content, str):
        conversation.say("user", content)
        return
    texts: list[str] = []
    blocks = read_list(content, place)
    for index, value in enumerate(blocks):
        block, at = read_object(value, f"{place}[{index}]"), f"{place}[{index}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(_text_block(block, at))
            continue
        if kind != "tool_result":
            _refuse_block(kind, at, "text or tool_result")
        if texts:
            conversation.say("user", "".join(texts))
            texts.clear()
        _read_result(conversation, block, at)
    if texts or not blocks:
        conversation.say("user", "".join(texts))


def _read_result(conversation: Conversation, block: Mapping[str, JsonValue], place: str) -> None:
    fields = Fields(block, RESULT_FIELDS, place)
    check_cache_control(fields)
    _check_toolset(fields)
    content = _text(fields.value("content"), f"{place}.content") if fields.has("content") else ""
    if fields.boolean("is_error") and not content.lower().startswith("error"):
        content = f"Error: {content}" if content else "Error"
    conversation.answer_call(fields.required_text("tool_use_id"), content, place)


def _read_assistant(conversation: Conversation, content: JsonValue, place: str) -> None:
    conversation.begin_turn()
    if isinstance(content, str):
        conversation.write(content)
        return
    for index, value in enumerate(read_list(content, place)):
        block, at = read_object(value, f"{place}[{index}]"), f"{place}[{index}]"
        kind = block.get("type")
        if kind == "text":
            conversation.write(_text_block(block, at))
        elif kind == "thinking":
            conversation.think(_thinking(block, at))
        elif kind == "tool_use":
            conversation.call(_call(block, at))
        elif kind == "redacted_thinking":
            raise AskError(f"{at}: redacted thinking cannot be read by this model; leave it out", at)
        else:
            _refuse_block(kind, at, "text, thinking or tool_use")


def _thinking(block: Mapping[str, JsonValue], place: str) -> str:
    fields = Fields(block, THINKING_FIELDS, place)
    thinking, signature = read_text(fields.value("thinking"), f"{place}.thinking"), fields.text("signature") or ""
    sealed = "" if thinking or not signature else unseal(signature)
    if sealed is None:
        fields.refuse("thinking", "is empty, and the signature is none that this model can read; leave the block out")
    return thinking or sealed


def _call(block: Mapping[str, JsonValue], place: str) -> ToolCall:
    fields = Fields(block, USE_FIELDS, place)
    check_cache_control(fields)
    _check_toolset(fields)
    caller = fields.object("caller", {"type", "tool_id"})
    if caller is not None and caller.value("type") != "direct":
        caller.refuse("type", "only the model calls tools here; leave it out or say 'direct'")
    arguments = read_object(fields.value("input"), f"{place}.input")
    return ToolCall(fields.required_text("name"), arguments, fields.required_text("id"))


def _check_toolset(fields: Fields) -> None:
    if fields.has("toolset_name"):
        fields.refuse("toolset_name", "there are no toolsets here; leave it out")


def _text(value: JsonValue, place: str) -> str:
    """Return a string as it is, or the joined texts of a list of text blocks."""
    if isinstance(value, str):
        return value
    texts = []
    if not isinstance(value, Sequence):
        refuse_value(place, "text or a list of text blocks", value)
    for index, item in enumerate(value):
        block, at = read_object(item, f"{place}[{index}]"), f"{place}[{index}]"
        if block.get("type") != "text":
            _refuse_block(block.get("type"), at, "text")
        texts.append(_text_block(block, at))
    return "".join(texts)


def _text_block(block: Mapping[str, JsonValue], place: str) -> str:
    fields = Fields(block, TEXT_FIELDS, place)
    check_cache_control(fields)
    if fields.items("citations"):
        fields.refuse("citations", "the model is shown no citations; leave them out")
    return read_text(fields.value("text"), f"{place}.text")


def _refuse_block(kind: JsonValue, place: str, expected: str) -> NoReturn:
    path = f"{place}.type"
    raise AskError(f"{path}: expected {expected}, received {shown(kind)}; the model reads text alone", path)
