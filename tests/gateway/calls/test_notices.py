"""What is not honoured of a request: a header tells the client, the record says so, a strict gateway refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.dialects.types import HEADER, Notice
from m2forge.gateway.episodes.journal import Answered, decode_entry, encode_entry, read_entries
from m2forge.pool.stored import CallWriter, read_tree
from m2forge.records import Sampling
from m2forge.text.message import Message
from m2forge.tree.codec import decode_tree, encode_tree
from tests.gateway.dialogue import FORMATS, call, minimax
from tests.gateway.episodes.test_retry_http import PATHS, post
from tests.gateway.live import check_recorded, live, num_new_tokens
from tests.text.draw import TOOLS

TOOL = {"name": "look", "input_schema": {"type": "object"}}
NOTED: dict[str, tuple[dict[str, Any], list[Notice]]] = {
    "/v1/chat/completions": (
        {"reasoning_effort": "low", "tool_choice": "required"},
        [Notice.REASONING_EFFORT, Notice.TOOL_CHOICE],
    ),
    "/v1/responses": (
        {"tool_choice": "required", "text": {"verbosity": "low"}},
        [Notice.TEXT_VERBOSITY, Notice.TOOL_CHOICE],
    ),
    "/v1/messages": ({"tools": [TOOL], "tool_choice": {"type": "any"}}, [Notice.TOOL_CHOICE]),
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", NOTED)
def test_notices_are_sent_and_recorded(path: str, is_streamed: bool, tmp_path: Path) -> None:
    changes, notices = NOTED[path]
    config = GatewayConfig(port=0, journal=str(tmp_path))
    with live(minimax(), config=config) as gateway:
        episode, key = gateway.episode()
        body = PATHS[path] | changes | {"stream": is_streamed}
        responses = [post(gateway, key, body, path), post(gateway, key, body, path, x_stainless_retry_count="1")]
        assert [response.headers[HEADER] for response in responses] == ["; ".join(notices)] * 2
        assert HEADER not in post(gateway, key, PATHS[path], path).headers
        tree = gateway.run(lambda: episode.tree)
        assert [made.notices for made in tree.calls()] == [tuple(notices), ()]
    with live(minimax(), config=config) as restarted:
        kept = restarted.run(lambda: restarted.episodes.get(episode.id).calls())  # type: ignore[union-attr]
        assert [made.notices for made in kept] == [tuple(notices), ()]
    assert [made.notices for made in decode_tree(encode_tree(tree)).calls()] == [tuple(notices), ()]
    stored = [call.data for call in CallWriter(tree.vocab_size).write_tree(tree)]
    assert [made.notices for made in read_tree(stored, tree.vocab_size, "a").calls()] == [tuple(notices), ()]


def test_a_journal_without_notices_is_read(tmp_path: Path) -> None:
    with live(minimax(), config=GatewayConfig(port=0, journal=str(tmp_path))) as gateway:
        _, key = gateway.episode()
        assert post(gateway, key, PATHS["/v1/chat/completions"]).status_code == 200
    (path,) = tmp_path.rglob("*.journal")
    (entry,) = (entry for entry in read_entries(path)[0] if isinstance(entry, Answered))
    data = encode_entry(entry)
    size = int.from_bytes(data[:4], "little")
    head = json.loads(data[4 : 4 + size])
    del head["notices"]
    older = json.dumps(head, separators=(",", ":")).encode()
    read = decode_entry(len(older).to_bytes(4, "little") + older + data[4 + size :])
    assert isinstance(read, Answered)
    assert read.notices == ()


@pytest.mark.parametrize("path", NOTED)
def test_a_strict_gateway_refuses_what_it_would_note(path: str) -> None:
    changes, notices = NOTED[path]
    with live(minimax(), config=GatewayConfig(port=0, strict=True)) as gateway:
        episode, key = gateway.episode()
        assert post(gateway, key, PATHS[path], path).status_code == 200
        refused = post(gateway, key, PATHS[path] | changes, path)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(f"{notices[0]}, and gateway.strict")
        if path != "/v1/messages":
            assert refused.json()["error"]["param"] == notices[0].field
        assert episode.num_calls == 1


def test_a_count_has_its_notices_too() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}}
    for is_strict in (False, True):
        with live(minimax(), config=GatewayConfig(port=0, strict=is_strict)) as gateway:
            response = post(gateway, gateway.episode()[1], body, "/v1/messages/count_tokens")
            assert response.status_code == (400 if is_strict else 200)
            assert response.headers.get(HEADER) == (None if is_strict else Notice.THINKING)


def test_sampling_is_noted_only_if_the_run_changes_it() -> None:
    path = "/v1/chat/completions"
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        _, key = gateway.run(lambda: gateway.episodes.create("t", sampling=Sampling(temperature=0.8)))
        asked: list[tuple[dict[str, Any], bool]] = [
            ({}, False),
            ({"temperature": 0.8, "top_p": 1}, False),
            ({"temperature": 0.7}, True),
            ({"temperature": 0.8, "top_k": 5}, True),
            ({"seed": 3}, True),
        ]
        for changes, is_noted in asked:
            response = post(gateway, key, PATHS[path] | changes)
            assert response.status_code == 200
            assert response.headers.get(HEADER) == (Notice.SAMPLING if is_noted else None), changes


def test_images_become_the_configured_text() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,x"}}
    body = PATHS["/v1/chat/completions"] | {"messages": [{"role": "user", "content": [part]}]}
    with live(minimax(), config=GatewayConfig(port=0, image_placeholder="(a picture)")) as gateway:
        assert post(gateway, gateway.episode()[1], body).headers[HEADER] == Notice.IMAGE
        assert "(a picture)" in minimax().tokenizer.decode(list(gateway.engine.seen()[0][0]))


@pytest.mark.parametrize("blank", [None, "", " \n", [{"type": "text", "text": "\n"}]])
@pytest.mark.parametrize("content", ["", "\n\n"])
@pytest.mark.parametrize("name", FORMATS)
def test_blank_content_beside_calls_is_no_content(name: str, content: str, blank: Any) -> None:
    """Whatever white space the model sampled there and the client sends back, the conversation is one chain."""
    format = FORMATS[name]()
    said = [Message("assistant", content, "Hm.", (call(query="a"),)), Message("assistant", "So.")]
    tools = [{"type": "function", "function": {"name": "search", "parameters": dict(TOOLS[0].parameters)}}]
    with live(format, said) as gateway:
        episode, key = gateway.episode()
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
        message = post(gateway, key, body).json()["choices"][0]["message"]
        assert message["tool_calls"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        messages = [*body["messages"], message | {"content": blank}, result]
        assert post(gateway, key, body | {"messages": messages}).status_code == 200
        assert not any(episode.num_divergences.values())
        check_recorded(gateway, episode)
        assert gateway.counts.num_encoded == num_new_tokens(format, gateway.engine.seen())


@pytest.mark.parametrize("is_large", [False, True])
def test_references_resolve_within_their_episode(is_large: bool) -> None:
    """Large bodies are read in a worker process."""
    path, said = "/v1/responses", [Message("assistant", "One.", "Hm."), Message("assistant", "Two.")]
    user = {"role": "user", "content": "Hi"}
    with live(minimax(), said, GatewayConfig(port=0, num_body_workers=1)) as gateway:
        episode, key = gateway.episode()
        output = post(gateway, key, {"model": "m", "input": [user]}, path).json()["output"]
        references = [{"type": "item_reference", "id": item["id"]} for item in output]
        body: dict[str, Any] = {"model": "m", "input": [user, *references, user]}
        body |= {"client_metadata": {"filler": "x" * 200_000}} if is_large else {}
        _, other_key = gateway.episode()
        refused = post(gateway, other_key, body, path)
        assert refused.status_code == 400
        assert f"no response of this episode has the item '{output[0]['id']}'" in refused.text
        assert post(gateway, key, body, path).status_code == 200
        assert not any(episode.num_divergences.values())
        assert gateway.counts.num_encoded == num_new_tokens(minimax(), gateway.engine.seen())
