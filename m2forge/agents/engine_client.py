"""An engine asked directly, in this process and without a gateway; what it was asked and answered is kept as calls."""

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from m2forge.agents.client import Reply
from m2forge.agents.prompt import Prompts
from m2forge.errors import RequestError
from m2forge.protocols import Engine, Prompt
from m2forge.records import Call, FinishReason, Sampling
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool


class EngineClient:
    """See `CompletionClient`."""

    def __init__(
        self,
        engine: Engine,
        format: ChatFormat,
        *,
        context: int,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        """`context`: tokens of prompt and completion together."""
        self._engine, self._format, self._context = engine, format, context
        self._max_tokens, self._sampling = max_tokens or context, sampling or Sampling()
        self._prompts = Prompts(format)
        self.calls: dict[str, Call] = {}
        """By the ids of the answers, in the order in which they ended."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        ids = self._prompts.open(messages, tools)
        room = self._context - len(ids)
        if room < 1:
            raise RequestError(f"{len(ids)} tokens of prompt leave no room in a context of {self._context}")
        prompt = Prompt(
            ids=np.array(ids, np.int32),
            max_tokens=min(self._max_tokens, room),
            sampling=self._sampling,
            stop_ids=self._format.stop_ids,
        )
        call = await self._generate(prompt)
        id = f"answer-{len(self.calls)}"
        parser = self._format.parser(tools)
        parser.feed(self._format.tokenizer.decode_bytes(call.response_ids.tolist()))
        completion = parser.finish()
        named = [replace(made, id=f"{id}-{index}") for index, made in enumerate(completion.tool_calls)]
        message = replace(completion.message(), tool_calls=tuple(named))
        self.calls[id] = call
        self._prompts.record(messages, tools, ids, message, call.response_ids.tolist())
        is_cut = call.finish_reason is not FinishReason.STOP
        return Reply(id, message, is_cut, num_prompt=len(ids), num_sampled=call.response_ids.size)

    async def close(self) -> None:
        """The engine is its owner's."""

    async def _generate(self, prompt: Prompt) -> Call:
        started_s = time.time()
        async with aclosing(self._engine.generate(prompt)) as stream:
            chunks = [chunk async for chunk in stream]
        return Call(
            prompt_ids=prompt.ids,
            response_ids=np.concatenate([chunk.ids for chunk in chunks]),
            logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
            versions=np.concatenate([chunk.versions for chunk in chunks]),
            finish_reason=chunks[-1].finish_reason or FinishReason.ABORT,
            started_s=started_s,
            finished_s=max(time.time(), started_s),
            sampling=prompt.sampling,
        )
