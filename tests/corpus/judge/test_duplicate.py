"""Likeness and duplicates, against exact counting and against datasketch."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.corpus.config import CorpusConfig, DedupConfig, QualityConfig, Source
from m2forge.corpus.judge.duplicate import Forest, MinHash, Repeat, bands_for, find_duplicates
from m2forge.corpus.judge.scan import Scanner, num_bands
from m2forge.corpus.judge.words import cut, shingles
from m2forge.corpus.read.document import Document
from m2forge.corpus.write.document_table import Tables, TableWriter

# It loads scipy, which takes a second: the processes that only collect this file's tests do without.
if TYPE_CHECKING:
    import datasketch

NUM_PERM = 128


def near_duplicates(seed: int, num_originals: int, num_copies: int) -> tuple[list[str], list[int]]:
    """Texts of random words, copies of each with more and more words changed, and the original of each text."""
    rng = np.random.default_rng(seed)
    words = [f"word{n}" for n in range(5000)]
    texts, original = [], []
    for index in range(num_originals):
        chosen = rng.integers(0, len(words), 200)
        for copy in range(num_copies):
            changed = chosen.copy()
            places = rng.choice(len(chosen), 2 * copy, replace=False)
            changed[places] = rng.integers(0, len(words), len(places))
            texts.append(" ".join(words[n] for n in changed))
            original.append(index)
    return texts, original


def shingle_set(text: str, num_words: int = 5) -> set[str]:
    words = text.split()
    return {" ".join(words[n : n + num_words]) for n in range(max(1, len(words) - num_words + 1))}


def jaccard(left: str, right: str) -> float:
    a, b = shingle_set(left), shingle_set(right)
    return len(a & b) / len(a | b)


def reference(text: str) -> "datasketch.MinHash":
    import datasketch

    minhash = datasketch.MinHash(num_perm=NUM_PERM)
    minhash.update_batch([shingle.encode() for shingle in shingle_set(text)])
    return minhash


def scan(folder: Path, texts: list[str], dedup: DedupConfig, part_size: int = 7) -> Tables:
    config = CorpusConfig(sources=(Source(path="x", domain="web"),), dedup=dedup, quality=QualityConfig(rules=()))
    scanner = Scanner(config, None)
    folders = []
    for begin in range(0, len(texts), part_size):
        folders.append(folder / f"{begin}")
        folders[-1].mkdir()
        batch = [Document(text.encode(), "") for text in texts[begin : begin + part_size]]
        with TableWriter(folders[-1]) as table:
            scanner.write(batch, "web", table, Counter())
            table.finish({"num_rows": len(batch)})
    return Tables(folders)


def test_estimates_of_likeness_are_as_good_as_datasketchs() -> None:
    texts, _ = near_duplicates(0, 12, 6)
    batch = cut([text.encode() for text in texts])
    signature = MinHash(NUM_PERM).sign(shingles(batch, 5), len(texts))
    theirs = [reference(text) for text in texts]
    ours_error, their_error = [], []
    for index in range(len(texts)):
        other = index - index % 6
        true = jaccard(texts[index], texts[other])
        ours_error.append(float((signature[index] == signature[other]).mean()) - true)
        their_error.append(theirs[index].jaccard(theirs[other]) - true)
    # The standard deviation of an estimate is at most sqrt(0.25 / 128) = 0.044; the mean over 72 pairs is closer.
    assert max(map(abs, ours_error)) < 4 * 0.044
    assert abs(float(np.mean(ours_error))) < 0.02
    assert np.std(ours_error) < 1.5 * np.std(their_error)


def test_near_duplicates_are_those_that_datasketch_finds(tmp_path: Path) -> None:
    texts, original = near_duplicates(1, 20, 5)
    order = np.random.default_rng(2).permutation(len(texts)).tolist()
    texts, original = [texts[n] for n in order], [original[n] for n in order]
    dedup = DedupConfig(threshold=0.7, num_perm=NUM_PERM, exact=False)
    bands = bands_for(0.7, NUM_PERM)
    repeat = find_duplicates(scan(tmp_path, texts, dedup), dedup, bands)
    import datasketch

    index = datasketch.MinHashLSH(num_perm=NUM_PERM, params=(bands, NUM_PERM // bands))
    theirs = [reference(text) for text in texts]
    forest = Forest(len(texts))
    for n, minhash in enumerate(theirs):
        for m in index.query(minhash):
            if minhash.jaccard(theirs[m]) >= 0.7:
                forest.join(np.array([m]), np.array([n]))
        index.insert(n, minhash)
    members = np.arange(len(texts))
    found_by_them = forest.roots(members) != members
    found_by_us = repeat == Repeat.NEAR
    # Copies differ in 0 to 8 words, so likenesses run from 1 to 0.66: only those near the threshold may part.
    for n in np.flatnonzero(found_by_them != found_by_us).tolist():
        others = [m for m in range(len(texts)) if original[m] == original[n] and m != n]
        assert any(abs(jaccard(texts[n], texts[m]) - 0.7) < 0.12 for m in others)
    assert int((found_by_them == found_by_us).sum()) >= 0.9 * len(texts)
    assert int(found_by_us.sum()) >= 60


def test_the_first_of_exact_duplicates_is_kept_across_parts(tmp_path: Path) -> None:
    texts = [f"text number {n % 9} " * 3 for n in range(30)]
    dedup = DedupConfig(minhash=False)
    repeat = find_duplicates(scan(tmp_path, texts, dedup), dedup, 0)
    assert repeat.tolist() == [Repeat.NONE] * 9 + [Repeat.EXACT] * 21


def test_documents_without_words_are_no_near_duplicates(tmp_path: Path) -> None:
    texts = ["!!!", "???", "...", "a real text with some words in it"]
    dedup = DedupConfig()
    assert not find_duplicates(scan(tmp_path, texts, dedup), dedup, bands_for(0.8, 128)).any()


def test_short_documents_are_one_shingle() -> None:
    batch = cut([b"two words", b"two words", b"two", b"a b c d e", b"a b c d e f", b""])
    found = shingles(batch, 5)
    assert found.document.tolist() == [0, 1, 2, 3, 4, 4]
    assert found.hash[0] == found.hash[1] != found.hash[2]
    assert found.hash[3] == found.hash[4] != found.hash[5]


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=40))
def test_a_forest_joins_as_sets_do(pairs: list[tuple[int, int]]) -> None:
    forest = Forest(20)
    sets = [{n} for n in range(20)]
    left, right = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    forest.join(left[::2], right[::2])
    forest.join(left[1::2], right[1::2])
    for a, b in pairs:
        joined = sets[a] | sets[b]
        for member in joined:
            sets[member] = joined
    assert forest.roots(np.arange(20)).tolist() == [min(sets[n]) for n in range(20)]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_bands_match_pairs_at_the_threshold_and_no_strangers(threshold: float) -> None:
    num_bands = bands_for(threshold, NUM_PERM)
    num_rows = NUM_PERM // num_bands

    def meet(likeness: float) -> float:
        return float(1 - (1 - likeness**num_rows) ** num_bands)

    import datasketch

    theirs = datasketch.MinHashLSH(threshold=threshold, num_perm=NUM_PERM)
    assert meet(threshold) >= 0.95
    assert meet(threshold) >= 1 - (1 - threshold**theirs.r) ** theirs.b
    assert meet(0.1) < 0.05


def test_the_number_of_bands_follows_the_configuration() -> None:
    source = Source(path="x")
    assert num_bands(CorpusConfig(sources=(source,), dedup=DedupConfig(num_perm=64, num_bands=16))) == 16
    assert num_bands(CorpusConfig(sources=(source,), dedup=DedupConfig(minhash=False))) == 0
