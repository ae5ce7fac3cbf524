"""One step of an episode as rules receive it: the parsed completion, its finish reason, and its context messages."""

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
    """The prompt's messages, which the completion may quote and whose language it should keep."""


def read_step(call: Call, format: ChatFormat, tools: Sequence[Tool] = (), context: Sequence[Message] = ()) -> Step:
    """Parse the step of a recorded call; `tools` are those offered in its request."""
    ids = call.response_ids
    # A model's vocabulary may exceed its tokenizer's; these ids have no text, as in the gateway.
    known = ids[ids < format.tokenizer.vocab_size]
    parser = format.parser(tools)
    parser.feed(format.tokenizer.decode_bytes(known.tolist()))
    return Step(parser.finish(), call.finish_reason, tuple(context))


def episode_time_s(episode: Episode) -> float:
    """Wall-clock time from the first request to the last response, so parallel calls count once; 0 without calls."""
    if not episode.calls:
        return 0.0
    return max(call.finished_s for call in episode.calls) - min(call.started_s for call in episode.calls)
