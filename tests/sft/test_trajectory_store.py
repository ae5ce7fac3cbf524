"""Packs from a store: every trajectory once per epoch, whole, with the right targets, resumable anywhere."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import ConfigError, DataError
from m2forge.records import NO_TARGET, Pack
from m2forge.sft.encode import Encoded
from m2forge.sft.report import Report
from m2forge.sft.trajectory_store import SFTReader, SFTReaderState, Store, StoreWriter

CONTEXT = 12


def make_store(
    folder: Path, lengths: Sequence[int], weights: Sequence[float] = (1.0,), num_draws: int = 1, seed: int = 0
) -> Store:
    """Documents of random ids and masks; the first id of each is its number, which no other id reaches."""
    generator = np.random.default_rng(seed)
    writer = StoreWriter(folder)
    for number, length in enumerate(lengths):
        documents = []
        for draw in range(num_draws):
            ids = generator.integers(0, 100, length).astype(np.int32)
            ids[0] = 100 + number * num_draws + draw
            trained = generator.random(length) < 0.5
            documents.append(writer.add_document(Encoded(ids, trained, 1, cut=False)))
        writer.add_trajectory(number % len(weights), documents)
    writer.finish("key", CONTEXT, weights, Report())
    return Store(folder)


def split(pack: Pack) -> list[tuple[list[int], list[int], int]]:
    """Tokens, targets and tag of each document."""
    stops = np.cumsum(pack.lengths)
    return [
        (pack.tokens[stop - length : stop].tolist(), pack.targets[stop - length : stop].tolist(), int(tag))
        for stop, length, tag in zip(stops, pack.lengths, pack.tags, strict=True)
    ]


def same(first: Pack, second: Pack) -> bool:
    return all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in ("tokens", "targets", "lengths", "tags")
    )


lengths_of_documents = st.lists(st.integers(1, CONTEXT), min_size=1, max_size=150)


@given(lengths_of_documents, st.integers(CONTEXT, 40), st.integers(1, 3), st.integers(0, 99))
def test_an_epoch_shows_every_trajectory_once_with_its_targets(
    lengths: list[int], pack_tokens: int, num_draws: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), lengths, (1.0, 1.0), num_draws)
        reader = SFTReader(store, pack_tokens=pack_tokens, seed=seed)
        for epoch in range(3):
            shown: Counter[int] = Counter()
            for _ in range(reader.num_packs(epoch)):
                assert reader.epoch == epoch
                pack = reader.next_pack()
                assert pack.tokens.size <= pack_tokens
                for tokens, targets, tag in split(pack):
                    number, draw = divmod(tokens[0] - 100, num_draws)
                    shown[number] += 1
                    assert draw == epoch % num_draws
                    assert tag == number % 2
                    ids, trained = store.read([int(store.variants[number, draw])])
                    assert tokens == ids.tolist()
                    naive = [
                        int(ids[n + 1]) if n + 1 < len(ids) and trained[n + 1] else NO_TARGET for n in range(len(ids))
                    ]
                    assert targets == naive
            assert shown == Counter(range(len(lengths)))
        assert reader.epoch == 3


@given(lengths_of_documents, st.integers(CONTEXT, 40), st.integers(0, 60))
def test_a_reader_resumes_exactly_at_any_pack(lengths: list[int], pack_tokens: int, num_before: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), lengths, (0.5, 1.5), 2)
        reader = SFTReader(store, pack_tokens=pack_tokens, seed=5)
        for _ in range(num_before):
            reader.next_pack()
        state = SFTReaderState.from_json(json.loads(json.dumps(reader.state().to_json())))
        resumed = SFTReader(store, pack_tokens=pack_tokens, seed=5, state=state)
        assert resumed.state() == reader.state()
        for _ in range(20):
            assert same(resumed.next_pack(), reader.next_pack())
        assert len(json.dumps(reader.state().to_json())) < 1000


def test_the_order_changes_with_the_epoch_and_the_seed(tmp_path: Path) -> None:
    store = make_store(tmp_path, [4] * 50)

    def order(seed: int) -> list[list[int]]:
        reader = SFTReader(store, pack_tokens=20, seed=seed)
        return [reader.next_pack().tokens.tolist() for _ in range(20)]

    first = order(1)
    assert first == order(1)
    assert first[:10] != first[10:]
    assert first != order(2)


def test_first_fit_fills_packs(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, CONTEXT + 1, 1000)
    reader = SFTReader(make_store(tmp_path, lengths.tolist()), pack_tokens=32, seed=0)
    assert lengths.sum() / (reader.num_packs(0) * 32) > 0.97


def test_weights_say_how_often_a_source_is_shown(tmp_path: Path) -> None:
    store = make_store(tmp_path, [3] * 3000, (0.5, 1.0, 2.25))
    reader = SFTReader(store, pack_tokens=300, seed=0)
    shown: Counter[int] = Counter()
    for _ in range(reader.num_packs(0)):
        shown.update(reader.next_pack().tags.tolist())
    assert shown[1] == 1000
    # Five standard errors of a sum of 1000 draws: sqrt(1000 * 0.25) is 16, sqrt(1000 * 0.19) is 14.
    assert shown[0] == pytest.approx(500, abs=80)
    assert shown[2] == pytest.approx(2250, abs=70)


def test_a_state_of_another_reading_is_refused(tmp_path: Path) -> None:
    for name in ("store", "other"):
        (tmp_path / name).mkdir()
    store, other = make_store(tmp_path / "store", [3, 4]), make_store(tmp_path / "other", [3, 4], seed=1)
    state = SFTReader(store, pack_tokens=16, seed=0).state()
    with pytest.raises(DataError, match="saved with fingerprint"):
        SFTReader(other, pack_tokens=16, seed=0, state=state)
    with pytest.raises(DataError, match="saved with seed 0, and here it is 1"):
        SFTReader(store, pack_tokens=16, seed=1, state=state)
    with pytest.raises(DataError, match="saved with pack_tokens 16"):
        SFTReader(store, pack_tokens=17, seed=0, state=state)
    with pytest.raises(DataError, match="not the state of a reader"):
        SFTReaderState.from_json({"epoch": "one"})


def test_sizes_that_cannot_hold_a_document_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path, [3])
    with pytest.raises(ConfigError, match="pack_tokens is 11; a pack must hold the context, 12 tokens"):
        SFTReader(store, pack_tokens=11, seed=0)


def test_a_damaged_store_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path, [3, 4])
    (tmp_path / "tokens.bin").write_bytes(b"\0" * 8)
    with pytest.raises(DataError, match="holds 2 tokens, expected 7"):
        Store(tmp_path)
    (tmp_path / "offsets.npy").unlink()
    with pytest.raises(DataError, match="not a folder of encoded trajectories"):
        Store(tmp_path)
