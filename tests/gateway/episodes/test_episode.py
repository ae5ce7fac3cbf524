"""Episodes: keys, retries, rewards, the tree of all calls, and everything found again after a restart."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.config import build, dump
from m2forge.errors import ConfigError, ExistsError, FormatError, RecordError
from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.gateway.episodes.episode import AdmittedRequest, BudgetError, ClosedError, Episode, RequestState, Sampled
from m2forge.gateway.episodes.journal import JournalError, Rewarded
from m2forge.gateway.episodes.registry import Episodes
from m2forge.gateway.history.history import Divergence, Opening
from m2forge.records import Call, FinishReason, IntArray
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message
from m2forge.tree.token_tree import TokenTree
from tests.gateway.dialogue import FORMATS, array, call, chatml, echo, minimax, read, sample
from tests.text.draw import TOOLS

BOTH = pytest.mark.parametrize("format", [minimax(), chatml()], ids=list(FORMATS))
USER = Message("user", "Find a.")


def sampled(format: ChatFormat, prompt_ids: IntArray, ids: IntArray, number: int = 0) -> Sampled:
    drawn = Call(
        prompt_ids=prompt_ids,
        response_ids=ids,
        logprobs=np.linspace(-1, 0, ids.size, dtype=np.float32),
        versions=np.full(ids.size, number, np.int32),
        finish_reason=FinishReason.STOP,
        started_s=float(number),
        finished_s=number + 0.5,
    )
    return Sampled(drawn, read(format, ids, number))


def answer(
    episode: Episode,
    format: ChatFormat,
    messages: Sequence[Message],
    *texts: str,
    digest: str = "d",
    is_charged: bool = True,
) -> AdmittedRequest:
    """One request, answered with a sample for each text."""
    request, is_retry = episode.admit(digest, num_samples=len(texts))
    assert not is_retry
    opening = episode.open(messages, TOOLS)
    samples = [
        sampled(format, opening.ids, sample(format, Message("assistant", text, "t"), random.Random(text)), index)
        for index, text in enumerate(texts)
    ]
    episode.commit(request, opening, samples, id=f"id-{episode.num_calls}", is_charged=is_charged)
    request.is_delivered = True
    return request


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_opens_its_own_episode_and_is_kept_nowhere(tmp_path: Path) -> None:
    episodes = Episodes(minimax(), folder=tmp_path)
    made = [episodes.create(f"task-{number}", group="g") for number in range(3)]
    for episode, key in made:
        assert episodes.find(key) is episode
        assert episodes.get(episode.id) is episode
        assert all(key.encode() not in path.read_bytes() for path in tmp_path.iterdir())
    again = Episodes(minimax(), folder=tmp_path)
    assert [again.find(key).task_id for _, key in made] == ["task-0", "task-1", "task-2"]  # type: ignore[union-attr]
    for wrong in ("", "m2f-", made[0][1][:-1], made[0][1] + "x", made[0][0].key_hash, "\ud800"):
        assert again.find(wrong) is None
    again.forget(made[0][0].id)
    assert again.find(made[0][1]) is None
    assert len(again) == 2


@pytest.mark.parametrize("id", ["../x", "a/b", "", ".hidden", "a" * 65, "é"])
def test_ids_that_are_no_file_names_are_refused(tmp_path: Path, id: str) -> None:
    episodes = Episodes(minimax(), folder=tmp_path)
    if not id:
        assert episodes.create(id=id)[0].id.startswith("ep_")
        return
    with pytest.raises(RecordError, match="expected up to 64 letters"):
        episodes.create(id=id)
    episodes.create(id="mine")
    with pytest.raises(ExistsError):
        episodes.create(id="mine")


def test_an_episode_that_was_never_told_is_dropped_on_restart(tmp_path: Path) -> None:
    episode, _ = Episodes(minimax(), folder=tmp_path).create()
    path = tmp_path / f"{episode.id}.journal"
    path.write_bytes(path.read_bytes()[:20])
    assert len(Episodes(minimax(), folder=tmp_path)) == 0
    assert not path.exists()


# -- retries ----------------------------------------------------------------------------------------------------------


def test_an_equal_body_is_a_new_sample_unless_it_is_a_retry() -> None:
    format = minimax()
    episode, _ = Episodes(format).create()
    first = answer(episode, format, [USER], "One")
    second = answer(episode, format, [USER], "Two")
    assert first is not second
    assert episode.num_calls == 2
    assert episode.admit("d", attempt=1) == (second, True)
    first.is_delivered = False
    assert first.is_lost
    assert episode.admit("d") == (first, True)
    first.num_waiting += 1
    assert episode.admit("d")[1] is False, "somebody is being told it"
    assert episode.admit("other", attempt=2)[1] is False


def test_a_token_names_one_request_even_among_equal_bodies() -> None:
    episode, _ = Episodes(minimax()).create()
    named, _ = episode.admit("d", retry_token="k1")
    episode.admit("d", retry_token="k2")
    assert episode.admit("d", retry_token="k1", attempt=0) == (named, True)


def test_a_retry_waits_for_the_call_in_flight_or_calls_again() -> None:
    format = minimax()
    episode, _ = Episodes(format).create()
    request, _ = episode.admit("d")
    again, is_retry = episode.admit("d", attempt=1)
    assert is_retry
    assert again is request
    assert request.state is RequestState.RUNNING
    opening = episode.open([USER], TOOLS)
    ids = sample(format, Message("assistant", "One"), random.Random(0))
    episode.commit(request, opening, [sampled(format, opening.ids, ids)], id="answer", reply={"model": "m"})
    assert again.state is RequestState.ANSWERED
    assert again.answer is not None
    assert again.answer.reply == {"model": "m"}
    assert episode.requests.named("answer") is request
    with pytest.raises(RecordError, match="received one that is answered"):
        episode.commit(request, opening, [sampled(format, opening.ids, ids)], id="answer")

    failing, _ = episode.admit("e")
    episode.abandon(failing)
    episode.abandon(failing)
    assert failing.state is RequestState.FAILED
    assert episode.admit("e", attempt=1)[1] is False


# -- rewards and the end ----------------------------------------------------------------------------------------------


def test_a_reward_counts_once_and_may_come_after_the_end(tmp_path: Path) -> None:
    format = minimax()
    episodes = Episodes(format, folder=tmp_path)
    episode, _ = episodes.create()
    answer(episode, format, [USER], "One", "Two")
    episode.close("out of time")
    episode.close()
    with pytest.raises(ClosedError):
        episode.admit("x")
    assert episode.reward(Rewarded("r1", 1.0, 1, {"passed": True}))
    assert not episode.reward(Rewarded("r1", 1.0, 1, {"passed": True}))
    assert episode.reward(Rewarded("r2", -1.0))
    with pytest.raises(ExistsError, match=r"reward r1 is 1\.0"):
        episode.reward(Rewarded("r1", 0.5, 1))
    for bad in (Rewarded("r3", float("nan")), Rewarded("", 1.0), Rewarded("r3", 1.0, 2), Rewarded("r3", 1.0, -1)):
        with pytest.raises(RecordError):
            episode.reward(bad)
    restored = Episodes(format, folder=tmp_path).get(episode.id)
    assert restored is not None
    assert restored.rewards == episode.rewards
    assert restored.closed == episode.closed
    assert not restored.reward(Rewarded("r1", 1.0, 1, {"passed": True}))


# -- recording --------------------------------------------------------------------------------------------------------


def test_a_call_that_cannot_be_written_is_not_recorded(tmp_path: Path) -> None:
    format = minimax()
    episode, _ = Episodes(format, folder=tmp_path).create()
    answer(episode, format, [USER], "One", digest="first")
    path = tmp_path / f"{episode.id}.journal"
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(JournalError):
        answer(episode, format, [USER], "Two")
    path.write_bytes(kept)
    assert episode.num_calls == len(episode.tree.samples) == 1
    request, is_retry = episode.admit("d", attempt=1)
    assert is_retry
    episode.abandon(request)
    answer(episode, format, [USER], "Two")
    restored = Episodes(format, folder=tmp_path).get(episode.id)
    assert restored is not None
    assert restored.tree == episode.tree


def test_ids_of_no_tokenizer_are_refused_before_writing(tmp_path: Path) -> None:
    format = minimax()
    episode, _ = Episodes(format, folder=tmp_path).create()
    size = (tmp_path / f"{episode.id}.journal").stat().st_size
    request, _ = episode.admit("d")
    opening = episode.open([USER], TOOLS)
    strange = replace(sampled(format, opening.ids, array(format.stop_ids)).call, response_ids=array([10**6]))
    with pytest.raises(RecordError, match="received 1000000"):
        episode.commit(request, opening, [Sampled(strange, read(format, array(format.stop_ids)))], id="x")
    with pytest.raises(RecordError, match="received none"):
        episode.commit(request, opening, [], id="x")
    assert (tmp_path / f"{episode.id}.journal").stat().st_size == size


def test_a_raw_prompt_is_recorded_without_a_history(tmp_path: Path) -> None:
    format = minimax()
    episode, _ = Episodes(format, folder=tmp_path).create()
    prompt_ids = array(format.tokenizer.encode("Once upon"))
    request, _ = episode.admit("d")
    episode.commit(request, prompt_ids, [sampled(format, prompt_ids, array([50, 60]))], id="x")
    restored = Episodes(format, folder=tmp_path).get(episode.id)
    assert restored is not None
    assert restored.tree == episode.tree
    assert restored.calls()[0].prompt_ids.tolist() == prompt_ids.tolist()


Client = Callable[[list[Message]], list[Message]]


def clients(rng: random.Random) -> Sequence[Client]:
    """What agents do with their history, each in its own way."""
    return (
        lambda sent: sent,
        lambda sent: [echo(message, rng, keeps_thinking=False) for message in sent],
        lambda sent: [*sent[:1], *sent[-3:]] if len(sent) > 4 and sent[-3].role == "assistant" else sent,
        lambda sent: [*sent[:1], Message("user", f"Summary {len(sent)}")],
        lambda sent: [replace(sent[0], content="Edited"), *sent[1:]],
        lambda sent: [Message("user", "Sub-agent"), Message("user", str(rng.random()))],
        lambda sent: sent[: 1 + rng.randrange(len(sent))],
    )


@BOTH
@given(seed=st.integers(0, 10**6), restores_thinking=st.booleans())
def test_an_episode_restored_goes_on_as_if_nothing_had_happened(
    format: ChatFormat, seed: int, restores_thinking: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("journal")
    episodes = Episodes(format, folder=folder, restores_thinking=restores_thinking)
    episode, key = episodes.create()
    conversations: list[list[Message]] = [[USER]]
    calls: list[Call] = []
    num_diverged = 0
    for step in range(10):
        sent = rng.choice(clients(rng))(list(rng.choice(conversations)))
        again = Episodes(format, folder=folder, restores_thinking=restores_thinking).find(key)
        assert again is not None
        try:
            opening, twin = episode.open(sent, TOOLS), again.open(sent, TOOLS)
        except FormatError:
            # Half a conversation may end in calls whose results are missing.
            continue
        assert twin.ids.tolist() == opening.ids.tolist()
        assert twin.divergence is opening.divergence
        assert again.tree == episode.tree
        if rng.random() < 0.2:
            episode = again  # the call was in flight when the gateway was stopped; the next one goes on
            continue
        samples = drawn(format, opening, step, rng)
        request, _ = episode.admit(str(step), num_samples=len(samples))
        episode.commit(request, opening, samples, id=str(step))
        calls += [each.call for each in samples]
        num_diverged += opening.divergence is not None
        for each in samples:
            results = [Message("tool", f"Result {step}") for _ in each.completion.tool_calls]
            conversations.append([*sent, each.completion.message(), *(results or [Message("user", f"Go on {step}")])])
    assert sum(episode.num_divergences.values()) == num_diverged
    tree = TokenTree(format.tokenizer.vocab_size)
    for index, recorded in enumerate(calls):
        tree.add(recorded, f"{episode.id}/{index}", episode=episode.id)
    restored = Episodes(format, folder=folder).find(key)
    assert restored is not None
    assert tree == episode.tree == restored.tree
    assert list(episode.calls()) == calls
    assert restored.completions == episode.completions
    assert (restored.num_sampled, restored.num_divergences) == (episode.num_sampled, episode.num_divergences)
    for step in range(10):
        request, is_retry = restored.admit(str(step), attempt=1)
        assert is_retry == (episode.requests.named(str(step)) is not None)
        assert not is_retry or request.first_call == episode.requests.named(str(step)).first_call  # type: ignore[union-attr]


def drawn(format: ChatFormat, opening: Opening, step: int, rng: random.Random) -> list[Sampled]:
    samples = []
    for index in range(rng.choice([1, 1, 2])):
        calls = tuple(call(query=f"{step}") for _ in range(rng.randrange(3)))
        ids = sample(format, Message("assistant", rng.choice(["", "Text"]), f"t{step}{index}", calls), rng)
        ids = ids[: rng.randrange(ids.size + 1)] if rng.random() < 0.3 else ids
        samples.append(sampled(format, opening.ids, ids, 2 * step + index))
    return samples


def test_uncharged_calls_are_recorded_and_leave_the_budget(tmp_path: Path) -> None:
    format = minimax()
    episode, key = Episodes(format, folder=tmp_path).create(budget=Budget(max_calls=2, max_tokens=500))
    answer(episode, format, [USER], "Broken", digest="0", is_charged=False)
    answer(episode, format, [USER], "One", digest="1")
    num_paid = episode.calls()[1].response_ids.size
    restored = Episodes(format, folder=tmp_path).find(key)
    assert restored is not None
    for each in (episode, restored):
        assert (each.num_calls, each.tokens_left) == (2, 500 - num_paid)
        assert each.num_sampled == sum(call.response_ids.size for call in each.calls()) > num_paid
    answer(restored, format, [USER], "Two", digest="2")
    with pytest.raises(BudgetError, match="2 of 2 calls are spent"):
        restored.admit("3")


def test_a_journal_grows_with_content_not_with_resends(tmp_path: Path) -> None:
    format = minimax()
    episode, _ = Episodes(format, folder=tmp_path).create()
    path = tmp_path / f"{episode.id}.journal"
    sent = [USER]
    sizes = [path.stat().st_size]
    for turn in range(40):
        request = answer(episode, format, sent, f"Text {turn:02}", digest=str(turn))
        assert request.answer is not None
        sent += [request.answer.samples[0].completion.message(), Message("user", f"Go on {turn:02}")]
        sizes.append(path.stat().st_size)
    grown = np.diff(sizes)
    assert grown[-1] < 1.1 * grown[2]


def test_the_config_survives_toml_and_refuses_nonsense() -> None:
    config = build(GatewayConfig, {"port": 0, "budget": {"max_calls": 5}}, ["sync=disk"])
    assert config.budget == Budget(max_calls=5)
    assert build(GatewayConfig, {"host": config.host}).host == "127.0.0.1"
    assert "max_calls = 5" in dump(config)
    with pytest.raises(ConfigError, match="did you mean 'restore_thinking'"):
        build(GatewayConfig, {"restores_thinking": True})
    with pytest.raises(ConfigError, match="greater than 0"):
        build(GatewayConfig, {"budget": {"max_tokens": 0}})


def test_divergences_are_counted_for_recorded_calls(tmp_path: Path) -> None:
    format = minimax()
    episode, _ = Episodes(format, folder=tmp_path).create()
    answer(episode, format, [USER], "One")
    answer(episode, format, [Message("user", "Another")], "Two")
    episode.open([Message("user", "Never answered")], TOOLS)
    assert episode.num_divergences[Divergence.NEW_CONVERSATION] == 1
    restored = Episodes(format, folder=tmp_path).get(episode.id)
    assert restored is not None
    assert restored.num_divergences == episode.num_divergences


def test_a_tree_that_fails_midway_takes_each_call_once(monkeypatch: pytest.MonkeyPatch) -> None:
    format = minimax()
    episode, _ = Episodes(format).create("task")
    for text in ("a", "b", "c"):
        answer(episode, format, [USER], text)
    add, left = TokenTree.add, [2]

    def fail_once(self: TokenTree, *args: object, **kwargs: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        return add(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TokenTree, "add", fail_once)
    with pytest.raises(MemoryError):
        _ = episode.tree
    assert len(episode.calls()) == 3
    assert len(episode.tree.samples) == 3
