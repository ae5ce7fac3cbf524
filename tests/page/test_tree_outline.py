"""Trees as they are walked: every token is in one leg, parents hold what comes before, lanes do not cross."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2forge.page.tree_outline import NO_CALL, Trajectory
from m2forge.records import Call, FinishReason
from m2forge.tree.token_tree import TokenTree

Path = list[int]


def make_tree(paths: list[tuple[Path, Path]]) -> TokenTree:
    tree = TokenTree(16)
    for index, (prompt, response) in enumerate(paths):
        size = len(response)
        sent, sampled = np.array(prompt, np.int32), np.array(response, np.int32)
        logprobs, versions = np.full(size, -1.0, np.float32), np.zeros(size, np.int32)
        tree.add(Call(sent, sampled, logprobs, versions, FinishReason.STOP, 0.0, 1.0), f"call/{index}")
    return tree


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[Path, Path]]:
    """Calls that go on from any point of any earlier one."""
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4)
    calls: list[tuple[Path, Path]] = []
    num_calls: int = draw(st.integers(1, 8))
    for _ in range(num_calls):
        before: Path = []
        goes_on: bool = draw(st.booleans())
        if calls and goes_on:
            prompt, response = draw(st.sampled_from(calls))
            whole = prompt + response
            before = whole[: draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))]
        calls.append((before + draw(tokens), draw(tokens)))
    return calls


@given(conversations())
def test_legs_lanes_and_tokens_are_those_of_the_paths(calls: list[tuple[Path, Path]]) -> None:
    trajectory = Trajectory(make_tree(calls))
    paths = [prompt + response for prompt, response in calls]
    for call, path in enumerate(paths):
        leg = trajectory.legs[call]
        shared = max((_num_shared(path, other) for other in paths[:call]), default=0)
        assert (leg.start, leg.num_prompt, leg.num_tokens) == (shared, len(calls[call][0]), len(path))
        holders = [other for other in range(call) if _num_shared(path, paths[other]) >= shared > 0]
        assert leg.parent == (holders[0] if holders else NO_CALL)
        for start in range(len(path) + 1):
            assert trajectory.tokens(call, start, len(path)).tolist() == path[start:]
        assert trajectory.tokens(call, 0, shared).tolist() == path[:shared]
    assert sum(leg.num_tokens - leg.start for leg in trajectory.legs) == trajectory.tree.num_tokens
    spans = {chain: (chain, last) for last, chain in enumerate(trajectory.chains)}
    for chain, (first, last) in spans.items():
        for other, (other_first, other_last) in spans.items():
            if chain < other and other_first <= last and first <= other_last:
                assert trajectory.lanes[chain] != trajectory.lanes[other]


@given(conversations(), st.integers(1, 8))
def test_the_first_calls_are_the_same_without_the_rest(calls: list[tuple[Path, Path]], number: int) -> None:
    whole, first = Trajectory(make_tree(calls)), Trajectory(make_tree(calls[:number]))
    assert first.legs == whole.legs[:number]
    assert [first.tokens(n, 0, leg.num_tokens).tolist() for n, leg in enumerate(first.legs)] == [
        prompt + response for prompt, response in calls[:number]
    ]


def _num_shared(path: Path, other: Path) -> int:
    length = 0
    while length < min(len(path), len(other)) and path[length] == other[length]:
        length += 1
    return length
