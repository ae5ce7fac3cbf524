"""What the loop asks of a gateway: what an episode recorded, and to let it go."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.tree.codec import decode_tree
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_retry_http import BODY, post
from tests.gateway.live import ADMIN_KEY, Live, live


@contextmanager
def three_episodes(journal: Path) -> Iterator[tuple[Live, httpx2.Client, list[dict[str, str]]]]:
    """A gateway of which one closed episode stays in memory, the loop's client, and what it was told of each."""
    config = GatewayConfig(port=0, journal=str(journal), max_closed=1)
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with live(minimax(), config=config) as gateway, httpx2.Client(base_url=gateway.url, headers=admin) as client:
        yield gateway, client, [client.post("/episodes", json={"id": id}).json() for id in ("one", "two", "three")]


def test_a_tree_is_told_and_an_episode_that_is_deleted_is_gone(tmp_path: Path) -> None:
    with three_episodes(tmp_path) as (gateway, client, made):
        for episode in made:
            assert post(gateway, episode["key"], BODY).status_code == 200
            client.post(f"/episodes/{episode['id']}/close", json={})
        tree = decode_tree(client.get("/episodes/one/tree").content)
        assert len(tree.samples) == 1
        assert tree.samples[0].episode == "one"
        assert client.post("/episodes/one/tree").status_code == 405
        for episode in made[:2]:  # one of them has left memory by now
            assert client.delete(f"/episodes/{episode['id']}").json() == {"id": episode["id"]}
            assert client.get(f"/episodes/{episode['id']}").status_code == 404
            assert client.delete(f"/episodes/{episode['id']}").status_code == 404
            assert post(gateway, episode["key"], BODY).status_code == 401
        assert journal_ids(tmp_path) == ["three"]
        assert httpx2.delete(f"{gateway.url}/episodes/three", headers={"x-api-key": made[2]["key"]}).status_code == 401


ROUTES = {
    "/v1/chat/completions": "POST",
    "/v1/messages/count_tokens": "POST",
    "/v1/models": "GET",
    "/v1/models/": "GET",
    "/v1/models/a/b": "GET",
    "/v1/tools": "GET",
    "/v1/tools/call": "POST",
    "/v1/mcp": "POST",
    "/health": "GET",
    "/metrics": "GET",
    "/episodes": "POST, DELETE",
    "/episodes/": "POST, DELETE",
    "/episodes/one": "GET, DELETE",
    "/episodes/one/": "GET, DELETE",
    "/episodes/one/reward": "POST",
    "/episodes/one/take": "POST",
}


def test_routes_refuse_other_methods_and_paths(tmp_path: Path) -> None:
    with three_episodes(tmp_path) as (gateway, client, _):
        for path, methods in ROUTES.items():
            answer = client.put(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, methods), path
        for path in ("/", "/v1", "/v1/tools/", "/episodesone", "/episodes//take", "/episodes/one/take/", "/health/"):
            assert client.get(path).status_code == 404, path
        for path in ("/episodes", "/episodes/none", "/episodes/one/nothing"):
            assert httpx2.get(gateway.url + path).status_code == 401, "only an admin learns what there is"


def test_one_request_closes_with_the_tree_and_one_deletes_many(tmp_path: Path) -> None:
    with three_episodes(tmp_path) as (gateway, client, made):
        for episode in made:
            assert post(gateway, episode["key"], BODY).status_code == 200
            for _ in range(2):  # who does not know whether it was answered asks again
                tree = decode_tree(client.post(f"/episodes/{episode['id']}/take", json={"failure": "late"}).content)
                assert [sample.episode for sample in tree.samples] == [episode["id"]]
            assert post(gateway, episode["key"], BODY | {"seed": 1}).status_code == 403
        assert client.get("/episodes/one").json()["closed"]["failure"] == "late"
        assert client.post("/episodes/none/take").status_code == 404
        response = client.request("DELETE", "/episodes", json={"ids": ["one", "none", "two", "one"]})
        assert response.json() == {"num_deleted": 2}
        assert journal_ids(tmp_path) == ["three"]
        assert post(gateway, made[0]["key"], BODY).status_code == 401
        for wrong in ({}, {"ids": "three"}, {"ids": [3]}):
            assert client.request("DELETE", "/episodes", json=wrong).status_code == 400
        own = {"x-api-key": made[2]["key"]}
        assert httpx2.request("DELETE", f"{gateway.url}/episodes", headers=own, json={"ids": []}).status_code == 401
