"""The reader's promises: every piece once an epoch, exact resume, shares, targets."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.corpus.manifest import Kind, Manifest, Split
from m2forge.corpus.reader import CorpusReader, ReaderState
from m2forge.corpus.shard import CorpusWriter
from m2forge.errors import ConfigError, DataError, NotFoundError
from m2forge.records import NO_TARGET, Pack

VOCAB = 60_000
END = VOCAB - 1
Documents = Mapping[str, Sequence[int]]


def write(
    folder: Path,
    documents: Documents,
    *,
    split: Split = "train",
    shard_tokens: int = 50,
    long_documents: Documents | None = None,
    vocab_size: int = VOCAB,
) -> Manifest:
    """A corpus whose tokens are all different but for the last of a document, so that one tells where it came from."""
    token = 0
    with CorpusWriter(folder, vocab_size=vocab_size, shard_tokens=shard_tokens) as writer:
        for kind, sets in ((Kind.PLAIN, documents), (Kind.LONG, long_documents or {})):
            for domain, lengths in sets.items():
                for length in lengths:
                    tokens = np.arange(token, token + length)
                    token += length
                    tokens[-1] = END
                    writer.add(domain, tokens, split=split, kind=kind)
        return writer.finish()


def tokens_read(packs: Sequence[Pack]) -> list[int]:
    return [token for pack in packs for token in pack.tokens.tolist()]


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=25)
corpora = st.dictionaries(st.sampled_from(["web", "code", "books"]), lengths, min_size=1)


@given(lengths, st.integers(1, 30), st.integers(1, 64), st.integers(0, 3))
def test_every_piece_comes_once_per_epoch(documents: list[int], context: int, pack_tokens: int, seed: int) -> None:
    total = sum(documents)
    with TemporaryDirectory() as folder:
        write(Path(folder), {"web": documents})
        reader = CorpusReader(Path(folder), context=context, pack_tokens=pack_tokens, seed=seed)
        read = tokens_read([reader.next_pack() for _ in range(-(-3 * total // pack_tokens))])
    once = sorted([*(t for t in range(total) if t not in ends(documents)), *([END] * len(documents))])
    for epoch in range(3):
        assert sorted(read[epoch * total : (epoch + 1) * total]) == once


def ends(documents: Sequence[int]) -> set[int]:
    return {int(end) - 1 for end in np.cumsum(documents)}


@given(corpora, st.integers(1, 30), st.integers(1, 64), st.integers(0, 12), st.integers(1, 12))
def test_a_reader_resumed_at_any_pack_goes_on_exactly(
    documents: Documents, context: int, pack_tokens: int, before: int, after: int
) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), documents, long_documents={"web": [70, 90]} if "web" in documents else None)
        long_share = 0.3 if "web" in documents else 0.0

        def open_reader(state: ReaderState | None = None) -> CorpusReader:
            return CorpusReader(
                Path(folder), context=context, pack_tokens=pack_tokens, seed=5, long_share=long_share, state=state
            )

        whole = open_reader()
        packs = [whole.next_pack() for _ in range(before + after)]
        first = open_reader()
        if before % 2:
            first.skip_packs(before)
        else:
            for _ in range(before):
                first.next_pack()
        state = ReaderState.from_json(json.loads(json.dumps(first.state().to_json())))
        second = open_reader(state)
        for expected in packs[before:]:
            found = second.next_pack()
            for name in ("tokens", "targets", "lengths", "tags"):
                assert np.array_equal(getattr(found, name), getattr(expected, name))
        assert second.state() == whole.state()


@given(corpora, st.integers(2, 30), st.integers(1, 64))
def test_targets_are_the_next_tokens_of_the_document(documents: Documents, context: int, pack_tokens: int) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), documents)
        reader = CorpusReader(Path(folder), context=context, pack_tokens=pack_tokens, seed=0)
        packs = [reader.next_pack() for _ in range(20)]
    last_before_end = ends([length for lengths in documents.values() for length in lengths])
    for pack in packs:
        assert pack.tokens.size == pack_tokens
        assert pack.lengths.max() <= context
        for token, target in zip(pack.tokens.tolist(), pack.targets.tolist(), strict=True):
            if token == END:
                assert target == NO_TARGET
            else:
                assert target == (END if token + 1 in last_before_end else token + 1)


@given(st.tuples(st.floats(0.05, 1), st.floats(0.05, 1), st.floats(0.05, 1)), st.integers(1, 20), st.integers(20, 200))
def test_shares_of_tokens_follow_the_mixture(
    weights: tuple[float, float, float], context: int, pack_tokens: int
) -> None:
    rng = np.random.default_rng(0)
    domains = ("books", "code", "web")
    mixture = dict(zip(domains, weights, strict=True))
    with TemporaryDirectory() as folder:
        write(Path(folder), {domain: rng.integers(1, 50, 30).tolist() for domain in domains})
        reader = CorpusReader(Path(folder), context=context, pack_tokens=pack_tokens, seed=0, mixture=mixture)
        counts = Counter[str]()
        for num_packs in range(1, 31):
            pack = reader.next_pack()
            for tag, length in zip(pack.tags.tolist(), pack.lengths.tolist(), strict=True):
                counts[reader.domains[tag]] += length
            for domain in domains:
                wished = mixture[domain] / sum(weights) * num_packs * pack_tokens
                # A stream is at most one piece ahead of its time, or behind by the pieces of the others.
                assert abs(counts[domain] - wished) <= len(domains) * context


def test_epochs_and_seeds_give_different_orders(tmp_path: Path) -> None:
    write(tmp_path, {"web": [1] * 64 + [3] * 64}, shard_tokens=10**6)
    packs = []
    for seed in (0, 1):
        reader = CorpusReader(tmp_path, context=8, pack_tokens=256, seed=seed)
        packs += [reader.next_pack().tokens.tolist() for _ in range(2)]
    assert len({tuple(pack) for pack in packs}) == 4
    assert len({tuple(sorted(pack)) for pack in packs}) == 1


def test_long_samples_take_their_share_and_the_mixture_stays(tmp_path: Path) -> None:
    write(tmp_path, {"web": [20] * 50, "code": [20] * 50}, long_documents={"code": [400] * 4})
    reader = CorpusReader(
        tmp_path, context=100, pack_tokens=1000, seed=0, mixture={"web": 0.6, "code": 0.4}, long_share=0.3
    )
    for _ in range(40):
        reader.next_pack()
    tokens = reader.state().tokens
    total = sum(tokens.values())
    assert tokens["train/long-code"] / total == pytest.approx(0.3, abs=0.01)
    assert tokens["train/plain-web"] / total == pytest.approx(0.6, abs=0.01)


def test_a_state_for_another_reading_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"web": [10] * 20, "code": [10] * 20})
    reader = CorpusReader(tmp_path, context=8, pack_tokens=32, seed=0)
    reader.next_pack()
    state = reader.state()
    with pytest.raises(ConfigError, match="context 8, this reader has 16"):
        CorpusReader(tmp_path, context=16, pack_tokens=32, seed=0, state=state)
    with pytest.raises(ConfigError, match="made for seed"):
        CorpusReader(tmp_path, context=8, pack_tokens=32, seed=1, state=state)
    with pytest.raises(ConfigError, match="made for shares"):
        CorpusReader(tmp_path, context=8, pack_tokens=32, seed=0, mixture={"web": 1.0}, state=state)
    with pytest.raises(DataError, match="not the state of a corpus reader"):
        ReaderState.from_json({"context": 8})


def test_what_the_corpus_does_not_have_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", {"web": [10] * 20})
    with pytest.raises(ConfigError, match="no domain 'wep'; known: web"):
        CorpusReader(tmp_path / "a", context=8, pack_tokens=32, seed=0, mixture={"wep": 1.0})
    with pytest.raises(ConfigError, match="no documents in its split 'held_out'"):
        CorpusReader(tmp_path / "a", context=8, pack_tokens=32, seed=0, split="held_out")
    with pytest.raises(ConfigError, match="no long samples"):
        CorpusReader(tmp_path / "a", context=8, pack_tokens=32, seed=0, long_share=0.5)
    with pytest.raises(NotFoundError, match="build the corpus first"):
        CorpusReader(tmp_path / "b", context=8, pack_tokens=32, seed=0)
    shard = next((tmp_path / "a" / "train").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match="the manifest says"):
        CorpusReader(tmp_path / "a", context=8, pack_tokens=32, seed=0)


def test_large_vocabularies_are_read_back(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path, vocab_size=200_064) as writer:
        writer.add("web", [70_000, 5, 200_063], split="train")
        with pytest.raises(DataError, match="token ids"):
            writer.add("web", [200_064], split="train")
        assert writer.finish().token_bytes == 4
    pack = CorpusReader(tmp_path, context=8, pack_tokens=3, seed=0).next_pack()
    assert pack.tokens.tolist() == [70_000, 5, 200_063]
    assert pack.targets.tolist() == [5, 200_063, NO_TARGET]


def test_a_million_documents_open_at_once(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path, vocab_size=300) as writer:
        writer.add_many("web", np.zeros(1_000_000, np.uint16), np.ones(1_000_000, np.int64), split="train")
        writer.finish()
    reader = CorpusReader(tmp_path, context=8, pack_tokens=64, seed=0)
    assert reader.next_pack().lengths.tolist() == [1] * 64
    assert len(json.dumps(reader.state().to_json())) < 1000
