"""A tree's bytes hold each token once and load back equal; anything else is a RecordError."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.records import Call, Sampling
from m2forge.tree.codec import decode_tree, encode_tree
from m2forge.tree.flat import flatten
from m2forge.tree.token_tree import TokenTree
from tests.tree.draw import EXPERTS_SHAPE, VOCAB, build, call_sets, make_call, path_of


def routed(calls: list[Call]) -> TokenTree:
    tree = TokenTree(VOCAB)
    for index, call in enumerate(calls):
        num_known = max(0, len(path_of(call)) - 1 - index % 2)
        experts = np.random.default_rng(index).integers(0, 256, (num_known, *EXPERTS_SHAPE))
        tree.add(call, f"s{index}", experts=experts if index % 3 else None)
    return tree


@given(call_sets(), st.sampled_from([build, routed]))
def test_a_tree_loads_back_equal(calls: list[Call], make: Callable[[list[Call]], TokenTree]) -> None:
    tree = make(calls)
    loaded = decode_tree(encode_tree(tree))
    assert loaded == tree
    assert (loaded.num_tokens, loaded.num_input_tokens) == (tree.num_tokens, tree.num_input_tokens)
    assert [loaded.call(index) for index in range(len(calls))] == calls
    assert encode_tree(loaded) == encode_tree(tree)


@given(call_sets(), st.data())
def test_a_loaded_tree_goes_on_growing(calls: list[Call], data: st.DataObject) -> None:
    num_before = data.draw(st.integers(0, len(calls)))
    tree = decode_tree(encode_tree(build(calls[:num_before])))
    for index, call in enumerate(calls[num_before:], start=num_before):
        tree.add(call, f"s{index}", episode=f"e{index % 3}", advantage=index / 7, weight=1 / (index + 1))
    assert tree == build(calls)
    assert np.array_equal(flatten(tree).tokens_N, flatten(build(calls)).tokens_N)


@pytest.mark.parametrize(("vocab_size", "width"), [(2, 1), (256, 1), (257, 2), (65536, 2), (65537, 3), (2**31, 4)])
def test_ids_take_the_bytes_their_vocabulary_needs(vocab_size: int, width: int) -> None:
    def with_prompt(size: int) -> TokenTree:
        tree = TokenTree(vocab_size)
        tree.add(make_call([vocab_size - 1] * size, []), "s")
        return tree

    assert decode_tree(encode_tree(with_prompt(5))).path(0).tolist() == [vocab_size - 1] * 5
    assert len(encode_tree(with_prompt(1005))) - len(encode_tree(with_prompt(5))) == 1000 * width


def test_shared_tokens_and_steady_versions_cost_nothing() -> None:
    """A group of 16 in 3 bytes a token and 4 a log-probability, and little else."""
    tree = TokenTree(200_064)
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, 200_064, 2000)
    for index in range(16):
        tree.add(make_call(prompt, generator.integers(0, 200_064, 250)), f"s{index}")
    assert len(encode_tree(tree)) < 3 * tree.num_tokens + 4 * 16 * 250 + 2500


@given(call_sets(max_calls=5), st.sampled_from([build, routed]), st.data())
def test_damaged_bytes_are_refused(
    calls: list[Call], make: Callable[[list[Call]], TokenTree], data: st.DataObject
) -> None:
    whole = encode_tree(make(calls))
    for _ in range(8):
        place = data.draw(st.integers(0, len(whole) - 1))
        flipped = bytearray(whole)
        flipped[place] ^= data.draw(st.integers(1, 255))
        with pytest.raises(RecordError, match="no token tree"):
            decode_tree(bytes(flipped))
        with pytest.raises(RecordError, match="no token tree"):
            decode_tree(whole[:place])
    with pytest.raises(RecordError, match="no token tree"):
        decode_tree(whole + b"\0")


@given(call_sets(max_calls=5), st.sampled_from([build, routed]), st.data())
def test_bytes_with_a_right_checksum_are_a_tree_or_refused(
    calls: list[Call], make: Callable[[list[Call]], TokenTree], data: st.DataObject
) -> None:
    """What a faulty writer could leave: nothing but a RecordError, or a tree that holds together."""
    body = bytearray(encode_tree(make(calls))[:-4])
    for _ in range(8):
        changed = bytearray(body)
        for _ in range(data.draw(st.integers(1, 3))):
            changed[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        try:
            tree = decode_tree(bytes(changed) + struct.pack("<I", zlib.crc32(changed)))
        except RecordError:
            continue
        rebuilt = TokenTree(tree.vocab_size)
        for index, sample in enumerate(tree.samples):
            rebuilt.add(tree.call(index), sample.name, episode=sample.episode, advantage=sample.advantage)
        flat, again = flatten(tree), flatten(rebuilt)
        assert np.array_equal(flat.tokens_N, again.tokens_N)
        assert np.array_equal(flat.node_parent_V, again.node_parent_V)


def sealed(header: tuple[int, ...], rest: bytes) -> bytes:
    """Bytes with a right checksum whatever they hold."""
    body = struct.pack("<4sH10Q", b"M2TT", 4, *header) + rest
    return body + struct.pack("<I", zlib.crc32(body))


@pytest.mark.parametrize(
    ("header", "rest", "reason"),
    [
        ((0, 0, 0, 0, 0, 0, 0, 0, 0, 2), b"[]", "a vocabulary of 0"),
        ((2**63, 0, 0, 0, 0, 0, 0, 0, 0, 2), b"[]", "a vocabulary of 9223372036854775808"),
        ((5, 2**60, 0, 0, 0, 0, 0, 0, 0, 2), b"[]", "bytes where its header states"),
        ((5, 0, 0, 0, 0, 0, 2**40, 2**40, 0, 2), b"[]", "routing of nothing"),
        ((5, 0, 0, 0, 0, 0, 0, 0, 0, 100_000), b"[" * 100_000, "names cannot be read"),
        ((5, 0, 0, 0, 0, 0, 0, 0, 0, 6), b"[[1,2]", "names cannot be read"),
        ((5, 0, 0, 0, 0, 0, 0, 0, 0, 25), b"[[],[[1,2,0,0,0,0,1,null]", "names cannot be read"),
        ((5, 0, 0, 0, 0, 0, 0, 0, 0, 26), b'[[],[[1,1,0,0,0,0,1,"x"]]]', "seeds that are no integers"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(header: tuple[int, ...], rest: bytes, reason: str) -> None:
    assert decode_tree(sealed((5, 0, 0, 0, 0, 0, 0, 0, 0, 7), b"[[],[]]")) == TokenTree(5)
    with pytest.raises(RecordError, match=reason):
        decode_tree(sealed(header, rest))


def test_a_way_of_sampling_is_written_once() -> None:
    def of(samplings: list[Sampling]) -> bytes:
        tree = TokenTree(VOCAB)
        for index, sampling in enumerate(samplings):
            tree.add(replace(make_call([1], []), sampling=sampling), f"s{index}")
        return encode_tree(tree)

    first = Sampling(0.6, 0.95, 40, 0.01, presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5)
    second = Sampling()
    both = of([first, second, *[first] * 7])
    assert [sample.sampling for sample in decode_tree(both).samples[:3]] == [first, second, first]
    # Six numbers of eight bytes and one of four.
    assert len(both) - len(of([first] * 9)) == 52


def test_the_reason_is_told() -> None:
    whole = encode_tree(build([make_call([1], [2])]))
    for data, reason in (
        (b"", "only 0 bytes"),
        (b"PK\3\4" + whole[4:], "the magic"),
        (whole[:4] + b"\1\0" + whole[6:], "format version 1, this program reads 4"),
        (whole[:-9] + whole[-8:], "a wrong checksum; it was damaged or cut off"),
    ):
        with pytest.raises(RecordError, match=reason):
            decode_tree(data)
