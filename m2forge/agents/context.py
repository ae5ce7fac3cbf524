"""One conversation of an agent: its messages, and the log of every change to them.

Only the methods here change the messages, and each logs its change. So replaying a log gives the messages of each call.
"""

import json
from collections.abc import Sequence

from m2forge.agents.client import CompletionClient, Reply
from m2forge.agents.log import Appended, Applied, Called, LogEntry, Opened
from m2forge.agents.operation import Inputs, Operation, View
from m2forge.agents.turns import check_operation
from m2forge.text.message import Message, Tool, tool_to_openai

TOKENS_PER_CHAR = 0.35
"""Estimate used until the first call's usage gives the real ratio."""


class Context:
    def __init__(
        self,
        name: str,
        tools: Sequence[Tool],
        client: CompletionClient,
        log: list[LogEntry],
        *,
        max_tokens: int,
    ) -> None:
        """`log`: shared by all conversations of one attempt. `max_tokens`: context length of the policy."""
        self.name, self.tools = name, tuple(tools)
        self.messages: tuple[Message, ...] = ()
        self._client, self._log, self._max_tokens = client, log, max_tokens
        self._num_tool_chars = sum(len(json.dumps(tool_to_openai(tool))) for tool in tools)
        self._tokens_per_char = TOKENS_PER_CHAR
        log.append(Opened(name, self.tools))

    def append(self, *messages: Message) -> None:
        self._log.append(Appended(self.name, messages))
        self.messages += messages

    async def ask(self) -> Reply:
        """Request a completion and append it to the conversation."""
        reply = await self._ask(())
        self._log.append(Called(self.name, reply.id, reply.message))
        self.messages += (reply.message,)
        return reply

    async def ask_aside(self, suffix: Sequence[Message]) -> Reply:
        """Request a completion of the conversation plus `suffix`; the conversation keeps neither."""
        reply = await self._ask(suffix)
        self._log.append(Called(self.name, reply.id, reply.message, tuple(suffix), is_kept=False))
        return reply

    def apply(self, operation: Operation, inputs: Inputs) -> None:
        changed = operation.apply(self.messages, inputs)
        check_operation(operation.name, self.messages, changed)
        self._log.append(Applied(self.name, operation.name, operation.parameters, inputs))
        self.messages = changed

    def view(self) -> View:
        num_tokens = round(self._num_chars(self.messages) * self._tokens_per_char)
        return View(self.messages, num_tokens, self._max_tokens, self._tokens_per_char)

    async def _ask(self, suffix: Sequence[Message]) -> Reply:
        messages = (*self.messages, *suffix)
        reply = await self._client.complete(messages, self.tools)
        if reply.num_prompt:
            self._tokens_per_char = reply.num_prompt / max(self._num_chars(messages), 1)
        return reply

    def _num_chars(self, messages: Sequence[Message]) -> int:
        return self._num_tool_chars + sum(map(_num_chars, messages))


def _num_chars(message: Message) -> int:
    calls = sum(len(call.name) + len(json.dumps(call.arguments)) for call in message.tool_calls)
    return len(message.content) + len(message.thinking) + calls
