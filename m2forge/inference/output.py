"""What `LLM` returns: per prompt an `Output` with its samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from m2forge.gateway.dialects.types import Answer, Ending
from m2forge.protocols import Chunk
from m2forge.records import FinishReason
from m2forge.rollout.engine import merge_chunks
from m2forge.text.message import Message
from m2forge.text.parser import Problem


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a prompt."""

    text: str
    """The sampled text without its end marker or stop text; for a chat, the message's content."""
    token_ids: tuple[int, ...]
    """All sampled tokens, end marker included."""
    logprobs: tuple[float, ...] = field(repr=False)
    """Logprob of each token under the distribution that it was sampled from; 0 if it was the only choice, as always at
    temperature 0."""
    raw_logprobs: tuple[float, ...] = field(repr=False)
    """Logprob of each token under the softmax of the raw logits, whatever the sampling parameters."""
    finish_reason: FinishReason
    stop_text: str | None = None
    """The text of `SamplingParams.stop` that ended it."""
    message: Message | None = None
    """For a chat: the parsed assistant message with thinking, content and tool calls; append it to the messages."""
    problems: tuple[Problem, ...] = ()
    """For a chat: what the parser could not understand, such as a malformed tool call."""


@dataclass(frozen=True, slots=True)
class Output:
    """The completions of one prompt. The properties are those of the first, which is the only one if `n` is 1."""

    prompt_token_ids: tuple[int, ...] = field(repr=False)
    num_cached: int
    """Prompt tokens served from the prefix cache."""
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def message(self) -> Message:
        """The parsed message of a chat."""
        message = self.samples[0].message
        if message is None:
            raise AttributeError("the output of generate has a text and no message; chat parses messages")
        return message

    def __str__(self) -> str:
        return self.text


def make_sample(chunks: Sequence[Chunk], answer: Answer, *, is_chat: bool) -> Sample:
    """`chunks`: all of one completion; `answer`: the same, parsed."""
    whole, completion = merge_chunks(chunks), answer.completion
    assert whole.finish_reason is not None
    return Sample(
        text=completion.content,
        token_ids=tuple(whole.ids.tolist()),
        logprobs=tuple(whole.logprobs.tolist()),
        raw_logprobs=tuple(whole.raw_logprobs.tolist()),
        finish_reason=whole.finish_reason,
        stop_text=answer.stop_text if answer.ending is Ending.STOP_TEXT else None,
        message=completion.message() if is_chat else None,
        problems=completion.problems,
    )
