"""Completions for the contract: requests written, responses read by the real OpenAI client."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_type_hints

import openai
import pytest
from hypothesis import strategies as st
from openai.types import Completion as SdkCompletion
from openai.types import completion_create_params

from m2forge.gateway.dialects.openai.completions import ALLOWED, READ, OpenAICompletions
from m2forge.gateway.dialects.types import CompletionRequest, Ending, TokenLogprob
from m2forge.records import JsonValue
from tests.gateway.dialects.adapter_chat import OPENAI_ERRORS, finite, openai_details, usage_of, write_settings
from tests.gateway.dialects.dialect_contract import Adapter, Body, FieldTable, Heard, Received
from tests.gateway.openai_client import Wire, events_of, extras_of

BODY: Body = {"model": "m2", "prompt": "Once"}
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
    "stream_options": [{}, {"include_usage": True}],
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
FIELDS = FieldTable(
    sdk={
        *get_type_hints(completion_create_params.CompletionCreateParamsStreaming),
        *get_type_hints(completion_create_params.CompletionCreateParamsNonStreaming),
    },
    extensions={"top_k", "min_p", "repetition_penalty"},
    read=READ,
    allowed=ALLOWED,
    refused=frozenset(),
    required={"model", "prompt"},
    good=GOOD,
    bad=BAD,
    unbounded={"stop", "model", "user", "prompt"},
    needs={"stream_options": {"stream": True}},
)


class CompletionsAdapter(Adapter):
    dialect = OpenAICompletions()
    fields = FIELDS
    body = BODY
    full = {name: values[-1] for name, values in GOOD.items()} | {"stream": True}
    misspelt = (
        ({"temprature": 0}, "temprature", "temperature"),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "include_usage",
        ),
    )
    prompt_field = "prompt"
    settings = frozenset({"prompt", "stop_texts", "seed", "num_samples", "num_top_logprobs"})
    options = st.fixed_dictionaries(
        {}, optional={"logprobs": st.just(0), "stream_options": st.just({"include_usage": True})}
    )
    finish_reasons = MappingProxyType(
        {
            Ending.STOP: "stop",
            Ending.STOP_TEXT: "stop",
            Ending.LENGTH: "length",
            Ending.TOOL_CALLS: "stop",
            Ending.ABORT: "length",
        }
    )
    errors = OPENAI_ERRORS

    def __init__(self, client: openai.OpenAI, wire: Wire) -> None:
        self.completions: Any = client.completions
        self.wire = wire

    def write(self, request: CompletionRequest) -> Body:
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt or ())
        return write_settings(request) | {"prompt": prompt, "max_tokens": request.max_tokens}

    def whole(self, options: Mapping[str, Any]) -> Received:
        kept = {name: value for name, value in options.items() if name != "stream_options"}
        body = self.completions.create(model="m2", prompt="Once", **kept)
        assert [choice.index for choice in body.choices] == list(range(len(body.choices)))
        heard = tuple(
            Heard("", choice.text, (), choice.finish_reason, logprobs=_tokens([choice])) for choice in body.choices
        )
        return Received(body.id, body.model, body.created, heard, usage_of(body.usage))

    def streamed(self, options: Mapping[str, Any]) -> Received:
        chunks = list(self.completions.create(model="m2", prompt="Once", stream=True, **options))
        (head,) = {(chunk.id, chunk.model, chunk.created) for chunk in chunks}
        usage = None
        if "stream_options" in options:
            assert chunks[-1].choices == []
            usage = usage_of(chunks[-1].usage)
        heard = []
        for index in range(options.get("n", 1)):
            pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == index]
            reasons = [piece.finish_reason for piece in pieces]
            assert reasons[:-1] == [None] * (len(pieces) - 1)
            text = "".join(piece.text for piece in pieces)
            heard.append(Heard("", text, (), reasons[-1], logprobs=_tokens(pieces)))
        return Received(*head, tuple(heard), usage)

    def stream_until_error(self) -> tuple[str, str]:
        texts: list[str] = []
        with (
            self.completions.create(model="m2", prompt="Once", stream=True) as stream,
            pytest.raises(openai.APIError) as caught,
        ):
            texts.extend(chunk.choices[0].text for chunk in stream)
        return "".join(texts), str(caught.value)

    def validate(self, text: str) -> None:
        assert not extras_of(SdkCompletion.model_validate_json(text, strict=True))

    def validate_events(self, stream: bytes) -> None:
        *events, last = events_of(stream)
        assert last == "[DONE]"
        # Chunks are of the type of a whole response, except that a choice that goes on has no finish reason.
        for event in events:
            assert not extras_of(SdkCompletion.model_validate_json(event.replace('"finish_reason": null', GOES_ON)))

    def details(self, error: Any) -> tuple[str, str | None, str | None]:
        return openai_details(error)

    def token(self, token: TokenLogprob) -> object:
        return token.text.decode(errors="replace"), finite(token.logprob)

    def has_streamed_usage(self, request: CompletionRequest) -> bool:
        return bool(request.echo.get("include_usage"))


GOES_ON = '"finish_reason": "stop"'


def _tokens(choices: list[Any]) -> tuple[object, ...] | None:
    """Tokens of one choice's pieces; their offsets in the text never decrease."""
    sent = [choice.logprobs for choice in choices if choice.logprobs is not None]
    if not sent:
        return None
    offsets = [offset for part in sent for offset in part.text_offset]
    assert offsets == sorted(offsets)
    tokens = [token for part in sent for token in zip(part.tokens, part.token_logprobs, strict=True)]
    assert len(tokens) == len(offsets)
    return tuple(tokens)
