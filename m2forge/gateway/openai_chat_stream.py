"""A chat completion as server-sent events: `chat.completion.chunk` objects, then `[DONE]`.

For each choice: a chunk with the role, in the order of the choices, because SDKs append choices as they see them; then
deltas of `reasoning_content`, `content` and `tool_calls`, choices interleaved; then one with the finish reason. The
usage comes last, if the client asked for it, in a chunk without choices.

A tool call is sent when it is complete: one that has started may turn out malformed, and a delta cannot be retracted.
Its id and name come first, then all its arguments in a second delta.

The constant part of a request's chunks is encoded once; each delta encodes one small JSON string.
"""

from collections.abc import Sequence

from m2forge.gateway.exchange import Answer, Ask, TokenLogprob, Usage
from m2forge.gateway.openai_body import (
    DONE,
    FINISH_REASONS,
    arguments_text,
    error_body,
    logprobs_body,
    quote,
    usage_body,
)
from m2forge.records import JsonValue
from m2forge.text.completion import CallFinished, ContentDelta, Event, ThinkingDelta
from m2forge.text.message import ToolCall


class ChatStream:
    """Stream of one request; see `exchange.Stream`."""

    def __init__(self, ask: Ask, id: str, created_s: int) -> None:
        same: dict[str, JsonValue] = {
            "id": id,
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": ask.model,
        }
        if "service_tier" in ask.echo:
            same["service_tier"] = ask.echo["service_tier"]
        self._has_usage = bool(ask.echo.get("include_usage"))
        self._has_logprobs = ask.num_top_logprobs is not None
        self._head = f"data: {quote(same)[:-1]}, "
        """Start of every chunk, before its remaining fields."""
        self._deltas = [f'{self._head}"choices": [{{"index": {n}, "delta": {{' for n in range(ask.num_samples)]
        """Start of each choice's chunks, before the delta's fields."""
        self._tail = ', "usage": null}\n\n' if self._has_usage else "}\n\n"
        self._plain_end = f'}}, "logprobs": null, "finish_reason": null}}]{self._tail}'
        """End of a chunk after the delta's fields, without logprobs and finish reason."""
        self._num_calls = [0] * ask.num_samples
        self._has_said = [False] * ask.num_samples

    def begin(self, num_prompt: int, num_cached: int) -> bytes:
        role = '"role": "assistant", "content": null, "refusal": null'
        return "".join(f"{delta}{role}{self._plain_end}" for delta in self._deltas).encode()

    def piece(self, sample: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> bytes:
        start, chunks = self._deltas[sample], []
        # The piece's logprobs go into its first chunk.
        end = self._end(logprobs_body(logprobs), None) if self._has_logprobs and logprobs else self._plain_end
        for event in events:
            match event:
                case ContentDelta(text):
                    self._has_said[sample] = True
                    delta = f'"content": {quote(text)}'
                case ThinkingDelta(text):
                    delta = f'"reasoning_content": {quote(text)}'
                case CallFinished(call):
                    opened, delta = self._call(sample, call)
                    chunks.append(f"{start}{opened}{end}")
                    end = self._plain_end
                case _:
                    continue
            chunks.append(f"{start}{delta}{end}")
            end = self._plain_end
        if end is not self._plain_end:
            chunks.append(f"{start}{end}")
        return "".join(chunks).encode()

    def end_sample(self, sample: int, answer: Answer) -> bytes:
        # Clients that concatenate deltas get null if there were none; an empty completion is an empty string.
        delta = "" if self._has_said[sample] or self._num_calls[sample] else '"content": ""'
        return f"{self._deltas[sample]}{delta}{self._end(None, FINISH_REASONS[answer.ending])}".encode()

    def finish(self, usage: Usage) -> bytes:
        if not self._has_usage:
            return DONE
        return f'{self._head}"choices": [], "usage": {quote(usage_body(usage))}}}\n\n'.encode() + DONE

    def fail(self, status: int, message: str) -> bytes:
        return f"data: {quote(error_body(status, message))}\n\n".encode()

    def _end(self, logprobs: JsonValue, finish_reason: str | None) -> str:
        return f'}}, "logprobs": {quote(logprobs)}, "finish_reason": {quote(finish_reason)}}}]{self._tail}'

    def _call(self, sample: int, call: ToolCall) -> tuple[str, str]:
        """Return the fields of two deltas: id and name, then the arguments."""
        index = self._num_calls[sample]
        self._num_calls[sample] += 1
        opened = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        filled = {"index": index, "function": {"arguments": arguments_text(call)}}
        return f'"tool_calls": [{quote(opened)}]', f'"tool_calls": [{quote(filled)}]'
