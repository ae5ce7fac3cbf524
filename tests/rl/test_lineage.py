"""Which versions the weights at hand descend from, against a plain record of every version's ancestors."""

import random
from pathlib import Path

import pytest

from m2forge.errors import RecordError
from m2forge.rl.layout import Branch, Lineage, begin_branch, read_lineage


@pytest.mark.parametrize("seed", range(20))
def test_the_shared_step_is_that_of_the_newest_common_ancestor(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "lineage.jsonl"
    weights: tuple[str, ...] = ("start",)
    """Ids of the weights at each step, up to those at hand."""
    published: dict[tuple[int, str], tuple[str, ...]] = {}
    for branch in "abcdef":
        weights = weights[: rng.randrange(len(weights)) + 1]
        begin_branch(path, branch, len(weights) - 1)
        for _ in range(rng.randrange(6)):
            weights = (*weights, f"{branch}{len(weights)}")
            published[len(weights) - 1, branch] = weights
    lineage = read_lineage(path)
    for (step, branch), ancestors in published.items():
        shared = max(place for place, pair in enumerate(zip(ancestors, weights, strict=False)) if pair[0] == pair[1])
        assert lineage.shared_step(step, branch) == shared
        assert lineage.holds(step, branch) == (weights[: step + 1] == ancestors)


def test_a_branch_without_a_line_is_older_than_all_others(tmp_path: Path) -> None:
    assert read_lineage(tmp_path / "none.jsonl").holds(7, "")
    lineage = Lineage((Branch("a", 5),))
    assert lineage.holds(5, "")
    assert lineage.shared_step(7, "") == lineage.shared_step(7, "unknown") == 5


def test_a_torn_last_line_is_left_out_and_a_damaged_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    begin_branch(path, "a", 0)
    path.write_bytes(path.read_bytes() + b'{"branch": "b", "st')
    assert read_lineage(path).branches == (Branch("a", 0),)
    path.write_bytes(b"[]\n")
    with pytest.raises(RecordError, match=r"lineage\.jsonl, line 1: not a branch .*; remove the line"):
        read_lineage(path)
