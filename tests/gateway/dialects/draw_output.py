"""Random outputs, and how they may arrive: events in any pieces, tokens in any groups, samples in any order."""

import math
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from m2forge.gateway.dialects.types import CompletionOutput, Ending, Stream, TokenLogprob, Usage
from m2forge.records import JsonValue
from m2forge.text.message import ToolCall
from m2forge.text.parser import CallFinished, CallStarted, Completion, ContentDelta, Event, ThinkingDelta

json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=8), json_values, max_size=3)
token_logprobs = st.builds(
    TokenLogprob,
    text=st.binary(max_size=4),
    logprob=st.floats(max_value=0, allow_nan=False) | st.just(math.nan),
    id=st.integers(0, 2**31 - 1),
)
usages = st.builds(Usage, *(st.integers(0, 10**6) for _ in range(4)))


@st.composite
def outputs(draw: st.DrawFn, index: int = 0, *, is_raw: bool = False) -> CompletionOutput:
    """`is_raw`: of a prompt without a chat format, so content alone."""
    thinking = "" if is_raw else draw(st.text(max_size=12))
    num_calls = 0 if is_raw else draw(st.integers(0, 3))
    names = st.text(min_size=1, max_size=8)
    calls = tuple(ToolCall(draw(names), draw(arguments), f"call_{index}_{number}") for number in range(num_calls))
    ending = draw(st.sampled_from([Ending.TOOL_CALLS] if calls else [e for e in Ending if e is not Ending.TOOL_CALLS]))
    completion = Completion(thinking, draw(st.text(max_size=20)), calls, (), closed=True)
    stop_text = "END" if ending is Ending.STOP_TEXT else None
    return CompletionOutput(completion, ending, stop_text, tuple(draw(st.lists(token_logprobs, max_size=6))))


def output_lists(*, is_raw: bool = False) -> st.SearchStrategy[list[CompletionOutput]]:
    return st.integers(1, 4).flatmap(
        lambda size: st.tuples(*(outputs(index, is_raw=is_raw) for index in range(size))).map(list)
    )


@st.composite
def arrivals(draw: st.DrawFn, outputs: Sequence[CompletionOutput]) -> list[tuple[int, list[Event], list[TokenLogprob]]]:
    """Pieces for `Stream.piece`, each sample's in order, the samples interleaved."""
    waiting = [draw(_pieces(output)) for output in outputs]
    order = draw(st.permutations([sample for sample, pieces in enumerate(waiting) for _ in pieces]))
    iterators = [iter(pieces) for pieces in waiting]
    return [(sample, *next(iterators[sample])) for sample in order]


def play(
    stream: Stream,
    outputs: Sequence[CompletionOutput],
    arrivals: Sequence[tuple[int, list[Event], list[TokenLogprob]]],
    usage: Usage,
) -> Iterator[bytes]:
    """A whole stream, call by call."""
    yield stream.begin(usage.num_prompt, usage.num_cached)
    for sample, events, logprobs in arrivals:
        yield stream.piece(sample, events, logprobs)
    for sample, output in enumerate(outputs):
        yield stream.end_sample(sample, output)
    yield stream.finish(usage)


@st.composite
def _pieces(draw: st.DrawFn, output: CompletionOutput) -> list[tuple[list[Event], list[TokenLogprob]]]:
    completion = output.completion
    events: list[Event] = [ThinkingDelta(text) for text in draw(_cuts(completion.thinking))]
    events += [ContentDelta(text) for text in draw(_cuts(completion.content))]
    for call in completion.tool_calls:
        if draw(st.booleans()):
            events.append(CallStarted(call.name + " that came to nothing"))
        events += [CallStarted(call.name), CallFinished(call)]
    num_pieces = draw(st.integers(1, 5))
    borders = [
        sorted(draw(st.lists(st.integers(0, len(whole)), min_size=num_pieces - 1, max_size=num_pieces - 1)))
        for whole in (events, output.logprobs)
    ]
    spans = [list(zip([0, *ends], [*ends, None], strict=True)) for ends in borders]
    return [
        (events[slice(*of_events)], list(output.logprobs[slice(*of_tokens)]))
        for of_events, of_tokens in zip(*spans, strict=True)
    ]


@st.composite
def _cuts(draw: st.DrawFn, text: str) -> list[str]:
    ends = sorted(draw(st.sets(st.integers(1, len(text) - 1), max_size=4))) if len(text) > 1 else []
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True) if text]
