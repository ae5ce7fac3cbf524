"""Which trajectories are held out, and the packs they are evaluated in."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2forge.errors import DataError
from m2forge.records import NO_TARGET
from m2forge.sft.config import SFTDataConfig, SourceConfig
from m2forge.sft.dataset import prepare
from m2forge.sft.report import Note
from m2forge.sft.split import Selection, conversation_hash
from m2forge.sft.synthetic import generate
from m2forge.sft.trajectory import Trajectory
from m2forge.sft.trajectory_store import Store, read_once
from m2forge.text.message import Message, ToolCall
from tests.sft.sample import ADD, chat_format, trajectories, write_lines

CONTEXT = 512


def encode(folder: Path, order: list[int], selection: Selection | None) -> Store:
    """Made-up conversations in two files, in the order given."""
    items = list(generate(40, seed=0, split="train"))
    half = len(order) // 2
    paths = [
        write_lines(folder / f"{name}.jsonl", [items[index] for index in part])
        for name, part in (("a", order[:half]), ("b", order[half:]))
    ]
    config = SFTDataConfig(sources=tuple(SourceConfig(path=str(path)) for path in paths), context=CONTEXT)
    return prepare(config, chat_format(), folder / "store", 0, selection)


def documents(store: Store) -> set[tuple[int, ...]]:
    return {tuple(store.read([index])[0].tolist()) for index in store.variants[:, 0].tolist()}


def test_both_sides_together_are_all_trajectories(tmp_path: Path) -> None:
    order = list(range(40))
    everything = documents(encode(tmp_path / "all", order, None))
    train = encode(tmp_path / "train", order, Selection("train", 0.3))
    held_out = encode(tmp_path / "held_out", order, Selection("held_out", 0.3))
    assert 4 <= held_out.num_trajectories <= 20
    assert documents(train) | documents(held_out) == everything
    assert not documents(train) & documents(held_out)
    assert train.report.count(Note.HELD_OUT) == held_out.report.num_trajectories


def test_the_sides_do_not_depend_on_the_order_of_the_sources(tmp_path: Path) -> None:
    stores = [
        encode(tmp_path / name, np.random.default_rng(seed).permutation(40).tolist(), Selection("held_out", 0.3))
        for seed, name in enumerate("ab")
    ]
    assert documents(stores[0]) == documents(stores[1])
    first, second = (list(read_once(store, CONTEXT, 3000)) for store in stores)
    assert [pack.tokens.tolist() for pack in first] == [pack.tokens.tolist() for pack in second]


@given(trajectories(), st.text(max_size=5))
@settings(max_examples=15, deadline=None)
def test_the_hash_is_that_of_what_was_said(trajectory: Trajectory, text: str) -> None:
    """System prompt, tool definitions, call ids and origin make no other conversation; any turn does."""
    renamed = tuple(
        dataclasses.replace(
            message,
            tool_calls=tuple(ToolCall(call.name, dict(call.arguments), f"x{call.id}") for call in message.tool_calls),
        )
        for message in trajectory.messages
        if message.role != "system"
    )
    same = Trajectory((Message("system", text), *renamed), (ADD, ADD), (True,) * (len(renamed) + 1), "elsewhere:9")
    other = Trajectory((*same.messages, Message("user", text)), (), (True,) * (len(renamed) + 2), "elsewhere:9")
    assert conversation_hash(same) == conversation_hash(trajectory)
    assert conversation_hash(other) != conversation_hash(trajectory)


def test_each_held_out_trajectory_is_read_once(tmp_path: Path) -> None:
    store = encode(tmp_path, list(range(40)), Selection("held_out", 0.5))
    packs = list(read_once(store, 700, 1 << 20))
    assert sum(pack.lengths.size for pack in packs) == store.num_trajectories
    assert sum(pack.tokens.size for pack in packs) == store.report.num_tokens
    assert max(pack.tokens.size for pack in packs) <= 700
    assert sum(int((pack.targets != NO_TARGET).sum()) for pack in packs) == store.report.num_trained_tokens
    limited = list(read_once(store, 700, 1500))
    assert 0 < sum(pack.tokens.size for pack in limited) <= 1500
    assert limited[0].tokens.tolist() == packs[0].tokens.tolist()
    (single,) = read_once(store, 700, 1)
    assert single.lengths.size == 1


def test_a_share_that_holds_out_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trajectory to evaluate: 0 of 0 trajectories accepted"):
        encode(tmp_path, list(range(40)), Selection("held_out", 1e-9))
