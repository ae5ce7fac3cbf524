"""The real Anthropic client against a gateway on a socket, streamed and not, with tools and thinking; what is recorded
is what the engine saw and said."""

import contextlib
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import types

from m2forge.gateway.config import GatewayConfig
from m2forge.text.message import Message
from tests.gateway.dialogue import FORMATS, call, minimax
from tests.gateway.live import Live, check_recorded, live, num_new_tokens
from tests.text.draw import TOOLS

SAYS = [
    Message("assistant", "Looking.", "First a, then b.", (call(query="a"), call(query="b ß💥", limit=3))),
    Message("assistant", "", "One more.", (call(query="c"),)),
    Message("assistant", "All <found>.\n", "Done."),
]
MESSAGES_TOOLS: list[Any] = [
    {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters) or {"type": "object"}}
    for tool in TOOLS
]


@contextlib.contextmanager
def connected(gateway: Live, key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=20) as client:
        yield client


def say(client: anthropic.Anthropic, is_streamed: bool, **options: Any) -> Any:
    settings: dict[str, Any] = {"model": "m", "max_tokens": 500}
    settings |= options
    if not is_streamed:
        return client.messages.create(**settings)
    with client.messages.stream(**settings) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


@pytest.mark.parametrize("keeps_thinking", [True, False])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_messages_with_tools_are_recorded_as_they_were_sampled(
    name: str, is_streamed: bool, keeps_thinking: bool
) -> None:
    format = FORMATS[name]()
    with live(format, SAYS) as gateway:
        episode, key = gateway.episode()
        with connected(gateway, key) as client:
            messages: list[Any] = [{"role": "user", "content": "Find."}]
            for said in SAYS:
                response = say(client, is_streamed, system="Be brief.", messages=messages, tools=MESSAGES_TOOLS)
                blocks = [block for block in response.content if keeps_thinking or block.type != "thinking"]
                assert "".join(block.text for block in response.content if block.type == "text") == said.content
                uses = [block for block in response.content if block.type == "tool_use"]
                assert [use.input for use in uses] == [dict(made.arguments) for made in said.tool_calls]
                assert all(use.id.startswith("toolu_") for use in uses)
                assert response.stop_reason == ("tool_use" if uses else "end_turn")
                messages.append({"role": "assistant", "content": [block.model_dump() for block in blocks]})
                results = [{"type": "tool_result", "tool_use_id": use.id, "content": "found"} for use in uses]
                if results:
                    messages.append({"role": "user", "content": results})
        check_recorded(gateway, episode)
        assert gateway.counts.num_encoded == num_new_tokens(format, gateway.engine.seen())
        assert not any(episode.num_divergences.values())


def test_token_counts_equal_the_prompts_and_record_nothing() -> None:
    with live(minimax(), SAYS) as gateway:
        episode, key = gateway.episode()
        with connected(gateway, key) as client:
            messages: list[Any] = [{"role": "user", "content": "Find."}]
            counted = client.messages.count_tokens(model="m", messages=messages, tools=MESSAGES_TOOLS)
            assert episode.num_calls == 0
            response = say(client, False, messages=messages, tools=MESSAGES_TOOLS)
        assert counted.input_tokens == len(gateway.engine.seen()[0][0]) == response.usage.input_tokens
        assert response.usage.output_tokens == len(gateway.engine.seen()[0][1])
        thinking_tokens = response.usage.output_tokens_details.thinking_tokens
        assert 0 < thinking_tokens < response.usage.output_tokens
        check_recorded(gateway, episode)


def test_errors_are_the_exceptions_of_the_client() -> None:
    with live(minimax(), [Message("assistant", "one two three", "t")]) as gateway:
        _, key = gateway.episode()
        hello: list[Any] = [{"role": "user", "content": "x"}]
        with connected(gateway, "m2f-wrong") as client, pytest.raises(anthropic.AuthenticationError):
            say(client, True, messages=hello)
        with connected(gateway, key) as client:
            with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                say(client, False, messages=hello, max_tokens=0)
            with pytest.raises(anthropic.NotFoundError):
                client.messages.batches.list()
            response = say(client, True, messages=hello, stop_sequences=["two"])
            assert (response.stop_reason, response.stop_sequence) == ("stop_sequence", "two")
            assert response.content[-1].text == "one "


def test_models_and_request_ids_have_the_vendors_form() -> None:
    with live(minimax(), [Message("assistant", "Hello", "t")] * 2, GatewayConfig(port=0, models=("a", "b"))) as gateway:
        _, key = gateway.episode()
        hello: list[Any] = [{"role": "user", "content": "x"}]
        with connected(gateway, key) as client:
            page = client.models.list()
            assert [(model.type, model.id, model.display_name) for model in page] == [
                ("model", "a", "a"),
                ("model", "b", "b"),
            ]
            assert (page.has_more, page.first_id, page.last_id) == (False, "a", "b")
            assert page._request_id
            model = client.models.retrieve("b")
            assert types.ModelInfo.model_validate(model.to_dict()).created_at.tzinfo is not None
            with pytest.raises(anthropic.NotFoundError) as caught:
                client.models.retrieve("c")
            assert isinstance(caught.value.body, dict)
            assert caught.value.body["type"] == "error"
            response = say(client, False, messages=hello)
            assert response._request_id == response.id
            with client.messages.stream(model="m", max_tokens=9, messages=hello) as stream:
                assert stream.request_id == stream.get_final_message().id
            assert client.messages.count_tokens(model="m", messages=hello)._request_id
