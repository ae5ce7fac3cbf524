"""The context of an episode: completions end with it, and a prompt beyond it gets the vendor's own error."""

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from m2forge.gateway.config import GatewayConfig
from tests.gateway.calls.test_sampling import ADMIN, calls_of, create
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_retry_http import PATHS, post
from tests.gateway.live import CONTEXT, live

WORDS = "one two three " * 40
LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}]},
    "/v1/responses": {"input": WORDS},
    "/v1/completions": {"prompt": WORDS},
    "/v1/messages": {"messages": [{"role": "user", "content": WORDS}]},
}
SAYS = {
    "/v1/chat/completions": "This model's maximum context length is 64 tokens. However, your messages resulted in ",
    "/v1/responses": "Your input exceeds the context window of this model.",
    "/v1/completions": "This model's maximum context length is 64 tokens, however you requested ",
    "/v1/messages": "prompt is too long: ",
}
PLACES = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/completions": "prompt"}


@pytest.mark.parametrize("path", LONG)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_beyond_the_context_gets_the_vendors_error(path: str, is_streamed: bool) -> None:
    with live(minimax()) as gateway:
        made = create(gateway, id="own", context=64).json()
        response = post(gateway, made["key"], PATHS[path] | LONG[path] | {"stream": is_streamed}, path)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["message"].startswith(SAYS[path])
        assert error["type"] == "invalid_request_error"
        if path in PLACES:
            assert (error["param"], error["code"]) == (PLACES[path], "context_length_exceeded")
        else:
            assert error["message"].endswith(" tokens > 64 maximum")
        assert not gateway.engine.prompts, "the engine was asked"
        # Another episode may use all that the model allows.
        other = create(gateway, id="other").json()
        assert post(gateway, other["key"], PATHS[path] | LONG[path], path).status_code == 200


@pytest.mark.parametrize("path", LONG)
def test_a_completion_ends_with_the_context(path: str) -> None:
    names = {"/v1/responses": "max_output_tokens"}
    with live(minimax()) as gateway:
        made = create(gateway, id="own", context=64).json()
        body = PATHS[path] | {names.get(path, "max_tokens"): 4000}
        assert post(gateway, made["key"], body, path).status_code == 200
        (prompt,) = gateway.engine.prompts
        assert prompt.ids.size + prompt.max_tokens == 64
        (call,) = calls_of(gateway, "own")
        assert call.prompt_ids.size + call.response_ids.size <= 64


def test_the_context_survives_a_restart_within_the_models(tmp_path: Path) -> None:
    config = GatewayConfig(port=0, journal=str(tmp_path))
    with live(minimax(), config=config) as gateway:
        keys = [create(gateway, id=f"of-{context}", context=context).json()["key"] for context in (64, 10 * CONTEXT)]
    path = "/v1/chat/completions"
    with live(minimax(), config=config) as gateway:
        assert post(gateway, keys[0], PATHS[path] | LONG[path]).status_code == 400
        assert httpx2.get(f"{gateway.url}/episodes/of-64", headers=ADMIN).json()["context"] == 64
        assert post(gateway, keys[1], PATHS[path] | {"max_tokens": 50 * CONTEXT}).status_code == 200
        (prompt,) = gateway.engine.prompts
        assert prompt.ids.size + prompt.max_tokens == CONTEXT


def test_the_vendors_sdks_recognise_the_error() -> None:
    with live(minimax()) as gateway:
        key = create(gateway, context=64).json()["key"]
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
        with client, pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": WORDS}])
        assert refused.value.code == "context_length_exceeded"
        other = anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0)
        with other, pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            other.messages.create(model="m", max_tokens=8, messages=[{"role": "user", "content": WORDS}])


@pytest.mark.parametrize("context", [0, -1, 1.5, "64", True])
def test_a_context_that_cannot_be_is_refused(context: object) -> None:
    with live(minimax()) as gateway:
        refused = create(gateway, context=context)
        assert refused.status_code == 400
        assert "context: expected an integer from 1" in json.loads(refused.text)["error"]["message"]
