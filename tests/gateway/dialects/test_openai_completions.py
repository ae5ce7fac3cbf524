"""OpenAI's Completions: requests as the SDK writes them, answers as it takes them."""

import contextlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import get_type_hints

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion as SdkCompletion
from openai.types import completion_create_params

from m2forge.gateway.dialects.openai.completions import ALLOWED, FIELDS, READ, OpenAICompletions
from m2forge.gateway.dialects.types import Answer, Ask, AskError, Dialect, Ending, TokenLogprob, Usage
from m2forge.records import JsonValue, Sampling
from m2forge.text.parser import Completion, ContentDelta
from tests.gateway.dialects.draw_answer import answer_lists, arrivals, json_values, play, usages
from tests.gateway.mutate import mutated
from tests.gateway.openai_client import Wire, connected, events_of, extras_of, streamed

Body = dict[str, JsonValue]

DIALECT: Dialect = OpenAICompletions()
BODY: Body = {"model": "m2", "prompt": "Once"}
ID, CREATED_S = "cmpl-1", 1_700_000_000
EXTENSIONS = {"top_k", "min_p", "repetition_penalty"}
GOOD: dict[str, list[JsonValue]] = {
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [1.5],
    "logit_bias": [{}],
    "logprobs": [0],
    "max_tokens": [1, 2**31 - 1],
    "min_p": [0.1],
    "model": ["m2"],
    "n": [1],
    "presence_penalty": [-2],
    "prompt": ["Once", [5, 6], ["Once"], [[5, 6]]],
    "repetition_penalty": [1.1],
    "seed": [7],
    "stop": ["END", ["a", "b"]],
    "stream": [True, False],
    "stream_options": [None],
    "suffix": [""],
    "temperature": [0],
    "top_k": [5],
    "top_p": [0.5],
    "user": ["me"],
}
BAD: dict[str, list[JsonValue]] = {
    "best_of": [2, 0],
    "echo": [True],
    "frequency_penalty": [3],
    "logit_bias": [{"5": 1}],
    "logprobs": [1, 5, True],
    "max_tokens": [0],
    "min_p": [2],
    "model": [None],
    "n": [0],
    "presence_penalty": ["1"],
    "prompt": [None, "", [], [[]], [""], ["a", "b"], [[1], [2]], [1, "a"], [-1], [2**31], [True], {}, 5, [{}], [1.5]],
    "repetition_penalty": [0],
    "seed": [2**63],
    "stop": [["a"] * 5],
    "stream": [1],
    "stream_options": [{}],
    "suffix": ["end"],
    "temperature": [3],
    "top_k": ["5"],
    "top_p": [0],
    "user": [5],
}


@pytest.fixture(scope="module")
def connection() -> Iterator[tuple[openai.OpenAI, Wire]]:
    with connected() as pair:
        yield pair


def read(**changes: JsonValue) -> Ask:
    return DIALECT.read(BODY | changes)


# -- requests ---------------------------------------------------------------------------------------------------------


def test_every_field_of_the_sdk_is_decided_once() -> None:
    params = completion_create_params
    assert {
        *get_type_hints(params.CompletionCreateParamsStreaming),
        *get_type_hints(params.CompletionCreateParamsNonStreaming),
        *EXTENSIONS,
    } == FIELDS
    assert not READ & ALLOWED
    assert GOOD.keys() == BAD.keys() == FIELDS


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_fields_take_good_values_and_refuse_bad_ones_by_name(name: str) -> None:
    for value in GOOD[name]:
        read(**{name: value})
    for value in BAD[name]:
        with pytest.raises(AskError) as caught:
            read(**{name: value})
        assert str(caught.value).startswith(caught.value.field or "?"), value
        assert (caught.value.field or "").startswith(name), value
    if name not in ("model", "prompt"):
        assert read(**{name: None}) == read()


def test_a_whole_request_is_read() -> None:
    ask = read(
        prompt=[[5, 6]],
        max_tokens=9,
        temperature=0.5,
        stop="END",
        seed=4,
        n=3,
        best_of=3,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert ask == Ask(
        messages=(),
        prompt=(5, 6),
        max_tokens=9,
        sampling=Sampling(temperature=0.5),
        stop_texts=("END",),
        seed=4,
        num_samples=3,
        is_streamed=True,
        num_top_logprobs=0,
        model="m2",
        echo={"include_usage": True},
    )
    assert read().prompt == "Once"
    assert read().max_tokens == 16


@given(body=st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=5), json_values))
def test_any_object_is_read_or_refused(body: Body) -> None:
    for changed in (body, BODY | body):
        with contextlib.suppress(AskError):
            DIALECT.read(changed)


@given(seed=st.integers(0, 2**32))
def test_any_change_of_a_good_request_is_read_or_refused(seed: int) -> None:
    body = {name: values[-1] for name, values in GOOD.items()}
    DIALECT.read(body)
    chance = random.Random(seed)
    for _ in range(200):
        with contextlib.suppress(AskError):
            DIALECT.read(mutated(body, chance))


# -- answers ----------------------------------------------------------------------------------------------------------


@given(data=st.data(), answers=answer_lists(is_raw=True), usage=usages, logprobs=st.none() | st.just(0))
def test_the_client_adds_a_stream_up_to_the_whole_answer(
    connection: tuple[openai.OpenAI, Wire],
    data: st.DataObject,
    answers: list[Answer],
    usage: Usage,
    logprobs: int | None,
) -> None:
    client, wire = connection
    arriving = data.draw(arrivals(answers))

    def handle(body: Mapping[str, JsonValue]) -> httpx2.Response:
        ask = DIALECT.read(body)
        if ask.is_streamed:
            return streamed(play(DIALECT.stream(ask, ID, CREATED_S), answers, arriving, usage))
        text = json.dumps(DIALECT.answer(ask, ID, CREATED_S, answers, usage), allow_nan=False)
        assert not extras_of(SdkCompletion.model_validate_json(text, strict=True))
        return httpx2.Response(200, content=text, headers={"content-type": "application/json"})

    wire.handle = handle
    whole = client.completions.create(model="m2", prompt="Once", n=len(answers), logprobs=logprobs)
    chunks = list(
        client.completions.create(
            model="m2",
            prompt="Once",
            n=len(answers),
            logprobs=logprobs,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    for choice, answer in zip(whole.choices, answers, strict=True):
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert choice.text == "".join(piece.text for piece in pieces) == answer.completion.content
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
        streamed_logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        if choice.logprobs is None:
            assert logprobs is None
            assert not streamed_logprobs
            continue
        assert [token for part in streamed_logprobs for token in part.tokens or []] == choice.logprobs.tokens
        assert [
            value for part in streamed_logprobs for value in part.token_logprobs or []
        ] == choice.logprobs.token_logprobs
        assert [
            offset for part in streamed_logprobs for offset in part.text_offset or []
        ] == choice.logprobs.text_offset


def test_offsets_count_characters_of_the_text() -> None:
    tokens = tuple(TokenLogprob(text, -1.0, 5) for text in (b"a", b"\xc3", b"\xbc", b"bc", b"d"))
    answer = Answer(Completion("", "aübcd", (), (), closed=True), Ending.LENGTH, None, tokens)
    body = DIALECT.answer(read(logprobs=0), ID, CREATED_S, [answer], Usage(1, 0, 5, 0))
    logprobs = SdkCompletion.model_validate(body, strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 1, 1, 2, 4]


def test_an_ending_never_speaks_of_tools() -> None:
    answer = Answer(Completion("", "x", (), (), closed=True), Ending.TOOL_CALLS)
    body = DIALECT.answer(read(), ID, CREATED_S, [answer], Usage(1, 0, 1, 0))
    assert SdkCompletion.model_validate(body, strict=True).choices[0].finish_reason == "stop"


def test_a_failure_after_the_start_reaches_the_client(connection: tuple[openai.OpenAI, Wire]) -> None:
    client, wire = connection
    stream = DIALECT.stream(read(stream=True), ID, CREATED_S)
    pieces = [stream.begin(1, 0), stream.piece(0, [ContentDelta("So")], []), stream.fail(500, "the engine failed")]
    wire.handle = lambda body: streamed(iter(pieces))
    with client.completions.create(model="m2", prompt="Once", stream=True) as got:
        assert next(got).choices[0].text == "So"
        with pytest.raises(openai.APIError, match="the engine failed"):
            next(got)


def test_a_piece_without_text_is_no_chunk() -> None:
    stream = DIALECT.stream(read(stream=True), ID, CREATED_S)
    assert stream.piece(0, [], []) == b""
    assert events_of(stream.finish(Usage(1, 0, 1, 0))) == ["[DONE]"]


def test_errors_have_openais_body() -> None:
    assert DIALECT.error(400, "no", "prompt") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "prompt", "code": None}
    }
