"""One step of an episode as the rules see it: the parsed completion, why it ended, and what it answered."""

from collections.abc import Sequence
from dataclasses import dataclass

from m2forge.records import Call, Episode, FinishReason
from m2forge.text.completion import Completion
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool


@dataclass(frozen=True, slots=True)
class Step:
    completion: Completion
    finish_reason: FinishReason
    context: tuple[Message, ...] = ()
    """The messages that the completion answers: what it may quote, and whose language it should keep."""


def read_step(call: Call, format: ChatFormat, tools: Sequence[Tool] = (), context: Sequence[Message] = ()) -> Step:
    """The step of a recorded call; `tools` are those that were offered in it."""
    ids = call.response_ids
    # Networks know a few more ids than their tokenizers; these have no text, as the gateway has it too.
    known = ids[ids < format.tokenizer.vocab_size]
    parser = format.parser(tools)
    parser.feed(format.tokenizer.decode_bytes(known.tolist()))
    return Step(parser.finish(), call.finish_reason, tuple(context))


def episode_time_s(episode: Episode) -> float:
    """Wall clock from the first request to the last answer: what ran in parallel counts once. 0 without calls."""
    if not episode.calls:
        return 0.0
    return max(call.finished_s for call in episode.calls) - min(call.started_s for call in episode.calls)
