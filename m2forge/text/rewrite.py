"""Finds out whether a chat format rewrites its prefix: probes in, triggers and their cost out.

A conversation grows by messages, and what was rendered or sampled before should stay the prefix of what follows:
engines reuse its KV cache, and a recorded conversation continues its tokens. A chat template may render an earlier
message differently because of a later one: without its thinking once a user's message follows (Qwen3), without the list
of tools that moves to the last user's message (Mistral), without the thinking that the generation prompt opened
(DeepSeek-R1).

Each probe appends messages to a short conversation. A trigger is a probe that the format refuses with `PrefixError`;
its cost is the number of tokens of the conversation before it that the rewritten one no longer begins with.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from m2forge.errors import FormatError, PrefixError
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, RewritePolicy, Tool, ToolCall

_log = logging.getLogger(__name__)

_USER, _SYSTEM = Message("user", "Which files are there?"), Message("system", "Answer briefly.")
# Another text: templates compare messages to find the last one.
_NEXT = Message("user", "And in src?")
_ANSWER = Message("assistant", "There are two files.")
_THOUGHT = Message("assistant", "There are two files.", "I should look first.")
_CALL, _OTHER_CALL = ToolCall("list", {"path": "."}, "probe0001"), ToolCall("list", {"path": "src"}, "probe0002")
_TOOL = Tool("list", "Lists files.", {"type": "object", "properties": {"path": {"type": "string"}}})
_RESULT, _OTHER_RESULT = (
    Message("tool", "a b", tool_call_id=_CALL.id),
    Message("tool", "c", tool_call_id=_OTHER_CALL.id),
)


@dataclass(frozen=True, slots=True)
class Rewrite:
    trigger: str
    """What is appended to what, in words."""
    num_lost: int
    """Number of tokens of the probe's conversation that are rendered differently, or after such a token."""
    num_tokens: int
    """Number of tokens of the probe's conversation."""


def find_rewrites(format: ChatFormat) -> list[Rewrite]:
    found: dict[str, Rewrite] = {}
    for trigger, history, new, tools in _probes():
        # The plainer probes come first: a trigger without thinking includes the one with it.
        if not any(trigger.startswith(known) for known in found) and _is_rewritten(format, history, new, tools):
            found[trigger] = _measure(format, trigger, history, new, tools)
    return list(found.values())


def check_rewrites(format: ChatFormat, policy: RewritePolicy, *, key: str, cost: str) -> None:
    """Logs what it costs that a format rewrites its prefix, or raises FormatError if the policy refuses it. `key`: the
    config key of the policy; `cost`: what a rewrite means for the caller."""
    rewrites = find_rewrites(format)
    if not rewrites:
        return
    listed = "; ".join(f"{one.trigger} ({one.num_lost} of {one.num_tokens} tokens of a probe)" for one in rewrites)
    problem = f"chat format {format.name}: earlier messages are rendered differently after {listed}"
    if policy == "refuse":
        raise FormatError(f'{problem}; {cost}. {key} = "refuse" forbids it: choose another chat format, or "allow"')
    _log.warning('%s; %s. %s = "refuse" would refuse such a format', problem, cost, key)


def _probes() -> Iterator[tuple[str, list[Message], list[Message], list[Tool]]]:
    calling, thoughtful = Message("assistant", "", "", (_CALL,)), Message("assistant", "", "I should look.", (_CALL,))
    thinking = " with thinking"
    offers: list[tuple[list[Tool], str]] = [([], ""), ([_TOOL], " where tools are offered")]
    for tools, where in offers:
        trigger = f"a user's message that follows an answer{where}"
        yield trigger, [_USER, _ANSWER], [_NEXT], tools
        yield f"{trigger}{thinking}", [_USER, _THOUGHT], [_NEXT], tools
        yield f"{trigger} and a system message", [_SYSTEM, _USER, _ANSWER], [_NEXT], tools
    used = "a user's message that follows an answer after tool calls"
    yield used, [_USER, calling, _RESULT, _ANSWER], [_NEXT], [_TOOL]
    yield f"{used}{thinking}", [_USER, thoughtful, _RESULT, _THOUGHT], [_NEXT], [_TOOL]
    result = "tool results that follow their calls"
    yield result, [_USER, calling], [_RESULT], [_TOOL]
    yield f"{result}{thinking}", [_USER, thoughtful], [_RESULT], [_TOOL]
    both = Message("assistant", "", "", (_CALL, _OTHER_CALL))
    yield f"{result}, two at once", [_USER, both], [_RESULT, _OTHER_RESULT], [_TOOL]


def _is_rewritten(
    format: ChatFormat, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
) -> bool:
    try:
        format.extend(history, new, tools, generation=True)
    except PrefixError:
        return True
    except FormatError:
        # The format cannot express the probe at all.
        return False
    return False


def _measure(
    format: ChatFormat, trigger: str, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
) -> Rewrite:
    before = format.extend((), history, tools).ids
    after = format.extend((), [*history, *new], tools, generation=True).ids
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    return Rewrite(trigger, len(before) - num_shared, len(before))
