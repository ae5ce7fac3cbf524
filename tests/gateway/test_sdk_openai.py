"""The real OpenAI client against a gateway on a socket: chat, responses and completions, streamed and not, with tools;
what is recorded is what the engine saw and said."""

import concurrent.futures
import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from m2forge.text.message import Message, tool_to_openai
from tests.gateway.dialogue import FORMATS, array, call, minimax, read
from tests.gateway.live import Live, check_recorded, live, num_new_tokens, recorded
from tests.text.draw import TOOLS

SAYS = [
    Message("assistant", "Looking.", "First a, then b.", (call(query="a"), call(query="b ß💥", limit=3))),
    Message("assistant", "", "One more.", (call(query="c"),)),
    Message("assistant", "All <found>.\n", "Done."),
    Message("assistant", "You are welcome."),
]
CHAT_TOOLS: list[Any] = [tool_to_openai(tool) for tool in TOOLS]


@contextlib.contextmanager
def connected(gateway: Live, key: str, **options: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=20, **options) as client:
        yield client


def chat(client: openai.OpenAI, messages: list[Any], *, is_streamed: bool, **options: Any) -> Any:
    """The assistant's message, as the client keeps it."""
    options = {"model": "m", "messages": messages, "tools": CHAT_TOOLS} | options
    if not is_streamed:
        return client.chat.completions.create(**options).choices[0].message
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


def parts_of(answer: Any) -> list[Any]:
    """The chunks of a stream, or the one answer."""
    return list(answer) if isinstance(answer, openai.Stream) else [answer]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_with_tools_is_recorded_as_it_was_sampled(name: str, is_streamed: bool) -> None:
    format = FORMATS[name]()
    with live(format, SAYS) as gateway:
        episode, key = gateway.episode()
        with connected(gateway, key) as client:
            messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find."}]
            for number, said in enumerate(SAYS):
                received = chat(client, messages, is_streamed=is_streamed)
                assert (received.content or "") == said.content
                assert getattr(received, "reasoning_content", "") == said.thinking or not said.thinking
                calls = [json.loads(made.function.arguments) for made in received.tool_calls or []]
                assert calls == [dict(made.arguments) for made in said.tool_calls]
                messages.append(received.model_dump(exclude_none=True, exclude={"parsed": True}))
                messages += [
                    {"role": "tool", "tool_call_id": made.id, "content": f"result of {made.id}"}
                    for made in received.tool_calls or []
                ]
                if not received.tool_calls:
                    messages.append({"role": "user", "content": f"Thanks {number}"})
        check_recorded(gateway, episode)
        assert gateway.counts.num_encoded == num_new_tokens(format, gateway.engine.seen())
        assert not any(episode.num_divergences.values())


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_responses_with_tools_are_recorded_as_they_were_sampled(name: str, is_streamed: bool) -> None:
    format = FORMATS[name]()
    tools: list[Any] = [{"type": "function", **tool["function"], "strict": False} for tool in CHAT_TOOLS]
    with live(format, SAYS) as gateway:
        episode, key = gateway.episode()
        with connected(gateway, key) as client:
            items: list[Any] = [{"role": "user", "content": "Find."}]
            for number, said in enumerate(SAYS):
                options: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "input": items, "tools": tools}
                if is_streamed:
                    with client.responses.stream(**options) as stream:
                        for _ in stream:
                            pass
                        response = stream.get_final_response()
                else:
                    response = client.responses.create(**options)
                assert response.status == "completed"
                assert response.output_text == said.content
                items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                assert [json.loads(made.arguments) for made in calls] == [dict(c.arguments) for c in said.tool_calls]
                items += [{"type": "function_call_output", "call_id": made.call_id, "output": "ok"} for made in calls]
                if not calls:
                    items.append({"role": "user", "content": f"Thanks {number}"})
        check_recorded(gateway, episode)
        assert gateway.counts.num_encoded == num_new_tokens(format, gateway.engine.seen())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_raw_completions_are_recorded_without_end_token_text(is_streamed: bool) -> None:
    format = minimax()
    with live(format, [Message("assistant", "abc ß💥", "t")]) as gateway:
        episode, key = gateway.episode()
        with connected(gateway, key) as client:
            raw: dict[str, Any] = {"model": "m", "prompt": "Once", "max_tokens": 100, "logprobs": 0}
            parts = parts_of(client.completions.create(**raw, stream=is_streamed))
            text = "".join(part.choices[0].text for part in parts)
            ids = client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=8, seed=3)
            again = client.completions.create(model="m", prompt=[[5, 6, 7]], max_tokens=8, seed=3)
        assert text == "t\n</think>\n\nabc ß💥"
        assert sum(len(part.choices[0].logprobs.tokens) for part in parts if part.choices[0].logprobs) > len(text) - 12
        assert ids.choices[0].text == again.choices[0].text
        assert ids.usage is not None
        assert ids.usage.completion_tokens == 8
        check_recorded(gateway, episode)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_samples_are_all_told_and_recorded(is_streamed: bool) -> None:
    format = minimax()
    with live(format) as gateway:
        episode, key = gateway.episode()
        with connected(gateway, key) as client:
            options: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "n": 3}
            options |= {"seed": 7, "max_tokens": 12, "logprobs": True, "stream": is_streamed}
            options |= {"stream_options": {"include_usage": True}} if is_streamed else {}
            parts = parts_of(client.chat.completions.create(**options))
            num_logprobs = [0, 0, 0]
            reasons: list[Any] = [None, None, None]
            texts: list[dict[str, str]] = [{}, {}, {}]
            for part in parts:
                for choice in part.choices:
                    num_logprobs[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
                    reasons[choice.index] = reasons[choice.index] or choice.finish_reason
                    received = choice.delta if is_streamed else choice.message
                    for name in ("content", "reasoning_content"):
                        text = texts[choice.index].get(name, "") + (getattr(received, name, None) or "")
                        texts[choice.index][name] = text
            usage = parts[-1].usage
        seen = gateway.engine.seen()
        assert num_logprobs == [len(ids) for _, ids in seen]
        drawn = [read(format, array(ids), tools=()) for _, ids in seen]
        assert len({completion.thinking + completion.content for completion in drawn}) == 3
        assert [(text["content"], text["reasoning_content"]) for text in texts] == [
            (completion.content, completion.thinking) for completion in drawn
        ]
        assert all(reason in ("length", "stop") for reason in reasons)
        assert usage.completion_tokens == sum(num_logprobs)
        assert usage.prompt_tokens == len(seen[0][0])
        check_recorded(gateway, episode)
        assert gateway.run(lambda: recorded(episode)) == seen, "in the order of the choices"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_text_is_cut_off_and_the_conversation_goes_on(is_streamed: bool) -> None:
    format = minimax()
    with live(format, [Message("assistant", "one two three four", "t"), Message("assistant", "ok", "t")]) as gateway:
        episode, key = gateway.episode()
        with connected(gateway, key) as client:
            messages: list[Any] = [{"role": "user", "content": "Count"}]
            received = chat(client, messages, is_streamed=is_streamed, stop=["thr", "zz"])
            assert received.content == "one two "
            messages += [received.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
            assert chat(client, messages, is_streamed=is_streamed).content == "ok"
        check_recorded(gateway, episode)
        assert gateway.counts.num_encoded == num_new_tokens(format, gateway.engine.seen())
        assert format.tokenizer.decode(list(gateway.engine.seen()[0][1])).endswith("thr")


def test_calls_of_one_episode_and_of_many_run_at_once() -> None:
    format = minimax()
    with live(format, delay_s=0.002) as gateway:
        episodes = [gateway.episode(f"task-{number}") for number in range(4)]

        def ask(number: int) -> str:
            with connected(gateway, episodes[number % 4][1]) as client:
                messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
                options: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 20, "seed": number}
                assert parts_of(client.chat.completions.create(**options, stream=number % 2 == 0))
            return f"question {number}"

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            questions = list(pool.map(ask, range(16)))
        check_recorded(gateway, *(episode for episode, _ in episodes))
        for number, (episode, _) in enumerate(episodes):
            prompts = [ids for ids, _ in gateway.run(functools.partial(recorded, episode))]
            asked = [format.render([Message("user", text)], generation=True).ids for text in questions[number::4]]
            assert sorted(prompts) == sorted(map(tuple, asked))


def test_errors_are_the_exceptions_of_the_client() -> None:
    with live(minimax()) as gateway:
        _, key = gateway.episode()
        with connected(gateway, "m2f-wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with connected(gateway, key) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            assert client.models.retrieve("policy").id == "policy"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("other")
            with pytest.raises(openai.BadRequestError, match="temperatur") as caught:
                chat(client, [{"role": "user", "content": "x"}], is_streamed=False, extra_body={"temperatur": 1})
            assert caught.value.param == "temperatur"
            with pytest.raises(openai.BadRequestError, match="context"):
                client.completions.create(model="m", prompt=[5] * 5000)
            with pytest.raises(openai.BadRequestError, match="expected ids below"):
                client.completions.create(model="m", prompt=[2**31 - 1])
            with pytest.raises(openai.BadRequestError):  # no conversation ends so
                chat(client, [{"role": "tool", "tool_call_id": "x", "content": "?"}], is_streamed=True)
            with pytest.raises(openai.NotFoundError):
                client.embeddings.create(model="m", input="x")
