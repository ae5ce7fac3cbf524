"""Tokens of documents: those of the library, also for texts that are encoded in stretches."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.corpus.write import tokenise
from m2forge.corpus.write.document_table import Tables, TableWriter
from m2forge.corpus.write.tokenise import draw, encode
from m2forge.text.tokenizer import Tokenizer, train_tokenizer

TEXT = "The river rose.\n\n    def f(x):\n        return x\nIt's 1234 o'clock; nobody slept.\n" * 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT], 320, ["<|endoftext|>"])


def test_each_document_is_closed(tokenizer: Tokenizer) -> None:
    texts = [TEXT, "a", "é中 x", "The river"]
    tokens, lengths = encode([text.encode() for text in texts], tokenizer)
    expected = [[*tokenizer.encode(text), tokenizer.end_of_text_id] for text in texts]
    assert np.split(tokens, np.cumsum(lengths)[:-1])[2].tolist() == expected[2]
    assert tokens.tolist() == [token for row in expected for token in row]
    assert tokens.dtype == np.uint16


def test_without_an_end_token_texts_stand_side_by_side() -> None:
    plain = train_tokenizer([TEXT], 300, [])
    assert plain.end_of_text_id is None
    tokens, lengths = encode([b"The river", b"rose."], plain)
    assert tokens.tolist() == [*plain.encode("The river"), *plain.encode("rose.")]
    assert lengths.sum() == len(tokens)


@given(st.text(st.sampled_from("ab \n1'.é中"), max_size=300))
def test_texts_in_stretches_lose_nothing(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenise, "MAX_TEXT_BYTES", 40)
        parts = tokenise._divide(text.encode())
    assert b"".join(parts) == text.encode()
    assert all(len(part) <= 41 and part.decode() is not None for part in parts)


def test_ordinary_texts_in_stretches_give_the_same_tokens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = encode([TEXT.encode(), TEXT.encode()[:50]], tokenizer)
    monkeypatch.setattr(tokenise, "MAX_TEXT_BYTES", 100)
    found = encode([TEXT.encode(), TEXT.encode()[:50]], tokenizer)
    assert np.array_equal(found[0], expected[0])
    assert np.array_equal(found[1], expected[1])


@pytest.mark.parametrize("sizes", [[4_000_000] * 4, [2000] * 8000])
def test_a_tokenizer_trains_on_the_configured_amount_of_text(tmp_path: Path, sizes: list[int]) -> None:
    with TableWriter(tmp_path) as table:
        table.append("hash", np.random.default_rng(0).integers(0, 1 << 63, len(sizes), np.uint64))
        table.append_stretches("text", "é".encode() * (sum(sizes) // 2), np.array(sizes))
        table.finish({"num_rows": len(sizes)})
    tables, is_surviving = Tables([tmp_path]), np.ones(len(sizes), bool)
    for seed in range(4):
        drawn = list(tokenise._sample(tables, is_surviving, 4_000_000, seed))
        assert 3e6 < sum(len(text.encode()) for text in drawn) < 5e6
        assert set("".join(drawn)) == {"é"}
    everything = list(tokenise._sample(tables, is_surviving, 20_000_000, 0))
    assert [len(text.encode()) for text in everything] == sizes


def test_draws_are_even_and_differ_by_seed_and_purpose() -> None:
    hashes = np.arange(10_000, dtype=np.uint64)
    values = draw(hashes, 0, "held_out")
    assert 0.18 < float((values < 0.2).mean()) < 0.22
    assert not np.array_equal(values, draw(hashes, 1, "held_out"))
    assert not np.array_equal(values, draw(hashes, 0, "tokenizer"))
