"""Closed episodes on disk: not read at a start, compacted without losing what can be asked for, killed at any moment;
and episodes that expire."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2forge.errors import NotFoundError
from m2forge.gateway.admin import call_roles, describe, describe_calls
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.episodes import closed_journal, registry
from m2forge.gateway.episodes.closed_journal import COMPACT_SUFFIX, FOLDER, journal_ids
from m2forge.gateway.episodes.episode import ClosedError, Episode
from m2forge.gateway.episodes.journal import SUFFIX, Journal, Rewarded
from m2forge.gateway.episodes.registry import Episodes
from m2forge.text.message import Message, Tool
from m2forge.tree.codec import encode_tree
from tests.gateway.dialogue import chatml, minimax, sample
from tests.gateway.episodes.test_episode import USER, answer, sampled
from tests.gateway.episodes.test_retry_http import BODY, post
from tests.gateway.live import live


def record(episode: Episode) -> tuple[Any, ...]:
    """All that can be asked of a closed episode."""
    answers = [
        (request.answer.id, request.digest, request.retry_token, request.first_call, dict(request.answer.reply))
        for requests in episode.requests._by_digest.values()
        for request in requests
        if request.answer is not None
    ]
    roles = call_roles(episode)
    return describe(episode), encode_tree(episode.tree), episode.calls(), answers, episode.completions, roles


def converse(episode: Episode, format: Any, rng: random.Random) -> None:
    """Calls that go on, branch, change tools and begin anew."""
    tools: list[tuple[Tool, ...]] = [(), (Tool("f", "d"),), (Tool("f", "e"),)]
    messages = [Message("system", "Be brief."), USER]
    for number in range(12):
        said = f"answer {number}"
        offered = rng.choice(tools)
        request, _ = episode.admit(f"body {number}")
        opening = episode.open(messages, offered)
        ids = sample(format, Message("assistant", said, "t"), rng, offered)
        drawn = [sampled(format, opening.ids, ids, number)]
        episode.commit(request, opening, drawn, id=f"id-{number}", reply={"n": number})
        match rng.randrange(4):
            case 0:
                messages = [Message("user", f"another {number}")]
            case 1:
                messages = [*messages[:-1], Message("user", f"edited {number}")]
            case _:
                messages = [*messages, Message("assistant", said), Message("user", f"go on {number}")]


def compact_all(episodes: Episodes) -> int:
    async def run() -> int:
        number = 0
        while await episodes.compact_next():
            number += 1
        return number

    return asyncio.run(run())


@pytest.mark.parametrize("make", [minimax, chatml])
def test_a_compacted_journal_holds_all_that_can_be_asked_for(make: Callable[[], Any], tmp_path: Path) -> None:
    rng, format = random.Random(7), make()
    episodes = Episodes(format, folder=tmp_path, max_closed=2)
    episode, key = episodes.create("task", group="g", id="one")
    converse(episode, format, rng)
    episode.reward(Rewarded("early", 0.5, 3))
    episode.close("done")
    (path,) = (tmp_path / FOLDER).iterdir()
    before, size = record(episode), path.stat().st_size
    assert compact_all(episodes) == 1
    (compact,) = (tmp_path / FOLDER).iterdir()
    assert compact.suffix == COMPACT_SUFFIX
    assert compact.stat().st_size < size
    assert b"another" not in compact.read_bytes()
    assert not list(tmp_path.glob(f"*{SUFFIX}"))
    # In memory as before; a late reward goes to the compacted journal, and both are found again by id and key.
    assert record(episode) == before
    assert episode.reward(Rewarded("late", 1.0))
    again = Episodes(format, folder=tmp_path).find(key)
    assert again is not None
    assert again is not episode
    assert record(again) == record(episode)
    assert list(again.rewards) == ["early", "late"]
    assert len(set(call_roles(again))) > 1
    assert describe_calls(episode)["messages"]
    with pytest.raises(NotFoundError, match="the messages of episode one were dropped"):
        describe_calls(again)
    assert again.requests.named(before[3][0][0]) is not None
    with pytest.raises(ClosedError, match=r"closed \(done\)"):
        again.admit("new body")
    assert compact_all(episodes) == 0
    episodes.delete("one")
    assert not list((tmp_path / FOLDER).iterdir())
    assert Episodes(format, folder=tmp_path).find(key) is None


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["moved", "written", "renamed", "deleted", "partial"])
def test_killed_at_any_moment_the_record_is_the_same(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format = minimax()
    episodes = Episodes(format, folder=tmp_path)
    episode, key = episodes.create("task", id="one")
    converse(episode, format, random.Random(8))

    def die(*args: object, **options: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "moved":
            patch.setattr(Journal, "move", die)
            with pytest.raises(Killed):
                episode.close()
        else:
            episode.close()
            owner, name = {
                "written": (registry.Episodes, "_swap"),
                "renamed": (Path, "unlink"),
                "deleted": (Journal, "switch"),
                "partial": (closed_journal, "write_entries"),
            }[moment]
            if moment == "renamed":
                unlink = Path.unlink

                def only_partial(self: Path, missing_ok: bool = False) -> None:
                    if self.suffix == SUFFIX:
                        raise Killed
                    unlink(self, missing_ok)

                patch.setattr(Path, "unlink", only_partial)
            elif moment == "partial":

                def tear(path: Path, *args: object) -> None:
                    path.write_bytes(b"torn")
                    raise Killed

                patch.setattr(closed_journal, "write_entries", tear)
            else:
                patch.setattr(owner, name, die)
            with pytest.raises(Killed):
                compact_all(episodes)
    before = record(episode)
    for _ in range(2):
        restarted = Episodes(format, folder=tmp_path)
        assert journal_ids(tmp_path) == ["one"]
        assert len(restarted) == 0
        found = restarted.find(key)
        assert found is not None
        assert record(found)[1:] == before[1:]
        assert found.closed is not None
        compact_all(restarted)
        (left,) = (tmp_path / FOLDER).iterdir()
        assert left.suffix == COMPACT_SUFFIX
        assert not list(tmp_path.glob(f"*{SUFFIX}"))


@pytest.mark.slow
def test_a_start_opens_the_journals_of_open_episodes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    format = minimax()
    episodes = Episodes(format, folder=tmp_path)
    keys = []
    for number in range(5000):
        episode, key = episodes.create(id=f"e{number}")
        keys.append(key)
        if number % 1000:
            episode.close()
    opened: list[Path] = []
    read_bytes = Path.read_bytes

    def note(self: Path) -> bytes:
        opened.append(self)
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", note)
    restarted = Episodes(format, folder=tmp_path)
    assert sorted(path.name for path in opened) == [
        f"e{number}000.journal" if number else "e0.journal" for number in range(5)
    ]
    found = restarted.find(keys[4321])
    assert found is not None
    assert (found.id, len(opened)) == ("e4321", 6)


def test_calls_in_flight_at_close_are_recorded_before_compaction(tmp_path: Path) -> None:
    format = minimax()
    episodes = Episodes(format, folder=tmp_path)
    episode, key = episodes.create(id="one")
    answer(episode, format, [USER], "first")
    running, _ = episode.admit("other")
    opening = episode.open([USER, Message("assistant", "first"), USER])
    episode.close()
    assert compact_all(episodes) == 0
    episode.abandon(running, opening)
    assert compact_all(episodes) == 1
    again = Episodes(format, folder=tmp_path).find(key)
    assert again is not None
    assert record(again) == record(episode)


def test_a_reward_posted_during_compaction_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    format = minimax()
    episodes = Episodes(format, folder=tmp_path)
    episode, key = episodes.create(id="one")
    answer(episode, format, [USER], "first")
    episode.close()
    write, rewards = closed_journal.write_compacted, iter([Rewarded("late", 1.0)])

    def slowly(path: Path) -> Path:
        partial = write(path)
        for reward in rewards:
            episode.reward(reward)
        return partial

    monkeypatch.setattr(registry, "write_compacted", slowly)
    assert compact_all(episodes) == 2
    again = Episodes(format, folder=tmp_path).find(key)
    assert again is not None
    assert list(again.rewards) == ["late"]


def test_an_episode_that_is_asked_for_nothing_expires(tmp_path: Path) -> None:
    now_s = [1000.0]
    format = minimax()
    episodes = Episodes(format, folder=tmp_path, clock=lambda: now_s[0], monotonic=lambda: now_s[0])
    used, _ = episodes.create(id="used")
    episodes.create(id="idle")
    now_s[0] += 50
    answer(used, format, [USER], "x")
    running, _ = episodes.create(id="running")
    running.admit("d")
    now_s[0] += 60
    assert episodes.expire(100) == 1
    restarted = Episodes(format, folder=tmp_path, clock=lambda: now_s[0], monotonic=lambda: now_s[0])
    assert sorted(episode.id for episode in restarted) == ["running", "used"]
    now_s[0] += 100
    assert episodes.expire(100) == 1, "a request in flight keeps its episode open"
    with pytest.raises(ClosedError, match=r"episode used is closed \(expired after 100 s without a request\)"):
        used.admit("d")


@pytest.mark.slow
def test_the_gateway_expires_and_compacts_by_itself(tmp_path: Path) -> None:
    assert GatewayConfig().expire_s == 24 * 3600
    config = GatewayConfig(port=0, journal=str(tmp_path), expire_s=0.3)
    with live(minimax(), config=config) as gateway:
        episode, key = gateway.episode()
        assert post(gateway, key, BODY).status_code == 200
        gateway.wait_until(lambda: episode.closed is not None)
        response = post(gateway, key, BODY | {"seed": 5})
        assert response.status_code == 403
        assert "expired after 0.3 s without a request" in response.json()["error"]["message"]
        gateway.wait_until(lambda: len(list((tmp_path / FOLDER).glob(f"*{COMPACT_SUFFIX}"))) == 1)
