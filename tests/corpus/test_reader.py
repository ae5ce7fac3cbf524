"""The reader's promises: whole pieces, every document once an epoch, exact resume, shares, targets."""

import json
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.corpus.manifest import Kind, Manifest, Split, read_manifest
from m2forge.corpus.reader import LOOKAHEAD, CorpusReader, ReaderState, StreamPosition
from m2forge.corpus.token_set import CorpusWriter, ShardView
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


def contexts(max_context: int = 30, max_pack: int = 64) -> st.SearchStrategy[tuple[int, int]]:
    """(context, pack_tokens)"""
    return st.integers(1, max_context).flatmap(lambda c: st.tuples(st.just(c), st.integers(c, max(c, max_pack))))


def assert_same_packs(found: Sequence[Pack], expected: Sequence[Pack]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in ("tokens", "targets", "lengths", "tags"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


def ends(documents: Sequence[int]) -> set[int]:
    return {int(end) - 1 for end in np.cumsum(documents)}


def through_json(state: ReaderState) -> ReaderState:
    return ReaderState.from_json(json.loads(json.dumps(state.to_json())))


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=25)
corpora = st.dictionaries(st.sampled_from(["web", "code", "books"]), lengths, min_size=1)


@given(lengths, contexts(), st.integers(0, 3))
def test_every_document_comes_once_per_epoch(documents: list[int], sizes: tuple[int, int], seed: int) -> None:
    total = sum(documents)
    with TemporaryDirectory() as folder:
        write(Path(folder), {"web": documents})
        reader = CorpusReader(Path(folder), context=sizes[0], pack_tokens=sizes[1], seed=seed)
        read: list[int] = []
        while len(read) < 3 * total:
            read += reader.next_pack().tokens.tolist()
    once = sorted([*(t for t in range(total) if t not in ends(documents)), *([END] * len(documents))])
    for epoch in range(3):
        assert sorted(read[epoch * total : (epoch + 1) * total]) == once


@given(corpora, contexts())
def test_a_document_is_cut_only_at_the_context(documents: Documents, sizes: tuple[int, int]) -> None:
    context, pack_tokens = sizes
    with TemporaryDirectory() as folder:
        write(Path(folder), documents)
        reader = CorpusReader(Path(folder), context=context, pack_tokens=pack_tokens, seed=0)
        packs = [reader.next_pack() for _ in range(20)]
    last = ends([length for lengths in documents.values() for length in lengths])
    for pack in packs:
        assert 0 < pack.tokens.size <= pack_tokens
        for tokens in np.split(pack.tokens, np.cumsum(pack.lengths)[:-1]):
            # A piece that does not end its document is as long as the context.
            assert tokens.size == context or tokens[-1] == END
            # It begins its document, or stands a multiple of the context behind its beginning.
            if tokens[0] != END:
                begin = max((end + 1 for end in last if end < tokens[0]), default=0)
                assert (tokens[0] - begin) % context == 0


@given(corpora, contexts(), st.integers(0, 12), st.integers(1, 12))
def test_a_reader_resumed_at_any_pack_goes_on_exactly(
    documents: Documents, sizes: tuple[int, int], before: int, after: int
) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), documents, long_documents={"web": [70, 90]} if "web" in documents else None)
        long_share = 0.3 if "web" in documents else 0.0

        def open_reader(state: ReaderState | None = None) -> CorpusReader:
            return CorpusReader(
                Path(folder), context=sizes[0], pack_tokens=sizes[1], seed=5, long_share=long_share, state=state
            )

        whole = open_reader()
        packs = [whole.next_pack() for _ in range(before + after)]
        first = open_reader()
        for _ in range(before):
            first.next_pack()
        second = open_reader(through_json(first.state()))
        assert_same_packs([second.next_pack() for _ in range(after)], packs[before:])
        assert second.state() == whole.state()


@pytest.mark.slow
def test_a_reader_resumes_exactly_beyond_its_lookahead(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write(tmp_path, {"web": rng.integers(1, 90, 3 * LOOKAHEAD).tolist()}, shard_tokens=3000)
    whole = CorpusReader(tmp_path, context=32, pack_tokens=64, seed=0)
    parts = CorpusReader(tmp_path, context=32, pack_tokens=64, seed=0)
    for _ in range(60):
        assert_same_packs([parts.next_pack() for _ in range(25)], [whole.next_pack() for _ in range(25)])
        parts = CorpusReader(tmp_path, context=32, pack_tokens=64, seed=0, state=through_json(parts.state()))
    assert len(parts.state().documents["train/plain-web"].unfinished) <= LOOKAHEAD


Phase = tuple[tuple[int, int], int, dict[str, float]]
phases = st.lists(
    st.tuples(
        contexts(),
        st.integers(0, 12),
        st.dictionaries(st.sampled_from(["web", "code"]), st.floats(0.1, 1), min_size=1),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@given(lengths, lengths, phases)
def test_readers_after_one_another_read_every_token_once(web: list[int], code: list[int], phases: list[Phase]) -> None:
    """Whatever context and mixture each has. Each is resumed half way besides."""
    with TemporaryDirectory() as folder:
        write(Path(folder), {"web": web, "code": code})
        read: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
        last: ReaderState | None = None
        # The last reader takes what is left, and some of it again.
        rest = ((7, 9), 20 + sum(web) + sum(code), {"web": 0.5, "code": 0.5})
        for (context, pack_tokens), num_packs, mixture in [*phases, rest]:
            settings = {"context": context, "pack_tokens": pack_tokens, "seed": 3, "mixture": mixture}
            reader = CorpusReader(Path(folder), **settings, after=last)  # type: ignore[arg-type]
            for index in range(num_packs):
                if index == num_packs // 2:
                    state = through_json(reader.state())
                    reader = CorpusReader(Path(folder), **settings, state=state)  # type: ignore[arg-type]
                pack = reader.next_pack()
                tags = np.repeat(pack.tags, pack.lengths).tolist()
                for tag, token, target in zip(tags, pack.tokens.tolist(), pack.targets.tolist(), strict=True):
                    read[tag].append((token, target))
            last = through_json(reader.state())
        for tag, (first, documents) in enumerate(((sum(web), code), (0, web))):
            every = {first + token: 0 for token in range(sum(documents)) if token not in ends(documents)}
            num_epochs = len(read[tag]) // sum(documents)
            for epoch in range(num_epochs):
                tokens = [token for token, _ in read[tag][epoch * sum(documents) : (epoch + 1) * sum(documents)]]
                assert sorted(tokens) == sorted([*every, *[END] * len(documents)])
            for token, target in read[tag]:
                assert target == (NO_TARGET if token == END else token + 1 if token + 1 in every else END)


def test_a_second_reader_reads_all_that_the_first_did_not_begin(tmp_path: Path) -> None:
    write(tmp_path, {"web": [100] * 600}, shard_tokens=10**6, vocab_size=VOCAB + 5000)
    short = CorpusReader(tmp_path, context=10, pack_tokens=20, seed=0)
    for _ in range(40):
        short.next_pack()
    long = CorpusReader(tmp_path, context=100, pack_tokens=100, seed=0, after=short.state())
    lengths = [length for pack in long.packs(1000, 59_200) for length in pack.lengths.tolist()]
    # Two pieces a pack, of as many documents. What is left of those comes in one or two pieces, all others whole.
    assert lengths.count(100) == 600 - 80
    assert sum(length for length in lengths if length < 100) == 80 * 90
    assert 80 < len(lengths) - 520 < 160


def test_a_short_reading_sees_all_parts_of_long_documents(tmp_path: Path) -> None:
    write(tmp_path, {"web": [200] * 250}, shard_tokens=10**6)
    reader = CorpusReader(tmp_path, context=10, pack_tokens=100, seed=0)
    # Tokens are numbers: what they leave divided by the length of documents is the offset.
    offsets = np.concatenate([reader.next_pack().tokens % 200 for _ in range(20)])
    assert np.quantile(offsets, [0.25, 0.5, 0.75]) == pytest.approx([50, 100, 150], abs=15)


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
        for _ in range(30):
            pack = reader.next_pack()
            for tag, length in zip(pack.tags.tolist(), pack.lengths.tolist(), strict=True):
                counts[reader.domains[tag]] += length
            for domain in domains:
                wished = mixture[domain] / sum(weights) * counts.total()
                # A stream is at most a context ahead of its share, or behind by what the others are ahead.
                assert abs(counts[domain] - wished) <= len(domains) * context


def test_short_documents_do_not_fill_packs_beyond_their_share(tmp_path: Path) -> None:
    """Packs whose room only one domain fits keep the room instead."""
    write(tmp_path, {"books": [70] * 100, "qa": [10] * 500}, shard_tokens=10**6)
    mixture = {"books": 0.95, "qa": 0.05}
    reader = CorpusReader(tmp_path, context=100, pack_tokens=100, seed=0, mixture=mixture)
    for _ in range(200):
        reader.next_pack()
    tokens = reader.state().tokens
    assert tokens["train/plain-qa"] / sum(tokens.values()) == pytest.approx(0.05, abs=0.01)


def positions(lengths: npt.NDArray[np.integer], context: int) -> npt.NDArray[np.float64]:
    """The share of tokens in each sixteenth of the context."""
    width = context // 16
    counts = np.array([np.clip(lengths - start, 0, width).sum() for start in range(0, context, width)])
    shares: npt.NDArray[np.float64] = counts / counts.sum()
    return shares


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What configs/corpus/stdlib.toml reads, a byte a token."""
    folder = tmp_path_factory.mktemp("stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    with CorpusWriter(folder, vocab_size=257) as writer:
        for path in sorted(root.rglob("*.py")):
            text = path.read_bytes()
            if text and not {"site-packages", "test", "tests", "idlelib"} & set(path.relative_to(root).parts):
                writer.add("code", np.append(np.frombuffer(text, np.uint8).astype(np.int64), 256), split="train")
        writer.finish()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 2, 8])
@pytest.mark.parametrize("context", [1024, 32_768])
def test_positions_are_trained_as_often_as_documents_have_them(stdlib: Path, context: int, factor: int) -> None:
    """And packs are nearly full."""
    (token_set,) = read_manifest(stdlib).sets
    offsets = [ShardView(stdlib, shard, 2).offsets.astype(np.int64) for shard in token_set.shards]
    documents = np.concatenate([np.diff(each) for each in offsets])
    pieces = [min(context, n - start) for n in documents.tolist() for start in range(0, n, context)]
    reader = CorpusReader(stdlib, context=context, pack_tokens=factor * context, seed=0)
    packs = list(reader.packs(token_set.num_tokens, token_set.num_tokens))
    trained = positions(np.concatenate([pack.lengths for pack in packs]), context)
    # Half of the sum of differences: the share of tokens that would have to move.
    assert np.abs(trained - positions(np.array(pieces), context)).sum() / 2 < 0.02
    # The last one is what is left of the tokens asked for.
    full = packs[:-1]
    assert sum(pack.tokens.size for pack in full) / (len(full) * factor * context) > 0.97


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
    with pytest.raises(ConfigError, match="saved with seed"):
        CorpusReader(tmp_path, context=8, pack_tokens=32, seed=1, state=state)
    with pytest.raises(ConfigError, match="saved with shares"):
        CorpusReader(tmp_path, context=8, pack_tokens=32, seed=0, mixture={"web": 1.0}, state=state)
    with pytest.raises(ConfigError, match="saved with pack_tokens 32"):
        CorpusReader(tmp_path, context=8, pack_tokens=64, seed=0, state=state)
    with pytest.raises(ConfigError, match="saved with seed"):
        CorpusReader(tmp_path, context=8, pack_tokens=32, seed=1, after=state)
    with pytest.raises(DataError, match="not the state of a corpus reader"):
        ReaderState.from_json({"context": 8})
    with pytest.raises(DataError, match="counts pieces in the order of an earlier version"):
        ReaderState.from_json({"context": 8, "pieces": {"train/plain-web": 3}, "tokens": {}, "cut": None})
    beyond = {**state.documents, "train/plain-web": StreamPosition(num_opened=2, unfinished=((1, 0, 10),))}
    with pytest.raises(DataError, match="names tokens that its documents do not have"):
        CorpusReader(tmp_path, context=8, pack_tokens=32, seed=0, after=state.model_copy(update={"documents": beyond}))


def test_a_pack_that_cannot_hold_the_context_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"web": [10] * 20})
    with pytest.raises(ConfigError, match=r"pack_tokens \(7\) must hold one document of context \(8\)"):
        CorpusReader(tmp_path, context=8, pack_tokens=7, seed=0)


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
    pack = CorpusReader(tmp_path, context=3, pack_tokens=3, seed=0).next_pack()
    assert pack.tokens.tolist() == [70_000, 5, 200_063]
    assert pack.targets.tolist() == [5, 200_063, NO_TARGET]


def test_a_million_documents_open_at_once(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path, vocab_size=300) as writer:
        writer.add_many("web", np.zeros(1_000_000, np.uint16), np.ones(1_000_000, np.int64), split="train")
        writer.finish()
    reader = CorpusReader(tmp_path, context=8, pack_tokens=64, seed=0)
    assert reader.next_pack().lengths.tolist() == [1] * 64
    assert len(json.dumps(reader.state().to_json())) < 1000
