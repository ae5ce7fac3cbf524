"""Lines of blocks are those of the whole, and bytes beyond the bound are refused as they are counted."""

import random
from pathlib import Path

import pytest

from m2forge.unpack import MIN_BYTES, UnpackConfig, Unpacked, UnpackError, split_lines


def test_lines_are_those_of_the_whole_and_long_ones_are_left_out() -> None:
    rng = random.Random(0)
    for _ in range(500):
        data = bytes(rng.choice(b"ab\n") for _ in range(rng.randrange(60)))
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
        blocks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        most = rng.randrange(1, 12)
        lines = data.splitlines(keepends=True)
        expected = [None if len(line.rstrip(b"\n")) > most else line for line in lines]
        assert list(split_lines(iter(blocks), most)) == expected


def test_a_file_may_unpack_to_the_ratio_and_always_the_minimum(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(1000))
    small = Unpacked(path, UnpackConfig(max_ratio=2.0))
    small.add(MIN_BYTES)
    with pytest.raises(
        UnpackError, match=rf"it unpacks to {MIN_BYTES + 1} or more bytes; at most {MIN_BYTES} are allowed"
    ):
        small.add(1)
    large = Unpacked(path, UnpackConfig(max_ratio=100_000.0))
    large.add(100_000_000)
    with pytest.raises(UnpackError, match=r"at most 100000000 are allowed, 100000 times its size; raise unpack\.max"):
        large.add(1)
    Unpacked(path, UnpackConfig(max_ratio=1e300)).refuse(1 << 62)
