"""Resends a recorded response: what the journal stores for it, and the encoding.

A reply stores what tokens and completion do not contain: the creation time, the usage counts, and how each sample
ended. A resent response has the id, text, tool calls and logprobs of the original; streamed, each part is one piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict, cast

from m2forge.gateway.entry import Answered
from m2forge.gateway.exchange import Answer, Ask, Ending, Stream, TokenLogprob, Usage
from m2forge.gateway.sample import text_of
from m2forge.records import JsonValue
from m2forge.text.completion import CallFinished, Completion, ContentDelta, Event, ThinkingDelta
from m2forge.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reply:
    """Everything that a dialect needs to encode a response."""

    id: str
    created_s: int
    answers: tuple[Answer, ...]
    usage: Usage


class _Told(TypedDict):
    """A reply in the journal."""

    created_s: int
    usage: tuple[int, int, int, int]
    endings: list[tuple[str, str | None]]


def write_reply(reply: Reply) -> dict[str, JsonValue]:
    usage = reply.usage
    return {
        "created_s": reply.created_s,
        "usage": [usage.num_prompt, usage.num_cached, usage.num_sampled, usage.num_thinking],
        "endings": [[answer.ending, answer.stop_text] for answer in reply.answers],
    }


def read_reply(recorded: Answered, ask: Ask, tokenizer: Tokenizer) -> Reply:
    told = cast("_Told", recorded.reply)
    answers = []
    for sample, (ending, stop_text) in zip(recorded.samples, told["endings"], strict=True):
        logprobs: tuple[TokenLogprob, ...] = ()
        if ask.num_top_logprobs is not None:
            drawn = zip(sample.response_ids.tolist(), sample.logprobs.tolist(), strict=True)
            logprobs = tuple(TokenLogprob(text_of(tokenizer, id), logprob, id) for id, logprob in drawn)
        answers.append(Answer(sample.completion, Ending(ending), stop_text, logprobs))
    return Reply(recorded.id, told["created_s"], tuple(answers), Usage(*told["usage"]))


def play(stream: Stream, reply: Reply) -> bytes:
    """Encode the whole stream of a response."""
    told = [stream.begin(reply.usage.num_prompt, reply.usage.num_cached)]
    for sample, answer in enumerate(reply.answers):
        told.append(stream.piece(sample, list(_events(answer.completion)), answer.logprobs))
    told += [stream.end_sample(sample, answer) for sample, answer in enumerate(reply.answers)]
    return b"".join([*told, stream.finish(reply.usage)])


def _events(completion: Completion) -> Iterator[Event]:
    if completion.thinking:
        yield ThinkingDelta(completion.thinking)
    if completion.content:
        yield ContentDelta(completion.content)
    yield from map(CallFinished, completion.tool_calls)
