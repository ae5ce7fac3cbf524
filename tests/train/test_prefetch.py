"""Packs made ahead arrive in order, with the state that belongs to them."""

from collections.abc import Mapping

import numpy as np
import pytest

from m2forge.errors import DataError
from m2forge.records import NO_TARGET, JsonValue, Pack
from m2forge.train.loop import Prefetch


class Counting:
    """Its n-th pack is one token, n."""

    domains = ("all",)

    def __init__(self, fail_at: int = 10**9) -> None:
        self.num_packs, self.fail_at = 0, fail_at

    def next_pack(self) -> Pack:
        if self.num_packs == self.fail_at:
            raise DataError("the shard is gone")
        self.num_packs += 1
        tokens, targets, lengths, tags = (np.array([value], np.int32) for value in (self.num_packs, NO_TARGET, 1, 0))
        return Pack(tokens, targets, lengths, tags)

    def state(self) -> Mapping[str, JsonValue]:
        return {"num_packs": self.num_packs}


def test_states_belong_to_consumed_packs_not_prefetched_ones() -> None:
    with Prefetch(Counting(), packs_per_step=3) as ahead:
        for step in range(1, 20):
            packs, state = ahead.take()
            assert [int(pack.tokens[0]) for pack in packs] == [3 * step - 2, 3 * step - 1, 3 * step]
            assert state == {"num_packs": 3 * step}


def test_an_error_of_the_source_reaches_the_taker() -> None:
    with Prefetch(Counting(fail_at=2), packs_per_step=1) as ahead:
        ahead.take()
        ahead.take()
        with pytest.raises(DataError, match="the shard is gone"):
            ahead.take()
