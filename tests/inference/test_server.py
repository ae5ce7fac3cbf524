"""The model server: OpenAI's client against a native engine, the same tokens as the engine and `LLM` give, and the
rollout routes beside it."""

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from m2forge import LLM
from m2forge.errors import EngineError
from m2forge.gateway.episodes.episode import Episode
from m2forge.inference.config import ModelServerConfig
from m2forge.inference.model import NoChatFormat, context_of
from m2forge.inference.server import open_server_app
from m2forge.protocols import Engine
from m2forge.rollout.engine import NativeEngine
from m2forge.rollout.server.model_server import make_core
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, tool_to_openai
from tests.gateway.dialogue import FORMATS, call, minimax
from tests.gateway.live import Scene, WatchedEngine
from tests.inference.folder import CONTEXT, write_model
from tests.rollout.served import KEY, KEYED, served
from tests.text.draw import TOOLS

MESSAGES: list[Any] = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Find ß💥."}]
CHAT_TOOLS: list[Any] = [tool_to_openai(tool) for tool in TOOLS]
NUM_TOKENS = 24


@contextlib.asynccontextmanager
async def serving(
    engine: Engine, format: ChatFormat | None, vocab_size: int, **fields: Any
) -> AsyncIterator[tuple[str, openai.AsyncOpenAI]]:
    config = ModelServerConfig(**fields)
    opened = open_server_app(engine, format, config, KEY, ("nano",), CONTEXT, vocab_size)
    async with opened as app, served(app) as url, connected(url) as client:
        yield url, client


def connected(url: str, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)


@contextlib.asynccontextmanager
async def native(folder: Path, format: ChatFormat | None) -> AsyncIterator[tuple[str, openai.AsyncOpenAI]]:
    core = make_core(folder, ModelServerConfig(device="cpu"))
    assert context_of(core) == CONTEXT
    engine = NativeEngine(core)
    try:
        async with serving(engine, format, core.model.config.vocab_size) as found:
            yield found
    finally:
        await engine.close()


@pytest.mark.parametrize("name", FORMATS)
def test_a_chat_is_the_same_in_llm_server_and_engine(name: str, tmp_path: Path) -> None:
    format = FORMATS[name]()
    folder = write_model(tmp_path / "model", format)
    with LLM(folder, device="cpu") as llm:
        chat = llm.chat(MESSAGES, tools=TOOLS, temperature=0, max_tokens=NUM_TOKENS)
    read = [Message(one["role"], one["content"]) for one in MESSAGES]
    assert list(chat.prompt_token_ids) == format.render(read, TOOLS, generation=True).ids

    async def run() -> None:
        async with native(folder, format) as (url, client):
            assert await engine_ids(url, chat.prompt_token_ids, format) == list(chat.token_ids)
            for stream in (False, True):
                choices = await ask(
                    client.chat.completions, messages=MESSAGES, tools=CHAT_TOOLS, logprobs=True, stream=stream
                )
                parts = [choice.delta if stream else choice.message for choice in choices]
                assert "".join(part.content or "" for part in parts) == chat.message.content
                thinking = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
                assert thinking == chat.message.thinking
                tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
                assert [bytes(token.bytes) for token in tokens] == token_bytes(format, chat.token_ids)
                assert [token.logprob for token in tokens] == list(chat.logprobs)

    asyncio.run(run())


def test_a_completion_is_the_same_in_llm_server_and_engine(tmp_path: Path) -> None:
    format = minimax()
    folder = write_model(tmp_path / "model", format)
    with LLM(folder, device="cpu") as llm:
        raw = llm.generate("def main(", temperature=0, max_tokens=NUM_TOKENS)

    async def run() -> None:
        async with native(folder, format) as (url, client):
            assert await engine_ids(url, raw.prompt_token_ids, format) == list(raw.token_ids)
            for prompt in ("def main(", list(raw.prompt_token_ids)):
                for stream in (False, True):
                    choices = await ask(client.completions, prompt=prompt, logprobs=0, stream=stream)
                    assert "".join(choice.text for choice in choices) == raw.text
                    texts = [text for choice in choices if choice.logprobs for text in choice.logprobs.tokens]
                    pieces = token_bytes(format, raw.token_ids)
                    assert texts == [piece.decode(errors="replace") for piece in pieces]

    asyncio.run(run())


async def ask(route: Any, *, stream: bool, **options: Any) -> list[Any]:
    """The choices of a response, or of each of its chunks."""
    answer = await route.create(model="nano", temperature=0, max_tokens=NUM_TOKENS, stream=stream, **options)
    bodies = [chunk async for chunk in answer] if stream else [answer]
    assert bodies[-1].choices[0].finish_reason in ("length", "stop")
    return [body.choices[0] for body in bodies]


async def engine_ids(url: str, prompt_ids: Sequence[int], format: ChatFormat) -> list[int]:
    """What the engine itself samples, by the rollout routes."""
    body = {"ids": list(prompt_ids), "max_tokens": NUM_TOKENS, "sampling": {"temperature": 0}, "stream": False}
    async with httpx2.AsyncClient(headers=KEYED) as http:
        response = await http.post(f"{url}/generate", json=body | {"stop_ids": list(format.stop_ids)})
    (sample,) = response.json()["samples"]
    return list(sample["ids"])


def token_bytes(format: ChatFormat, ids: Sequence[int]) -> list[bytes]:
    tokenizer = format.tokenizer
    return [tokenizer.decode_bytes([id]) if id < tokenizer.vocab_size else b"" for id in ids]


def test_a_conversation_with_tools_goes_through_the_client() -> None:
    format = minimax()
    says = [
        Message("assistant", "Looking.", "First a.", (call(query="a"), call(query="b", limit=3))),
        Message("assistant", "Found.", "Done."),
    ]

    def episodes() -> weakref.WeakSet[Episode]:
        gc.collect()
        return weakref.WeakSet(found for found in gc.get_objects() if isinstance(found, Episode))

    async def talk(is_streamed: bool) -> None:
        others = episodes()
        engine = WatchedEngine(format, Scene(format, says))
        async with serving(engine, format, format.tokenizer.vocab_size) as (_, client):
            messages = [*MESSAGES]
            for said in says:
                options: Any = {"model": "m", "messages": messages, "tools": CHAT_TOOLS}
                if is_streamed:
                    async with client.chat.completions.stream(**options) as stream:
                        answer: Any = (await stream.get_final_completion()).choices[0].message
                else:
                    answer = (await client.chat.completions.create(**options)).choices[0].message
                assert (answer.content, answer.reasoning_content) == (said.content, said.thinking)
                calls = [json.loads(made.function.arguments) for made in answer.tool_calls or ()]
                assert calls == [dict(made.arguments) for made in said.tool_calls]
                messages.append(answer.model_dump(exclude_none=True, exclude={"parsed": True}))
                messages += [
                    {"role": "tool", "tool_call_id": made.id, "content": "result"} for made in answer.tool_calls or ()
                ]
            await asyncio.sleep(0.1)
            assert not [found for found in episodes() if found not in others], "conversations outlive their requests"

    for is_streamed in (False, True):
        asyncio.run(talk(is_streamed))


def test_responses_and_anthropics_messages_answer_too() -> None:
    format = minimax()
    said = Message("assistant", "Hello.", "Hm.")

    async def run() -> None:
        engine = WatchedEngine(format, Scene(format, [said, said, said, said]))
        async with serving(engine, format, format.tokenizer.vocab_size) as (url, client):
            response = await client.responses.create(model="m", input="Hi.")
            assert response.output_text == "Hello."
            raw = await client.responses.with_raw_response.create(model="m", input="Hi.", tool_choice="required")
            assert raw.headers["x-m2forge-notice"] == "tool_choice: treated as auto"
            reference: Any = [{"type": "item_reference", "id": response.output[0].id}]
            with pytest.raises(openai.BadRequestError, match="send the item itself"):
                await client.responses.create(model="m", input=reference)
            ask: Any = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "Hi."}]}
            ways: list[dict[str, Any]] = [{"api_key": KEY}, {"auth_token": KEY}]
            for keys in ways:
                async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, **keys) as other:
                    answer: Any = await other.messages.create(**ask)
                assert answer.content[-1].text == "Hello."
            async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, api_key="other-key") as stranger:
                with pytest.raises(
                    anthropic.AuthenticationError, match=r"authentication_error.*the API key is missing or wrong"
                ):
                    await stranger.messages.create(**ask)
        # The rollout routes take the key as before.
        async with serving(engine, format, format.tokenizer.vocab_size) as (url, _), httpx2.AsyncClient() as http:
            assert (await http.get(f"{url}/health", headers={"x-api-key": KEY})).status_code == 401
            assert (await http.get(f"{url}/health", headers=KEYED)).status_code == 200

    asyncio.run(run())


def test_models_are_listed_by_name() -> None:
    async def run() -> None:
        format = minimax()
        engine = WatchedEngine(format, Scene(format))
        async with serving(engine, format, format.tokenizer.vocab_size) as (_, client):
            assert [model.id async for model in client.models.list()] == ["nano"]
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("other")

    asyncio.run(run())


def test_refusals_have_the_vendors_form() -> None:
    format = minimax()

    class Failing(WatchedEngine):
        def generate(self, prompt: Any) -> Any:
            raise EngineError("the engine failed")

    async def run() -> None:
        engine = WatchedEngine(format, Scene(format))
        async with serving(engine, format, format.tokenizer.vocab_size) as (url, client):
            async with connected(url, "other-key") as stranger:
                with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong") as refused:
                    await stranger.chat.completions.create(model="m", messages=MESSAGES)
                assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.BadRequestError, match="logit_bias"):
                await client.chat.completions.create(model="m", messages=MESSAGES, logit_bias={"1": 1})
            with pytest.raises(openai.BadRequestError) as too_long:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "word " * CONTEXT}]
                )
            assert too_long.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="n: expected at most 256, received 999"):
                await client.completions.create(model="m", prompt="a", n=999)
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="m", input="a")
        async with serving(Failing(format, Scene(format)), format, format.tokenizer.vocab_size) as (_, client):
            with pytest.raises(openai.InternalServerError, match="the engine failed") as failed:
                await client.chat.completions.create(model="m", messages=MESSAGES)
            assert failed.value.status_code == 503

    asyncio.run(run())


def test_a_client_that_hangs_up_aborts_its_completion() -> None:
    format = minimax()

    async def run() -> None:
        engine = WatchedEngine(format, Scene(format), delay_s=0.01)
        async with serving(engine, format, format.tokenizer.vocab_size) as (_, client):
            answer: Any = await client.completions.create(model="m", prompt="a", max_tokens=900, stream=True)
            await anext(aiter(answer))
            await answer.close()
            async with asyncio.timeout(60):
                while not engine.num_aborted:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_base_model_completes_text_and_refuses_messages(tmp_path: Path) -> None:
    format = NoChatFormat(minimax().tokenizer, "it has none")

    async def run() -> None:
        async with native(write_model(tmp_path / "model"), format) as (_, client):
            answer = await client.completions.create(model="m", prompt="def", max_tokens=4, temperature=0)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
            with pytest.raises(openai.BadRequestError, match="this model has no chat format: it has none"):
                await client.chat.completions.create(model="m", messages=MESSAGES)

    asyncio.run(run())


def test_without_a_tokenizer_token_ids_alone_are_served(tmp_path: Path) -> None:
    async def run() -> None:
        async with native(write_model(tmp_path / "model"), None) as (url, client):
            with pytest.raises(openai.NotFoundError, match=r"no tokenizer that can be used.*at /generate"):
                await client.models.list()
            async with httpx2.AsyncClient(headers=KEYED) as http:
                body = {"ids": [1, 2], "max_tokens": 3, "stream": False}
                (sample,) = (await http.post(f"{url}/generate", json=body)).json()["samples"]
                assert len(sample["ids"]) == 3
                assert (await http.get(f"{url}/health")).json()["num_running"] == 0

    asyncio.run(run())
