"""The schedule of tree attention names every tile of queries and keys that meet, once, and says rightly how."""

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels import tree_schedule
from m2forge.kernels.tree_attention import TreeLayout
from m2forge.kernels.tree_schedule import TILE, Schedule, make_schedule
from tests.kernels.draw import layouts, seen

LONG_LAYOUTS = layouts(st.integers(1, 3) | st.integers(1, 300), max_nodes=12)


def pairs(start: torch.Tensor, tile: torch.Tensor) -> list[tuple[int, int]]:
    """(tile of queries, tile of keys)."""
    return [
        (query, key)
        for query in range(len(start) - 1)
        for key in tile[int(start[query]) : int(start[query + 1])].tolist()
    ]


def met(layout: TreeLayout) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Tiles in which every query sees every key, and tiles in which some do, by looking at every token."""
    num_tiles = -(-layout.num_tokens // TILE)
    sees = np.zeros((num_tiles * TILE, num_tiles * TILE), bool)
    sees[: layout.num_tokens, : layout.num_tokens] = seen(layout).numpy()
    blocks = sees.reshape(num_tiles, TILE, num_tiles, TILE)
    full, some = np.asarray(blocks.all((1, 3))), np.asarray(blocks.any((1, 3)))
    return set(zip(*full.nonzero(), strict=True)), set(zip(*(some & ~full).nonzero(), strict=True))


def in_items(schedule: Schedule) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    full, part = [], []
    for key, begin, full_begin, full_end, end in schedule.item_I5.tolist():
        assert begin <= full_begin <= full_end <= end <= begin + tree_schedule.CHUNK
        full += [(query, key) for query in range(full_begin, full_end)]
        part += [(query, key) for query in (*range(begin, full_begin), *range(full_end, end))]
    return full, part


@given(LONG_LAYOUTS)
def test_both_passes_meet_every_tile_once(layout: TreeLayout) -> None:
    schedule = make_schedule(layout, torch.device("cpu"))
    full, part = met(layout)
    for found_full, found_part in (
        (pairs(schedule.full_start, schedule.full_tile), pairs(schedule.part_start, schedule.part_tile)),
        in_items(schedule),
    ):
        assert set(found_full) == full
        assert set(found_part) == part
        assert len(found_full) + len(found_part) == len(full) + len(part)


@given(LONG_LAYOUTS)
def test_longest_walks_come_first(layout: TreeLayout) -> None:
    schedule = make_schedule(layout, torch.device("cpu"))
    work = torch.diff(schedule.full_start) + torch.diff(schedule.part_start)
    assert sorted(schedule.order_T.tolist()) == list(range(len(work)))
    assert bool((torch.diff(work[schedule.order_T.long()]) <= 0).all())
    sizes = schedule.item_I5[:, 4] - schedule.item_I5[:, 1]
    assert bool((torch.diff(sizes) <= 0).all())


def test_no_list_has_a_length_that_compilers_treat_apart() -> None:
    layout = TreeLayout(*(torch.tensor([x]) for x in (0, 1, -1, 1)))
    schedule = make_schedule(layout, torch.device("cpu"))
    lists = [getattr(schedule, field.name) for field in fields(schedule) if field.name.endswith(("_tile", "_I5"))]
    assert all(len(values) >= tree_schedule.PADDING for values in lists)
