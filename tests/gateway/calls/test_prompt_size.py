"""Texts that are far too long: refused before anything is made of them, and nothing of them stays."""

import gc
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from m2forge.gateway.calls.body import PromptSizes, measure_overhead
from m2forge.gateway.config import Budget
from m2forge.gateway.dialects.types import BadRequestError, CompletionRequest
from m2forge.gateway.episodes.episode import ClosedError
from m2forge.gateway.episodes.registry import Episodes
from m2forge.gateway.history.turn import Turn, keeps_thinking
from m2forge.text.format import ChatFormat, make_format
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.tokenizer import Tokenizer, train_tokenizer
from tests.gateway.dialogue import TEMPLATE, chatml, minimax
from tests.gateway.episodes.test_retry_http import BODY, PATHS, post
from tests.gateway.history.test_rendering import Watched
from tests.gateway.live import CONTEXT, Live, live
from tests.text.draw import CHATML_SPECIALS, with_chat_template

LONG = "some words " * (20 * CONTEXT)


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[Watched, Live]]:
    """One gateway, and with it one process that reads large bodies."""
    format = Watched(minimax())
    with live(format) as gateway:
        yield format, gateway


@pytest.mark.slow
@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
def test_a_text_far_beyond_the_context_is_refused_untokenized(
    path: str, watched: tuple[Watched, Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()
    encode = Tokenizer.encode

    def note(self: Tokenizer, text: str) -> list[int]:
        if len(text) > CONTEXT:
            threads.add(threading.current_thread())
        return encode(self, text)

    format, gateway = watched
    monkeypatch.setattr(Tokenizer, "encode", note)
    episode, key = gateway.episode()
    gateway.run(lambda: threads.add(threading.current_thread()))
    (loop_thread,) = threads
    threads.clear()
    messages = [{"role": "user", "content": LONG}]
    changed: Any = {"messages": messages}
    if path == "/v1/responses":
        changed = {"input": LONG}
    elif path == "/v1/completions":
        changed = {"prompt": LONG}
    body = PATHS.get(path, {"model": "m"}) | changed
    assert keeps_thinking(format)  # found out once for each format, on made-up conversations
    given = format.num_messages
    response = post(gateway, key, body, path)
    assert response.status_code == 400
    error = response.json()["error"]
    if path.startswith("/v1/messages"):
        assert re.fullmatch(
            r"prompt is too long: \d+ tokens > 4096 maximum", error["message"].removeprefix("messages: ")
        )
    else:
        assert "4096" in error["message"]
        assert error["code"] == "context_length_exceeded"
    # Nothing of it was made tokens where everybody waits.
    assert loop_thread not in threads
    assert format.num_messages == given
    assert not episode.history._beginnings
    assert (episode.num_running, episode.num_calls) == (0, 0)


def test_a_prompt_that_leaves_no_room_is_refused_and_forgotten() -> None:
    with live(minimax()) as gateway:
        episode, key = gateway.episode()
        for number in range(3):
            messages = [{"role": "user", "content": f"{number} " + "x y z " * 2000}]
            response = post(gateway, key, BODY | {"messages": messages})
            assert response.status_code == 400
            assert "maximum context length is 4096 tokens" in response.json()["error"]["message"]
        assert not episode.history._beginnings


WORD = "pneumonoultramicroscopic"


def test_long_words_may_fit() -> None:
    """A text of few long tokens, which its bytes alone would not tell from one that is too long."""
    tokenizer = train_tokenizer([f"{WORD} " * 500], 400, CHATML_SPECIALS)
    format = make_format("chatml", with_chat_template(tokenizer, TEMPLATE))
    text = f" {WORD}" * 900
    assert len(tokenizer.encode(text)) < 1000
    sizes = PromptSizes.of(format, 1000, 100)

    def check(request: CompletionRequest) -> None:
        sizes.check_counts(request)
        if sizes.needs_count(request, 100_000):
            sizes.check_text(request)

    check(CompletionRequest((Message("user", text),)))
    check(CompletionRequest((), prompt=text))
    check(CompletionRequest((), prompt=tuple(range(100)) * 10))
    for long in (
        CompletionRequest((Message("user", 2 * text),)),
        CompletionRequest((Message("user", text), Message("assistant", "a", text), Message("user", "x"))),
        CompletionRequest((Message("user", "x"),), (Tool("f", 2 * text),)),
        CompletionRequest((Message("user", "x"),), (Tool(2 * text),)),
        CompletionRequest(
            (Message("user", "x"), Message("assistant", "", "", (ToolCall(2 * text, {}),)), Message("tool", "y"))
        ),
        CompletionRequest((Message("user", "x"),), (Tool("f", "", {"type": "object", "description": 2 * text}),)),
        CompletionRequest((), prompt=2 * text),
        CompletionRequest((), prompt=tuple(range(100)) * 11),
    ):
        with pytest.raises(BadRequestError, match="the context 1000"):
            check(long)
    # The same asked in a body that is short for the context is not looked at.
    assert not sizes.needs_count(CompletionRequest((), prompt=2 * text), 8000)


def test_counting_keeps_no_more_than_the_last_prompt() -> None:
    episode, _ = Episodes(minimax()).create(budget=Budget(max_calls=1))

    def num_turns() -> int:
        gc.collect()
        return sum(type(item) is Turn for item in gc.get_objects())

    episode.count([Message("user", "0")])
    before = num_turns()
    sizes = [episode.count([Message("user", f"{number} some words")]) for number in range(50)]
    assert num_turns() == before
    opening = episode.open([Message("user", "49 some words")])
    assert opening.num_encoded == 0, "what was counted last is not encoded again"
    assert opening.ids.size == sizes[-1]
    episode.close()
    with pytest.raises(ClosedError):
        episode.count([Message("user", "x")])


def test_a_closed_episode_counts_nothing() -> None:
    with live(minimax()) as gateway:
        episode, key = gateway.episode()
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        assert post(gateway, key, body, "/v1/messages/count_tokens").status_code == 200
        gateway.run(episode.close)
        assert post(gateway, key, body, "/v1/messages/count_tokens").status_code == 403


@pytest.mark.parametrize("format", [minimax(), minimax(drop_thinking=True), chatml(), chatml(drop_thinking=True)])
def test_a_conversation_has_the_tokens_its_messages_count(format: ChatFormat) -> None:
    rng = random.Random(3)
    overhead = measure_overhead(format)
    assert min(overhead["user"], overhead["assistant"]) >= 2
    for _ in range(30):
        messages = [Message("system", "s")] if rng.random() < 0.5 else []
        for _ in range(rng.randrange(1, 12)):
            content = rng.choice(["", "a", "\n\n", "some words"])
            messages.append(Message("user", content))
            if rng.random() < 0.5:
                calls = tuple(ToolCall("f", {}) for _ in range(rng.randrange(1, 4)))
                messages += [Message("assistant", content, "", calls), *(Message("tool", content) for _ in calls)]
            messages.append(Message("assistant", content, rng.choice(["", "hm"])))
        least = sum(overhead[message.role] for message in messages)
        assert 0 < least <= len(format.render(messages).ids)


@pytest.mark.slow
def test_more_messages_than_the_context_are_refused_unrendered(watched: tuple[Watched, Live]) -> None:
    format, gateway = watched
    episode, key = gateway.episode()
    given = format.num_messages
    messages = [{"role": "user", "content": ""}] * 3000
    response = post(gateway, key, BODY | {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert format.num_messages == given
    assert not episode.history._beginnings


def test_the_number_of_items_is_bounded_by_the_context() -> None:
    format = minimax()
    least = min(cost for cost in measure_overhead(format).values() if cost)
    for context in (100, 32_768, 1_000_000):
        sizes = PromptSizes.of(format, context, None)
        assert sizes.max_items == max(1024, context // least)
    # As many messages as the context can hold are no reason to refuse; one limit or the other refuses more.
    sizes = PromptSizes.of(format, 100_000, None)
    messages = [Message("user", "a")] * (100_000 // sizes.overhead["user"])
    sizes.check_counts(CompletionRequest(tuple(messages)))
    with pytest.raises(BadRequestError):
        sizes.check_counts(CompletionRequest((*messages, *messages)))
    tools = tuple(Tool(f"f{number}") for number in range(2000))
    with pytest.raises(BadRequestError, match="max_items"):
        PromptSizes.of(format, 1000, None).check_counts(CompletionRequest((Message("user", "a"),), tools))
    assert PromptSizes.of(format, 1000, 7).max_items == 7


def test_tools_that_the_model_is_not_shown_count_nowhere() -> None:
    sizes = PromptSizes.of(minimax(), 1000, 1024)
    tools = tuple(Tool(f"f{number}", "some words " * 20) for number in range(2000))
    request = CompletionRequest((Message("user", "a"),), tools, tool_choice="none")
    sizes.check_counts(request)
    sizes.check_text(request)
    assert not sizes.needs_count(request, 1 << 20)
    shown = CompletionRequest(request.messages, tools[:1000])
    assert sizes.needs_count(shown, 1 << 20)
    with pytest.raises(BadRequestError):
        sizes.check_text(shown)
