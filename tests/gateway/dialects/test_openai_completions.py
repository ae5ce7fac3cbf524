"""Completions: what the contract of dialects does not cover."""

import json

from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion as SdkCompletion

from m2forge.gateway.dialects.openai.completions import OpenAICompletions
from m2forge.gateway.dialects.types import CompletionOutput, CompletionRequest, Dialect, Ending, TokenLogprob, Usage
from m2forge.records import JsonValue
from m2forge.text.parser import Completion
from tests.gateway.dialects.adapter_completions import BODY
from tests.gateway.dialects.draw_output import arrivals, outputs, play
from tests.gateway.openai_client import events_of

DIALECT: Dialect = OpenAICompletions()
ID, CREATED_S = "cmpl-1", 1_700_000_000
USAGE = Usage(num_prompt=1, num_cached=0, num_sampled=5, num_thinking=0)


def read(**changes: JsonValue) -> CompletionRequest:
    return DIALECT.read(BODY | changes)


def test_a_prompt_is_one_text_or_one_list_of_token_ids() -> None:
    prompts: list[JsonValue] = ["Once", ["Once"], [5, 6], [[5, 6]]]
    assert [read(prompt=prompt).prompt for prompt in prompts] == ["Once", "Once", (5, 6), (5, 6)]


def test_unset_fields_have_the_vendors_defaults() -> None:
    assert read() == CompletionRequest((), prompt="Once", max_tokens=16, model="m2")


def test_one_stop_text_needs_no_list_and_best_of_is_n() -> None:
    request = read(stop="END", n=3, best_of=3)
    assert (request.stop_texts, request.num_samples) == (("END",), 3)


def offsets_of(body: dict[str, JsonValue]) -> list[int]:
    logprobs = SdkCompletion.model_validate(body, strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    return logprobs.text_offset


def test_offsets_count_characters_of_the_text() -> None:
    tokens = tuple(TokenLogprob(text, -1.0, 5) for text in (b"a", b"\xc3", b"\xbc", b"bc", b"d"))
    output = CompletionOutput(Completion("", "aübcd", (), (), closed=True), Ending.LENGTH, None, tokens)
    assert offsets_of(DIALECT.response(read(logprobs=0), ID, CREATED_S, [output], USAGE)) == [0, 1, 1, 2, 4]


@given(data=st.data(), output=outputs(is_raw=True))
def test_offsets_go_on_from_chunk_to_chunk(data: st.DataObject, output: CompletionOutput) -> None:
    request = read(logprobs=0, stream=True)
    pieces = data.draw(arrivals([output]))
    *events, _ = events_of(b"".join(play(DIALECT.stream(request, ID, CREATED_S), [output], pieces, USAGE)))
    streamed = [
        offset
        for event in events
        for choice in json.loads(event)["choices"]
        for offset in (choice["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    assert streamed == offsets_of(DIALECT.response(request, ID, CREATED_S, [output], USAGE))


def test_a_piece_without_text_is_no_chunk() -> None:
    stream = DIALECT.stream(read(stream=True), ID, CREATED_S)
    assert stream.piece(0, [], []) == b""
    assert events_of(stream.finish(USAGE)) == ["[DONE]"]
