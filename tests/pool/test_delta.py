"""Calls that are stored as what they add make the tree that they made when they were recorded."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.pool.stored import MAX_BRANCHES, CallWriter, read_tree
from m2forge.records import Call, FinishReason, RequestedSampling, Sampling
from m2forge.tree.codec import encode_tree
from m2forge.tree.token_tree import TokenTree
from tests.pool.scene import VOCAB_SIZE, calls

NAME = "g0-0-1"


@st.composite
def episodes(draw: st.DrawFn) -> list[tuple[Call, int]]:
    """Calls that continue, branch off or start anew, and how many tokens of each are routed."""
    paths: list[list[int]] = [[1]]
    made = []
    # A few ids only, so that paths meet by chance too.
    ids = st.lists(st.integers(0, 2), max_size=6)
    for number in range(draw(st.integers(1, 40))):
        source = paths[draw(st.integers(0, len(paths) - 1))]
        prompt = [*source[: draw(st.integers(1, len(source)))], *draw(ids)]
        response = draw(ids)
        versions = sorted(draw(st.lists(st.integers(0, 3), min_size=len(response), max_size=len(response))))
        sampling = Sampling(temperature=draw(st.sampled_from([0.7, 1.0])), top_k=draw(st.sampled_from([0, 40])))
        made.append(
            (
                Call(
                    np.array(prompt, np.int32),
                    np.array(response, np.int32),
                    np.array([-0.5 * n for n in range(len(response))], np.float32),
                    np.array(versions, np.int32),
                    draw(st.sampled_from(FinishReason)),
                    float(number),
                    number + 0.25,
                    sampling,
                    draw(
                        st.none()
                        | st.builds(RequestedSampling, st.just(sampling), st.none() | st.integers(-(2**63), 2**63 - 1))
                    ),
                    draw(st.sampled_from([(), ("tool_choice: treated as auto",), ("é", "")])),
                ),
                draw(st.integers(0, len(prompt) + len(response))),
            )
        )
        paths.append(prompt + response)
    return made


@given(episodes(), st.booleans(), st.sampled_from([3, 300, 70_000, 1 << 24, 1 << 31]), st.integers(0, 40))
def test_the_tree_is_the_one_the_recorder_made(
    made: list[tuple[Call, int]], is_routed: bool, vocab_size: int, restart: int
) -> None:
    tree, writer, stored = TokenTree(vocab_size), CallWriter(vocab_size), []
    for ordinal, (call, num_routed) in enumerate(made):
        if ordinal == restart:
            writer = CallWriter(vocab_size, ordinal)
        draw = np.random.default_rng(ordinal)
        experts = draw.integers(0, 8, (num_routed, 2, 3)).astype(np.int16) if is_routed and num_routed else None
        if experts is not None:
            # Of tokens that another request had computed.
            experts[draw.random(num_routed) < 0.4] = -1
        tree.add(call, f"{NAME}/{ordinal}", episode=NAME, experts=experts)
        written = writer.write(call, experts)
        assert written.ordinal == ordinal
        assert written.oldest_step == (int(call.versions.min()) if call.versions.size else None)
        stored.append(written.data)
    assert read_tree(stored, vocab_size, NAME) == tree


def test_an_agent_costs_what_it_adds() -> None:
    """Each token once, as the tree's own form has it; a head of some hundred bytes for each call besides."""
    made = calls(0, 24, num_new=300)
    writer, tree = CallWriter(VOCAB_SIZE), TokenTree(VOCAB_SIZE)
    stored = [writer.write(call) for call in made]
    for index, call in enumerate(made):
        tree.add(call, str(index))
    assert sum(call.num_tokens for call in stored) == tree.num_tokens
    num_bytes = sum(len(call.data) for call in stored)
    assert num_bytes <= len(encode_tree(tree)) + 150 * len(made)


def test_more_branches_than_are_kept_repeat_tokens_and_lose_none() -> None:
    num_branches = MAX_BRANCHES + 5
    made = [calls(seed, 3) for seed in range(num_branches)]
    writer, tree = CallWriter(VOCAB_SIZE), TokenTree(VOCAB_SIZE)
    stored: list[bytes] = []
    for turn in range(3):
        for branch in made:
            tree.add(branch[turn], f"{NAME}/{len(stored)}", episode=NAME)
            stored.append(writer.write(branch[turn]).data)
    assert read_tree(stored, VOCAB_SIZE, NAME) == tree


def test_damage_is_refused_with_the_call() -> None:
    writer = CallWriter(VOCAB_SIZE)
    stored = [writer.write(call).data for call in calls(0, 3)]
    broken = bytearray(stored[1])
    broken[40] ^= 1
    with pytest.raises(RecordError, match=r"call 1 of g0-0-1 .* checksum"):
        read_tree([stored[0], bytes(broken), stored[2]], VOCAB_SIZE, NAME)
    with pytest.raises(RecordError, match=r"call 1 .* truncated"):
        read_tree([stored[0], stored[1][:50]], VOCAB_SIZE, NAME)
    with pytest.raises(RecordError, match=r"call 1 .* continues call 1"):
        read_tree([stored[0], stored[2]], VOCAB_SIZE, NAME)


def test_ids_beyond_the_vocabulary_are_refused_before_storing() -> None:
    writer = CallWriter(10)
    with pytest.raises(RecordError, match="below 10"):
        writer.write(calls(0, 1)[0])


def test_a_call_without_notices_is_stored_as_before() -> None:
    """Pools of earlier releases stay readable, and theirs can read such a call."""
    (call,) = calls(0, 1)
    before = struct.Struct("<i6I2HB?2d")
    for requested in (None, RequestedSampling(Sampling(0.0), 7)):
        stored = CallWriter(VOCAB_SIZE).write(replace(call, requested=requested)).data
        assert before.unpack_from(stored)[10] is (requested is not None)
        assert stored[before.size - 17] == (requested is not None)
