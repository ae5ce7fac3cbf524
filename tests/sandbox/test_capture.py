"""Captures keep a stream's beginning and end, however it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from m2forge.sandbox.stream import Capture


@given(st.lists(st.binary(max_size=30), max_size=30), st.integers(2, 40))
def test_a_capture_keeps_the_ends_and_counts_the_rest(pieces: list[bytes], max_bytes: int) -> None:
    capture = Capture(max_bytes)
    for piece in pieces:
        capture.add(piece)
    whole, captured = b"".join(pieces), capture.captured()
    assert captured.num_bytes == len(whole)
    assert len(captured.head) + len(captured.tail) == min(len(whole), max_bytes)
    assert whole.startswith(captured.head)
    assert whole.endswith(captured.tail)
    if not captured.num_left_out:
        assert captured.head + captured.tail == whole


def test_the_text_tells_what_is_missing() -> None:
    capture = Capture(4)
    capture.add(b"abcdefghij\xff")
    assert capture.captured().text() == "ab\n[7 bytes left out]\nj\ufffd"


def test_memory_stays_bounded_under_many_small_pieces() -> None:
    capture = Capture(10)
    for _ in range(100_000):
        capture.add(b"x")
        assert len(capture._tail) <= 5000
