"""The tokens of a conversation, worked out plainly: what the policy wrote as it sampled it, the rest rendered.

    ids = prompts.open(messages, tools)
    prompts.record(messages, tools, ids, answer, response_ids)

The ids are those of the longest recorded conversation that the messages begin with, the prompt and the answer of one
call, followed by the rest as the chat format appends it; other answers of the policy in it keep their sampled tokens.
Where the format cannot append (its template would write earlier messages otherwise), the rest is rendered after the
nearest recorded answer from which it can, or from the beginning.

This is what a gateway does by other means and for any client; here it serves to check it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from m2forge.errors import FormatError
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool, message_to_openai, tool_to_openai


@dataclass(slots=True)
class _Node:
    """A conversation, up to one message."""

    ids: list[int] | None = None
    """Where the message is an answer of the policy: all tokens up to its end."""
    children: dict[str, "_Node"] = field(default_factory=dict)


class Prompts:
    def __init__(self, format: ChatFormat) -> None:
        self._format = format
        self._beginnings: dict[str, _Node] = {}
        """By their tools."""
        self._answers: dict[str, list[int]] = {}
        """Tokens of each answer, ended where it was cut off."""

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        known = list(self._known(messages, tools))
        depth, ids = known[-1]
        try:
            return ids + self._spliced(messages, depth, tools)
        except FormatError:
            for depth, ids in reversed(known):
                try:
                    added = self._format.extend(messages[:depth], messages[depth:], tools, generation=True)
                except FormatError:
                    if not depth:
                        raise
                else:
                    return ids + added.ids
            raise

    def record(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        prompt_ids: Sequence[int],
        answer: Message,
        response_ids: Sequence[int],
    ) -> None:
        ended = list(response_ids)
        if not ended or ended[-1] not in self._format.stop_ids:
            ended.append(self._format.stop_ids[0])
        node = self._beginnings.setdefault(_tools_key(tools), _Node())
        for message in (*messages, answer):
            node = node.children.setdefault(_key(message), _Node())
        node.ids = [*prompt_ids, *ended]
        self._answers[_key(answer)] = ended

    def _known(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[tuple[int, list[int]]]:
        """After how many messages it is known which tokens they are, and these."""
        yield 0, []
        node = self._beginnings.get(_tools_key(tools))
        for index, message in enumerate(messages):
            node = None if node is None else node.children.get(_key(message))
            if node is None:
                return
            if node.ids is not None:
                yield index + 1, node.ids

    def _spliced(self, messages: Sequence[Message], start: int, tools: Sequence[Tool]) -> list[int]:
        """The ids after `start` messages: sampled where the policy wrote a message, else rendered."""
        ids: list[int] = []
        for index in range(start, len(messages)):
            sampled = self._answers.get(_key(messages[index])) if messages[index].role == "assistant" else None
            if sampled is not None:
                ids += self._format.extend(messages[:start], messages[start:index], tools, generation=True).ids
                ids += sampled
                start = index + 1
        return ids + self._format.extend(messages[:start], messages[start:], tools, generation=True).ids


def _key(message: Message) -> str:
    return json.dumps(message_to_openai(message), sort_keys=True)


def _tools_key(tools: Sequence[Tool]) -> str:
    return json.dumps([tool_to_openai(tool) for tool in tools], sort_keys=True)
