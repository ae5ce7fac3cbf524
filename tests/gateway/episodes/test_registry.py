"""Episodes in memory and those that have left it: closed ones go when others follow, and come back as they were."""

import gc
import weakref
from pathlib import Path

import pytest

from m2forge.errors import ConfigError
from m2forge.gateway.episodes import journal
from m2forge.gateway.episodes.episode import ClosedError, Episode
from m2forge.gateway.episodes.journal import Rewarded
from m2forge.gateway.episodes.registry import Episodes
from m2forge.gateway.history.turn import Turn
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_episode import USER
from tests.gateway.episodes.test_episode import answer as answer_texts


def answer(episode: Episode, *texts: str) -> None:
    answer_texts(episode, minimax(), [USER], *texts)


def test_closed_episodes_leave_memory_and_come_back_as_they_were(tmp_path: Path) -> None:
    episodes = Episodes(minimax(), folder=tmp_path, max_closed=1)
    first, key = episodes.create("first", id="first")
    answer(first, "a")
    first.close("broke")
    tree, calls = first.tree, first.calls()
    gone = weakref.ref(first)
    del first
    other, _ = episodes.create("other", id="other")
    other.close()
    assert gone() is None, "it was only let go, or holds itself"
    assert [episode.id for episode in episodes] == ["other"]
    again = episodes.find(key)
    assert again is not None
    assert (again.id, again.task_id, again.calls(), again.tree) == ("first", "first", calls, tree)
    assert again.closed is not None
    assert again.closed.failure == "broke"
    with pytest.raises(ClosedError):
        again.admit("digest")
    assert again.reward(Rewarded("late", 1.0))
    assert len(episodes) == 1, "one closed episode may stay"
    restarted = Episodes(minimax(), folder=tmp_path, max_closed=1)
    assert len(restarted) == 0, "closed ones are read when somebody asks"
    found = restarted.get("first")
    assert found is not None
    assert found.rewards == again.rewards
    assert restarted.get("nobody") is None


@pytest.mark.parametrize("damage", ["header", "middle"])
def test_a_damaged_journal_is_set_aside_and_other_episodes_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    episodes = Episodes(minimax(), folder=tmp_path)
    _, sound_key = episodes.create("task", id="sound")
    hurt, hurt_key = episodes.create("task", id="hurt")
    hurt.reward(Rewarded("r", 1.0))
    path = tmp_path / "hurt.journal"
    data = bytearray(path.read_bytes())
    data[0 if damage == "header" else 20] ^= 1
    path.write_bytes(data)
    again = Episodes(minimax(), folder=tmp_path)
    assert again.find(sound_key) is not None
    assert again.find(hurt_key) is None
    assert (tmp_path / "hurt.journal.damaged").read_bytes() == bytes(data)
    assert "hurt.journal.damaged" in caplog.text
    assert not path.exists()
    fresh, _ = again.create("task", id="hurt")
    assert fresh.id == "hurt"


def test_a_closed_episode_with_a_damaged_journal_is_lost_alone(tmp_path: Path) -> None:
    episodes = Episodes(minimax(), folder=tmp_path, max_closed=0)
    hurt, key = episodes.create("task", id="hurt")
    hurt.close()
    del hurt
    (path,) = (tmp_path / "closed").iterdir()
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    assert episodes.find(key) is None
    assert episodes.get("hurt") is None
    assert path.with_name(f"{path.name}.damaged").exists()


def test_whoever_holds_an_episode_holds_the_only_one(tmp_path: Path) -> None:
    episodes = Episodes(minimax(), folder=tmp_path, max_closed=0)
    held, key = episodes.create(id="held")
    held.close()
    assert len(episodes) == 0
    assert episodes.get("held") is held
    assert episodes.find(key) is held
    assert held.reward(Rewarded("r", 1.0))
    episodes.forget("held")
    assert episodes.get("held") is None
    assert episodes.find(key) is None


def test_without_journals_nothing_leaves_memory() -> None:
    episodes = Episodes(minimax(), max_closed=0)
    for _ in range(3):
        episodes.create()[0].close()
    assert len(episodes) == 3


def test_few_files_are_open_however_many_episodes_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_OPEN", 4)
    episodes = Episodes(minimax(), folder=tmp_path, max_closed=0)
    made = [episodes.create()[0] for _ in range(20)]
    for episode in made * 2:
        answer(episode, "a")
    links = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.exists()]
    assert sum(link.is_relative_to(tmp_path) for link in links) <= 4
    for episode in made:
        episode.close()
    assert not [held for held in journal._OPEN if held.path.parent == tmp_path], "closed ones were let go"
    restored = Episodes(minimax(), folder=tmp_path)
    for episode in made:
        found = restored.get(episode.id)
        assert found is not None
        assert found.num_calls == 2


def num_turns() -> int:
    return sum(type(item) is Turn for item in gc.get_objects())


def test_the_turns_of_an_episode_that_is_let_go_are_free_at_once(tmp_path: Path) -> None:
    episodes = Episodes(minimax(), folder=tmp_path, max_closed=0)
    gc.collect()
    gc.disable()
    try:
        before = num_turns()
        episode, _ = episodes.create()
        for _ in range(5):
            answer(episode, "a", "b")
        assert num_turns() > before + 10
        episode.close()
        del episode
        assert num_turns() == before
    finally:
        gc.enable()


def test_an_unreadable_journal_is_set_aside_and_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    episodes = Episodes(minimax(), folder=tmp_path)
    _, key = episodes.create("task", id="sound")
    (tmp_path / "folder.journal").mkdir()  # reading it is an error of the system, also for root
    again = Episodes(minimax(), folder=tmp_path)
    assert again.find(key) is not None
    assert (tmp_path / "folder.journal.damaged").is_dir()
    assert "folder.journal.damaged" in caplog.text


def test_a_closed_journal_that_cannot_be_moved_stays_readable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "closed").touch()  # no folder, so that nothing can be moved there
    episodes = Episodes(minimax(), folder=tmp_path)
    closed, key = episodes.create("task", id="over")
    answer(closed, "a")
    closed.close("broke")
    for _ in range(2):
        again = Episodes(minimax(), folder=tmp_path)
        assert "stays where it is" in caplog.text
        found = again.find(key)
        assert found is not None
        assert found.closed is not None
        assert found.calls() == closed.calls()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"gateway\.journal: nothing can be written to .*choose another folder"):
        Episodes(minimax(), folder=tmp_path / "file" / "journal")
