"""What the server answers, to whom, and what it refuses."""

import json
import random
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from m2forge.page.app import POLICY
from m2forge.page.pool_reader import PoolReader
from m2forge.page.serve import find_key
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool
from m2forge.pool.queue import read_queue
from m2forge.pool.stored import read_units
from m2forge.pool.tables import unit_table
from m2forge.records import Task
from m2forge.reward.config import AdvantageConfig
from m2forge.rl.importance_ratio import read_ratios
from m2forge.rl.trainer import make_trees
from m2forge.tasks.catalog import family_of
from m2forge.text.format import ChatFormat
from tests.page.conftest import serving
from tests.page.scene import Scene, conversation_calls, make_call

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def url(done: Path) -> Iterator[str]:
    with serving(done) as found:
        yield found


def get(url: str, headers: dict[str, str] | None = None) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {})) as response:
        assert response.headers["content-security-policy"] == POLICY
        return json.loads(response.read())


def status(url: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}, method=method)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_run_its_curves_and_its_window(url: str) -> None:
    assert get(f"{url}/api/run")["state"] == "finished"
    curves = get(f"{url}/api/curves")
    assert curves["steps"] == [1, 2, 3, 4, 5, 6]
    assert len(curves["series"]["reward"]) == 6
    again = get(f"{url}/api/curves?revision={curves['revision']}&step=6")
    assert (again["steps"], again["is_whole"]) == ([6], False)
    queue = get(f"{url}/api/queue")
    assert (queue["queue"], queue["window"], len(queue["units"])) == (8, 6, 8)
    assert queue["tally"]["trained"]["num_units"] == 24
    past = get(f"{url}/api/past")
    assert past["heads"] == [0, 4, 8, 12, 16, 20, 24]
    assert set(past["rewards"]) == {"agent", "general", "reasoning"}


def test_episodes_are_filtered_and_paged(url: str) -> None:
    everything = get(f"{url}/api/episodes?limit=200")
    assert everything["total"] == len(everything["episodes"]) == 64
    assert [episode["id"] for episode in everything["episodes"]] == list(range(64, 0, -1))
    page = get(f"{url}/api/episodes?limit=5&offset=10&upto=60")
    assert [episode["id"] for episode in page["episodes"]] == [50, 49, 48, 47, 46]
    trained = get(f"{url}/api/episodes?state=trained&domain=agent&limit=200")
    assert {(episode["state"], episode["domain"]) for episode in trained["episodes"]} == {("trained", "agent")}
    solved = get(f"{url}/api/episodes?least=0.9&limit=200&order=oldest")["episodes"]
    assert solved
    assert all(episode["reward"] >= 0.9 for episode in solved)
    assert [episode["id"] for episode in solved] == sorted(episode["id"] for episode in solved)
    assert get(f"{url}/api/episodes?most=0.5&least=0.4")["total"] == 0
    assert {e["family"] for e in get(f"{url}/api/episodes?task=counters&limit=200")["episodes"]} == {"counters"}
    assert get(f"{url}/api/episodes?text=no%20idea")["total"] > 0
    assert get(f"{url}/api/episodes?text=100%25")["total"] == 0
    assert get(f"{url}/api/episodes?order=longest&limit=1")["episodes"][0]["num_calls"] > 1


def test_an_episode_with_its_calls(url: str) -> None:
    (episode,) = get(f"{url}/api/episodes?task=chain&state=trained&least=0.9&limit=1")["episodes"]
    path = f"{url}/api/episodes/{episode['id']}"
    head, outline = get(path), get(f"{path}/outline")
    assert head["num_calls"] == outline["num_calls"] == len(outline["parents"])
    assert outline["parents"] == list(range(-1, head["num_calls"] - 1))
    assert len(set(outline["chains"])) == 1
    assert len(head["advantages"]) == head["num_calls"]
    assert {other["id"] for other in head["group_episodes"]} >= {episode["id"]}
    calls = get(f"{path}/calls?start=0&end=50")["calls"]
    assert [call["call"] for call in calls] == list(range(head["num_calls"]))
    kinds = [part["kind"] for call in calls for part in call["parts"] if part["kind"] != "marker"]
    assert kinds[:4] == ["system", "user", "thinking", "call"]
    assert "observation" in kinds
    assert calls[0]["tools"] == ["look"]
    assert all(not call["problems"] for call in calls)
    sampled = [part for part in calls[0]["parts"] if "logprobs" in part]
    size = outline["ends"][0] - outline["prompts"][0]
    assert sum(len(part["logprobs"]) for part in sampled) == sum(len(part["texts"]) for part in sampled) == size
    tokens = get(f"{path}/tokens?call=0&start=0&end={outline['ends'][0]}")["texts"]
    assert "".join(tokens) == "".join(text for part in calls[0]["parts"] for text in part["texts"])
    found = get(f"{path}/search?text=START%20AT")
    assert (found["total"], found["calls"]) == (1, [[0, 1]])


def test_advantages_are_the_trainers(done: Path, url: str) -> None:
    with PoolReader(PoolConfig(url=f"sqlite:///{done / 'pool.db'}")).read() as connection:
        ids = list(connection.execute(select(unit_table.c.id).where(unit_table.c.step == 5)).scalars())
        vocab_size = read_queue(connection).vocab_size
        units = read_units(connection, ids, vocab_size)
    expected: dict[str, list[float]] = {}
    for tree in make_trees(units, AdvantageConfig(), vocab_size):
        for sample in tree.samples:
            expected.setdefault(sample.episode, []).append(round(sample.advantage, 5))
    assert any(any(values) for values in expected.values())
    shown = {e["name"]: e["id"] for e in get(f"{url}/api/episodes?limit=200")["episodes"]}
    for name, values in expected.items():
        assert get(f"{url}/api/episodes/{shown[name]}")["advantages"] == values


def test_ratios_are_those_that_the_run_keeps(done: Path, url: str) -> None:
    kept = read_ratios(done / "ratios", 6)
    assert kept is not None
    absences = {}
    for episode in get(f"{url}/api/episodes?limit=200")["episodes"]:
        path = f"{url}/api/episodes/{episode['id']}"
        absences[episode["state"], episode["step"]] = get(path)["no_ratios"]
        if episode["step"] == 6:
            for call in get(f"{path}/calls?start=0&end=50")["calls"]:
                found = [ratio for part in call["parts"] for ratio in part.get("ratios", [])]
                assert found == pytest.approx(np.exp(kept[f"{episode['name']}/{call['call']}"]).tolist(), rel=1e-3)
                sampled = next(part for part in call["parts"] if "ratios" in part)
                more = get(f"{path}/tokens?call={call['call']}&start={sampled['start'] + 1}&end={sampled['start'] + 3}")
                assert more["ratios"] == found[1:3]
    assert absences["trained", 6] is None
    assert absences["trained", 5] == "those of step 5 are not stored"
    assert absences["finished", None] == "it has not been trained"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/episodes/0", 404),
        ("/api/episodes/99999999999999999999999999", 404),
        ("/api/episodes/-1", 404),
        ("/api/episodes/x", 404),
        ("/api/episodes/1/calls?start=-1", 400),
        ("/api/episodes/1/calls?start=1e3", 400),
        ("/api/episodes/1/tokens?call=7000&start=0&end=5", 404),
        ("/api/episodes/1/search", 400),
        ("/api/episodes?state=nice", 400),
        ("/api/episodes?order=id;--", 400),
        ("/api/episodes?least=nan", 400),
        ("/api/episodes?text=" + "x" * 501, 400),
        ("/static/..%2fapp.py", 404),
        ("/static/../app.py", 404),
        ("/static/%2e%2e%2fguard.py", 404),
        ("/static/", 404),
        ("/config.toml", 404),
    ],
)
def test_what_makes_no_sense_is_refused(url: str, path: str, code: int) -> None:
    found, body = status(url + path)
    assert found == code
    assert json.loads(body)["error"]


def test_nothing_can_be_written_and_no_foreign_name_is_answered(url: str) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert status(f"{url}/api/run", method=method)[0] == 405
    for host in ("evil.example", "evil.example:8600", "127.0.0.1.evil.example", "localhost.evil.example", ""):
        assert status(f"{url}/api/run", {"Host": host})[0] == 421
    for host in ("localhost:1", "127.0.0.1", "[::1]:8600"):
        assert status(f"{url}/api/run", {"Host": host})[0] == 200


def test_elsewhere_a_key_is_asked_for(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("M2FORGE_PAGE_KEY", raising=False)
    assert find_key("127.0.0.1") is None
    with pytest.raises(ValueError, match="set a key in M2FORGE_PAGE_KEY"):
        find_key("0.0.0.0")
    monkeypatch.setenv("M2FORGE_PAGE_KEY", "abc")
    assert find_key("0.0.0.0") == "abc"
    with serving(done, key="abc") as url:
        assert status(f"{url}/api/run", {"Host": "box.example"})[0] == 401
        assert status(f"{url}/api/run?key=abd")[0] == 401
        assert status(f"{url}/api/run", {"Cookie": "m2forge_page=abc"})[0] == 200
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"{url}/?key=abc") as response:
            assert response.status == 200
            assert "key" not in response.url


def test_an_empty_folder_and_a_run_without_a_pool_are_served(tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        assert get(f"{url}/api/run")["state"] == "empty"
        assert get(f"{url}/api/curves")["steps"] == []
        code, body = status(f"{url}/api/queue")
        assert (code, json.loads(body)["reason"]) == (503, "pool")
        # The run begins while the page is open.
        (tmp_path / "config.toml").write_text("[agent]\n[curriculum]\n[pool]\n")
        assert status(f"{url}/api/queue")[0] == 503
        Pool(PoolConfig(url=f"sqlite:///{tmp_path / 'pool.db'}"), 100).close()
        assert get(f"{url}/api/queue")["num_queued"] == 0
        assert get(f"{url}/api/episodes")["total"] == 0
        assert get(f"{url}/api/past")["steps"] == []


def test_branches_and_cut_parts(format: ChatFormat, tmp_path: Path) -> None:
    """A long observation comes in pieces; a call that goes back to an earlier one says so."""
    scene = Scene(tmp_path / "run", format, queue=4, window=2, group_size=1)
    scene.pool.put([(scene.next_task(), 1)])
    (lease,) = scene.pool.lease("loop", 1)
    task: Task = lease.task
    calls = conversation_calls(format, task, family_of(task).demonstrate(task, random.Random(0)), 0, random.Random(0))
    first = calls[0]
    whole = [*first.prompt_ids.tolist(), *first.response_ids.tolist()]
    encode = format.tokenizer.encode
    long = [*encode("\n"), format.tokenizer.special("]~b]"), *encode("tool\n" + "1 2 " * 2000)]
    draw = random.Random(1)
    answer = first.response_ids.tolist()
    other = make_call(whole + long, answer, 0, 1.0, draw)
    branch = make_call(first.prompt_ids.tolist(), [5, 6, 7], 1, 2.0, draw)
    scene.record(lease, [first, other, branch])
    scene.finish(lease, 1.0, "x")
    scene.pool.close()
    with serving(scene.run_dir) as url:
        outline = get(f"{url}/api/episodes/1/outline")
        assert outline["parents"] == [-1, 0, 0]
        assert outline["starts"][2] == first.prompt_ids.size
        assert outline["chains"] == [0, 0, 2]
        (shown,) = get(f"{url}/api/episodes/1/calls?start=1&end=2")["calls"]
        part = next(part for part in shown["parts"] if part["kind"] == "observation")
        assert len(part["texts"]) < part["num_tokens"]
        start = part["start"] + len(part["texts"])
        rest = get(f"{url}/api/episodes/1/tokens?call=1&start={start}&end={part['start'] + part['num_tokens']}")
        assert "".join(part["texts"] + rest["texts"]) == "1 2 " * 2000


def test_the_command_serves_until_it_is_told_to_stop(done: Path) -> None:
    command = [sys.executable, "-m", "m2forge", "page", str(done), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        assert get(f"{url}/api/run")["name"] == "done"
        server.terminate()
        assert server.wait(20) in (0, -15)
