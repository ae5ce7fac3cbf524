"""The sampling of an episode replaces what its requests ask for; the record of a call tells both."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from m2forge.gateway.config import GatewayConfig
from m2forge.records import Call, RequestedSampling, Sampling
from m2forge.tree.codec import decode_tree
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_retry_http import PATHS, post
from tests.gateway.live import ADMIN_KEY, Live, live

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
DECIDED = Sampling(temperature=0.8)
WISHES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "temperature": 0,
        "top_p": 0.5,
        "presence_penalty": 1.0,
        "frequency_penalty": -0.5,
        "seed": 7,
    },
    "/v1/completions": {"temperature": 0, "top_p": 0.5, "seed": -7},
    "/v1/responses": {"temperature": 0, "top_p": 0.5},
    "/v1/messages": {"temperature": 0, "top_p": 0.5, "top_k": 3},
}
REQUESTED = {
    "/v1/chat/completions": RequestedSampling(Sampling(0.0, 0.5, presence_penalty=1.0, frequency_penalty=-0.5), 7),
    "/v1/completions": RequestedSampling(Sampling(0.0, 0.5), -7),
    "/v1/responses": RequestedSampling(Sampling(0.0, 0.5)),
    "/v1/messages": RequestedSampling(Sampling(0.0, 0.5, top_k=3)),
}


def create(gateway: Live, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{gateway.url}/episodes", headers=ADMIN, json=body)


def calls_of(gateway: Live, id: str) -> list[Call]:
    tree = decode_tree(httpx2.get(f"{gateway.url}/episodes/{id}/tree", headers=ADMIN).content)
    return [tree.call(index) for index in range(len(tree.samples))]


@pytest.mark.parametrize("path", WISHES)
def test_the_episodes_sampling_replaces_what_requests_ask_for(path: str) -> None:
    with live(minimax()) as gateway:
        made = create(gateway, id="own", sampling={"temperature": 0.8}).json()
        assert post(gateway, made["key"], PATHS[path] | WISHES[path], path).status_code == 200
        (prompt,) = gateway.engine.prompts
        assert (prompt.sampling, prompt.seed) == (DECIDED, None)
        (call,) = calls_of(gateway, "own")
        assert (call.sampling, call.requested) == (DECIDED, REQUESTED[path])


def test_a_gateway_without_set_sampling_serves_requests_as_asked() -> None:
    path = "/v1/chat/completions"
    with live(minimax()) as gateway:
        made = create(gateway, id="own").json()
        assert post(gateway, made["key"], PATHS[path] | WISHES[path], path).status_code == 200
        (prompt,) = gateway.engine.prompts
        assert (prompt.sampling, prompt.seed) == (REQUESTED[path].sampling, 7)
        assert not prompt.returns_experts, "no request asked for experts, which cost bandwidth"
        (call,) = calls_of(gateway, "own")
        assert (call.sampling, call.requested) == (REQUESTED[path].sampling, None)


def test_a_request_that_asks_for_what_is_set_leaves_no_note() -> None:
    with live(minimax()) as gateway:
        made = create(gateway, id="own", sampling={}).json()
        assert post(gateway, made["key"], PATHS["/v1/chat/completions"] | {"temperature": 1}).status_code == 200
        assert [(call.sampling, call.requested) for call in calls_of(gateway, "own")] == [(Sampling(), None)]


def test_the_decision_and_what_was_asked_survive_a_restart(tmp_path: Path) -> None:
    config, path = GatewayConfig(port=0, journal=str(tmp_path)), "/v1/chat/completions"
    with live(minimax(), config=config) as gateway:
        made = create(gateway, id="own", sampling={"temperature": 0.8}).json()
        assert post(gateway, made["key"], PATHS[path] | WISHES[path], path).status_code == 200
        before = calls_of(gateway, "own")
    with live(minimax(), config=config) as gateway:
        assert post(gateway, made["key"], PATHS[path] | {"temperature": 0.0}, path).status_code == 200
        (prompt,) = gateway.engine.prompts
        assert prompt.sampling == DECIDED
        after = calls_of(gateway, "own")
        assert after[:1] == before
        assert after[1].requested == RequestedSampling(Sampling(0.0))
        shown = httpx2.get(f"{gateway.url}/episodes/own", headers=ADMIN).json()
        assert shown["sampling"]["temperature"] == 0.8


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"top_p": 0}, "top_p: expected a number above 0"),
        ({"temperature": "hot"}, "sampling: temperature"),
        ([], "expected an object"),
    ],
)
def test_sampling_that_cannot_be_is_refused(sampling: Any, message: str) -> None:
    with live(minimax()) as gateway:
        refused = create(gateway, sampling=sampling)
        assert refused.status_code == 400
        assert message in refused.text
