"""Trajectory in, token ids and loss mask out, through a chat format.

Thinking stays where it occurred, between the actions. The loss covers the tokens that the assistant would have sampled
in the trained messages (thinking, content, tool calls, end marker) and nothing else. Messages after the last trained
one are dropped. A trajectory longer than the context keeps its leading whole turns: it ends after a trained assistant
message, never within one, and its ids are exactly the rendering of the remaining messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from m2forge.errors import DataError, FormatError
from m2forge.records import IntArray
from m2forge.sft.report import Note, Problem, Rejection
from m2forge.sft.trajectory import Trajectory
from m2forge.text.format import ChatFormat, Rendered

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One document to train on."""

    ids: IntArray
    trained: BoolArray
    """Loss mask: one per id, whether it is a target of the loss."""
    num_turns: int
    """Assistant messages that remain."""
    cut: bool
    """Whether trained messages were dropped because the trajectory is too long."""


def encode(
    trajectory: Trajectory, chat_format: ChatFormat, context: int, too_long: Literal["cut", "drop"] = "cut"
) -> Encoded | Note:
    """The document, or why there is none. Raises `Rejection` for messages that the chat format cannot express."""
    ends = [
        index + 1
        for index, message in enumerate(trajectory.messages)
        if message.role == "assistant" and trajectory.trained[index]
    ]
    if not ends:
        return Note.UNTRAINED
    try:
        rendered = _render(trajectory, chat_format, ends[-1])
        end = ends[-1]
        if len(rendered.ids) > context:
            if too_long == "drop":
                return Note.TOO_LONG
            fitting = _cut(trajectory, chat_format, rendered, ends, context)
            if fitting is None:
                return Note.TOO_LONG
            end, rendered = fitting
        trained = _mask(trajectory, rendered, end)
    except (FormatError, DataError) as error:
        raise Rejection(Problem.INEXPRESSIBLE, trajectory.source, str(error)) from error
    if not trained[1:].any():
        return Note.UNTRAINED
    num_turns = sum(message.role == "assistant" for message in trajectory.messages[:end])
    return Encoded(np.asarray(rendered.ids, np.int32), trained, num_turns, cut=end != ends[-1])


def _render(trajectory: Trajectory, chat_format: ChatFormat, end: int) -> Rendered:
    return chat_format.render(trajectory.messages[:end], trajectory.tools)


def _cut(
    trajectory: Trajectory, chat_format: ChatFormat, full: Rendered, ends: Sequence[int], context: int
) -> tuple[int, Rendered] | None:
    """The longest prefix that fits and ends with a trained message."""
    is_assistant = [message.role == "assistant" for message in trajectory.messages[: ends[-1]]]
    spans = find_spans(full.trained)
    if len(spans) == sum(is_assistant):
        # The end of each assistant message in the full rendering rules out most prefixes that are too long.
        num_fitting = sum(stop <= context for _, stop in spans)
        ends = [end for end in ends if sum(is_assistant[:end]) <= num_fitting]
    for end in reversed(ends):
        rendered = _render(trajectory, chat_format, end)
        if len(rendered.ids) <= context:
            return end, rendered
    return None


def _mask(trajectory: Trajectory, rendered: Rendered, end: int) -> BoolArray:
    """The assistant's tokens, except those of messages without loss."""
    mask = np.asarray(rendered.trained, np.bool_)
    flags = [
        trained
        for message, trained in zip(trajectory.messages[:end], trajectory.trained[:end], strict=True)
        if message.role == "assistant"
    ]
    if all(flags):
        return mask
    spans = find_spans(rendered.trained)
    if len(spans) > len(flags):
        raise FormatError(
            f"{len(flags)} assistant messages are rendered as {len(spans)} stretches of sampled tokens, so those "
            "without loss cannot be distinguished from the others; train all messages or use another chat format"
        )
    # A format that drops thinking has no sampled tokens in the first messages, up to the last one it rewrote.
    for (start, stop), trained in zip(spans, flags[len(flags) - len(spans) :], strict=True):
        mask[start:stop] &= trained
    return mask


def find_spans(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs of consecutive true values, as start and stop."""
    edges = np.flatnonzero(np.diff(np.asarray(flags, np.int8), prepend=0, append=0))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
