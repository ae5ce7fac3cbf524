"""When the reader of a completion sleeps: while a loop is late and chunks come by themselves, and not otherwise."""

from m2forge.gateway.calls.generation import AWAKE_CHUNKS, MOST_GAP_S, Naps, Pace

AT_ONCE_S, WAITED_S = 1e-5, 0.02


def late_pace() -> Pace:
    pace = Pace()
    for _ in range(200):
        pace.note(1.0)
    return pace


def test_a_loop_that_keeps_up_never_sleeps() -> None:
    naps = Naps(Pace())
    assert [naps.after(1, WAITED_S) for _ in range(9)] == [0.0] * 9


def test_chunks_that_came_meanwhile_are_read_at_once() -> None:
    """The engine goes on by itself: what it made during a nap is there after it, joined or one by one."""
    naps = Naps(late_pace())
    assert naps.after(1, WAITED_S) == MOST_GAP_S
    assert naps.after(5, AT_ONCE_S) == 0.0
    assert naps.after(1, WAITED_S) == MOST_GAP_S
    assert [naps.after(1, AT_ONCE_S) for _ in range(5)] == [0.0] * 5
    assert naps.after(3, WAITED_S) == MOST_GAP_S


def test_an_engine_waiting_for_its_reader_is_hardly_slowed_down() -> None:
    naps = Naps(late_pace())
    slept_s = sum(naps.after(1, WAITED_S) for _ in range(200))
    assert 0 < slept_s <= (200 / AWAKE_CHUNKS + 1) * MOST_GAP_S
