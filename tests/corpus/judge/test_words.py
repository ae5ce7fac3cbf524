"""Words, lines and their hashes against a plain reading of the same text."""

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2forge.corpus.judge.words import cut, hash_word, windows

texts = st.lists(
    st.text(st.sampled_from("abZ09_ .,-#\n\té中文한x"), max_size=40).map(str.encode), min_size=1, max_size=6
)
WORD = re.compile(rb"[\xe3-\xed][\x80-\xbf]{2}|(?:[A-Za-z0-9_\x80-\xe2\xee-\xff])+")


@given(texts)
def test_words_are_those_of_a_plain_reading(documents: list[bytes]) -> None:
    batch = cut(documents)
    expected = [(n, match.group()) for n, text in enumerate(documents) for match in WORD.finditer(text)]
    data = batch.data.tobytes()
    found = [data[a:b] for a, b in zip(batch.word_start.tolist(), batch.word_end.tolist(), strict=True)]
    assert list(zip(batch.word_document.tolist(), found, strict=True)) == expected


@given(texts)
def test_hashes_agree_exactly_where_texts_do(documents: list[bytes]) -> None:
    batch = cut(documents)
    data = batch.data.tobytes()
    words = [data[a:b].lower() for a, b in zip(batch.word_start, batch.word_end, strict=True)]
    lines = [data[a:b].lower() for a, b in zip(batch.line_start, batch.line_end, strict=True)]
    for spans, hashes in ((words, batch.word_hash.tolist()), (lines, batch.line_hash.tolist())):
        assert len(set(zip(spans, hashes, strict=True))) == len(set(spans)) == len(set(hashes))
    for word, value in zip(words, batch.word_hash.tolist(), strict=True):
        assert hash_word(word.decode()) == value


@given(texts)
def test_lines_are_those_of_the_documents(documents: list[bytes]) -> None:
    batch = cut(documents)
    data = batch.data.tobytes()
    found = [data[a:b] for a, b in zip(batch.line_start.tolist(), batch.line_end.tolist(), strict=True)]
    expected = [(n, line) for n, text in enumerate(documents) for line in text.split(b"\n")]
    assert list(zip(batch.line_document.tolist(), found, strict=True)) == expected


@given(st.binary(max_size=300), st.integers(2, 50))
def test_windows_lose_nothing(document: bytes, size: int) -> None:
    parts = windows(document, size)
    assert b"".join(parts) == document
    assert all(len(part) <= size for part in parts)


def test_a_words_hash_does_not_depend_on_its_place() -> None:
    batch = cut([b"alpha beta", b"x " * 1000 + b"Alpha"])
    assert batch.word_hash[0] == batch.word_hash[-1]
    assert batch.word_hash[0] != batch.word_hash[1]
    assert np.array_equal(cut([b"alpha beta"]).word_hash, batch.word_hash[:2])
