"""Blocks are counted right, shared where they are equal, and evicted oldest first."""

from itertools import takewhile
from operator import eq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.rollout.kv.block_pool import Block, BlockPool
from tests.rollout.draw import version

SIZE = 3
A, B = version(0), version(1)


def read(pool: BlockPool, tokens: list[int], by: int = 0) -> list[Block]:
    """Hold what is there of the whole blocks of `tokens`, and publish the rest."""
    blocks = pool.match(tokens, version(by), len(tokens)).blocks
    for block in blocks:
        pool.hold(block)
    for place in range(len(blocks), -(-len(tokens) // SIZE)):
        part = tokens[place * SIZE : (place + 1) * SIZE]
        blocks.append(pool.publish(pool.take(), blocks[-1] if blocks else None, version(by), part))
    return blocks


def cached(pool: BlockPool, tokens: list[int], by: int = 0) -> int:
    match = pool.match(tokens, version(by), len(tokens))
    return len(match.blocks) * SIZE + match.num_tail


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(0, 1)), max_size=40
    )
)
def test_counts_stay_right_whoever_holds_and_releases(actions: list[tuple[bool, list[int], int]]) -> None:
    pool = BlockPool(12, SIZE)
    held: list[list[Block]] = []
    contents: list[tuple[list[int], int]] = []
    for releases, tokens, by in actions:
        if releases and held:
            pool.release(held.pop(len(tokens) % len(held)))
        elif pool.num_available >= 3:
            blocks = read(pool, tokens, by)
            # A tail is no other request's while it may still grow, so nobody goes on holding one.
            num_full = len(tokens) // SIZE
            if num_full < len(blocks):
                pool.release(blocks)
            else:
                held.append(blocks)
            assert cached(pool, tokens, by) == len(tokens)
            contents.append((tokens, by))
        pool.audit(held)
    for blocks in held:
        pool.release(blocks)
    pool.audit([])
    assert pool.num_available == pool.num_blocks
    pool.clear()
    pool.audit([])
    assert pool.num_unused == 0
    assert all(cached(pool, tokens, by) == 0 for tokens, by in contents)


def test_equal_beginnings_of_one_version_are_one() -> None:
    pool = BlockPool(8, SIZE)
    first, second = read(pool, [1, 2, 3, 4, 5, 6]), read(pool, [1, 2, 3, 7, 8, 9])
    assert first[0] is second[0]
    assert first[1] is not second[1]
    assert read(pool, [1, 2, 3], by=1)[0] is not first[0]
    assert pool.num_held == 4


def test_who_computes_what_is_there_already_gets_that_one() -> None:
    pool = BlockPool(2, SIZE)
    first, second = pool.take(), pool.take()
    assert pool.publish(first, None, A, [1, 2, 3]) is first
    assert pool.publish(second, None, A, [1, 2, 3]) is first
    assert pool.num_held == 1
    pool.audit([[first], [first]])


def test_no_more_is_matched_than_asked_for() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(read(pool, [1, 2, 3, 4, 5, 6]))
    for most in range(7):
        match = pool.match([1, 2, 3, 4, 5, 6], A, most)
        assert (len(match.blocks), match.num_tail) == divmod(most, SIZE)


def test_a_tail_is_what_shares_most_first_tokens() -> None:
    pool = BlockPool(8, SIZE)
    short, full = read(pool, [1, 2, 3, 4, 9])[1], read(pool, [1, 2, 3, 4, 5, 6])[1]
    for tokens, tail, num_tail in (([4, 5, 7], full, 2), ([4, 9, 9], short, 2), ([4, 5, 6], full, 2), ([8], None, 0)):
        match = pool.match([1, 2, 3, *tokens], A, min(3 + len(tokens), 5))
        assert (match.tail, match.num_tail) == (tail, num_tail)
    assert pool.match([1, 2, 3, 4], B, 4).tail is None


@given(
    others=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=SIZE), max_size=12),
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=SIZE),
)
def test_no_block_shares_more_first_tokens_than_the_tail(others: list[list[int]], tokens: list[int]) -> None:
    pool = BlockPool(16, SIZE)
    for other in others:
        pool.release(read(pool, other))
    equal = max((len([*takewhile(bool, map(eq, other, tokens))]) for other in others), default=0)
    match = pool.match(tokens, A, len(tokens) - 1)
    assert match.num_tail == min(equal, len(tokens) - 1)
    if match.tail is not None:
        assert match.tail.content is not None
        assert list(match.tail.content[1][: match.num_tail]) == tokens[: match.num_tail]


def test_least_recently_used_leaves_are_evicted_before_parents() -> None:
    pool = BlockPool(4, SIZE)
    old, young = [1, 1, 1, 2, 2, 2], [5, 5, 5, 6, 6, 6]
    for tokens in (old, young, old):  # the first is used again, so the second is the oldest
        pool.release(read(pool, tokens))
    left = []
    for _ in range(4):
        pool.take()
        left.append((cached(pool, old), cached(pool, young)))
    assert left == [(6, 3), (6, 0), (3, 0), (0, 0)]


def corrupt_count(pool: BlockPool, blocks: list[Block]) -> None:
    blocks[0].num_holders += 1


def corrupt_free(pool: BlockPool, blocks: list[Block]) -> None:
    pool._free.append(blocks[0])


def corrupt_link(pool: BlockPool, blocks: list[Block]) -> None:
    pool._root.children.clear()


def corrupt_order(pool: BlockPool, blocks: list[Block]) -> None:
    pool.release(blocks)
    blocks.clear()
    pool._unused.move_to_end(next(iter(pool._unused)))


@pytest.mark.parametrize("corrupt", [corrupt_count, corrupt_free, corrupt_link, corrupt_order])
def test_an_audit_finds_what_is_wrong(corrupt: object) -> None:
    pool = BlockPool(4, SIZE)
    blocks = read(pool, [1, 2, 3, 4, 5, 6])
    pool.audit([blocks])
    corrupt(pool, blocks)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pool.audit([blocks])


def test_what_is_held_is_not_forgotten() -> None:
    pool = BlockPool(4, SIZE)
    read(pool, [1, 2, 3])
    with pytest.raises(AssertionError, match="requests hold blocks"):
        pool.clear()
