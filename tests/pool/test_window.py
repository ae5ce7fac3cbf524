"""The order that the window promises, on random histories of submissions, ends, batches and groups given up."""

from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.pool.config import WindowConfig
from m2forge.pool.window import Unit, Window


def filled(num_units: int, size: int, finished: Collection[int] = ()) -> Window:
    window = Window(size)
    for position in range(num_units):
        window.submit(Unit(position, f"g{position}", is_finished=position in finished))
    return window


def places(units: list[Unit]) -> list[int]:
    return [unit.position for unit in units]


def test_the_worked_example() -> None:
    """N = 8, W = 4: three may overtake, the largest lag is 10."""
    window = Window(4)
    for position in range(8):
        window.submit(Unit(position, f"g{position}"))
    last = position = 7
    # The unit at place 7 is the last to end: all seven before it are taken, then the three that may overtake it.
    num_taken = 0
    while window.head is not None and window.head.position < last:
        window.finish(window.head.position)
        num_taken += len(window.take(1))
        position += 1
        window.submit(Unit(position, f"g{position}"))
    for other in range(last + 1, position + 1):
        window.finish(other)
    overtaking = []
    while taken := window.take(1):
        overtaking += places(taken)
        position += 1
        window.submit(Unit(position, f"g{position}", is_finished=True))
    assert overtaking == [8, 9, 10]
    window.finish(last)
    (unit,) = window.take(1)
    assert (unit.position, window.lag(unit)) == (last, 10)


def test_nothing_beyond_the_window_is_taken_even_if_finished() -> None:
    window = filled(8, 4, finished={1, 3, 4, 5, 6, 7})
    assert places(window.take(2)) == [1, 3]
    assert window.take(1) == []
    window.finish(0)
    # The head is consumed, so the window moves to its next head, 2, and shows 4 and 5.
    assert places(window.take(3)) == [0, 4, 5]
    assert window.take(1) == []


def test_a_batch_may_exceed_the_window_if_its_units_end_in_order() -> None:
    assert places(filled(8, 1, finished={0, 1, 2, 3, 5}).take(4)) == [0, 1, 2, 3]
    assert filled(8, 1, finished={0, 1, 2, 3, 5}).take(5) == []


def test_the_window_is_a_share_of_the_queue_or_a_number() -> None:
    assert WindowConfig(queue=256, window=0.3).size == 77
    assert WindowConfig(queue=8, window=4).size == 4
    assert WindowConfig(queue=8, window=1.0).size == 8
    assert WindowConfig(queue=8, window=1).size == 1
    assert WindowConfig(queue=2, window=0.1).size == 1


def test_stale_units_are_given_up_with_their_groups() -> None:
    window = Window(4)
    for position, (group, step) in enumerate([("a", 5), ("b", 2), ("b", 9), ("a", 7)]):
        window.submit(Unit(position, group, is_finished=position != 3, oldest_step=step))
    assert places(window.give_up_stale(5)) == [1, 2]
    assert places(list(window)) == [0, 3]


def labelled(labels: str, size: int, finished: Collection[int]) -> Window:
    window = Window(size)
    for position, label in enumerate(labels):
        window.submit(Unit(position, f"g{position}", label, is_finished=position in finished))
    return window


def test_quotas_are_kept_while_units_of_the_label_are_under_way() -> None:
    window = labelled("aaabab", 6, finished={0, 1, 2, 4})
    assert window.take(2, {"a": 1, "b": 1}) == []
    window.finish(5)
    assert places(window.take(2, {"a": 1, "b": 1})) == [0, 5]


def test_a_label_outside_the_window_is_served_from_beyond_it() -> None:
    window = labelled("aaaab", 4, finished={0, 1, 2, 3, 4})
    # The b at place 4 comes into sight once 0 is chosen.
    assert places(window.take(2, {"a": 1, "b": 1})) == [0, 4]
    assert places(labelled("aaaaaab", 2, finished=range(7)).take(4, {"a": 3, "b": 1})) == [0, 1, 2, 6]
    window = labelled("aaaa", 4, finished={0, 1, 2, 3})
    assert window.take(4, {"a": 3, "b": 1}) == []
    window.submit(Unit(4, "g4", "b", is_finished=True))
    assert places(window.take(4, {"a": 3, "b": 1})) == [0, 1, 2, 4]


def test_wrong_numbers_are_refused() -> None:
    window = filled(2, 2)
    with pytest.raises(RecordError, match="size"):
        Window(0)
    with pytest.raises(RecordError, match="after 1"):
        window.submit(Unit(1, "g"))
    with pytest.raises(RecordError, match="quotas"):
        window.take(2, {"a": 1})
    with pytest.raises(RecordError, match="queue position 9"):
        window.give_up(9)


# -- any history -------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, list[tuple[str, int]]]:
    """(N, W, batch, what happens)"""
    num_queued = draw(st.integers(1, 24))
    size = draw(st.integers(1, num_queued + 4))
    batch = draw(st.integers(1, num_queued))
    events = st.tuples(st.sampled_from(["finish", "finish", "finish", "take", "drop"]), st.integers(0, 10**6))
    return num_queued, size, batch, draw(st.lists(events, min_size=20, max_size=200))


class Model:
    """The plainest statement of the rule, over the list of all that was ever submitted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gone: list[bool] = []
        self.finished: list[bool] = []

    def head(self) -> int:
        return next((position for position, gone in enumerate(self.gone) if not gone), len(self.gone))

    def takeable(self) -> list[int]:
        inside = range(self.head(), min(self.head() + self.size, len(self.gone)))
        return [position for position in inside if self.finished[position] and not self.gone[position]]

    def take(self, num_units: int) -> list[int]:
        before, taken = list(self.gone), []
        for _ in range(num_units):
            if not self.takeable():
                self.gone = before
                return []
            taken.append(self.takeable()[0])
            self.gone[taken[-1]] = True
        return taken


@given(histories())
def test_the_window_is_its_plain_statement(history: tuple[int, int, int, list[tuple[str, int]]]) -> None:
    num_queued, size, batch, events = history
    window, model = Window(size), Model(size)
    groups: list[int] = []

    def refill() -> None:
        while len(window) < num_queued:
            position = len(model.gone)
            # Groups of up to three units, some of which are then consumed before others.
            groups.append(position // 3)
            window.submit(Unit(position, f"g{groups[-1]}"))
            model.gone.append(False)
            model.finished.append(False)

    refill()
    for kind, number in events:
        head = model.head()
        waiting = [position for position, gone in enumerate(model.gone) if not gone]
        position = waiting[number % len(waiting)]
        if kind == "finish":
            window.finish(position)
            model.finished[position] = True
            assert window.head is not None
            assert window.head.position == head, "the head moves only when it is consumed"
        elif kind == "take":
            taken = window.take(batch)
            assert places(taken) == model.take(batch)
            for unit in taken:
                assert window.lag(unit) <= num_queued + size - 2 + batch
        else:
            gone = window.give_up(position)
            assert position in places(gone)
            assert not any(unit.group == f"g{groups[position]}" for unit in window), "never a part of a group"
            for unit in gone:
                model.gone[unit.position] = True
        assert places(list(window)) == [position for position, gone in enumerate(model.gone) if not gone]
        refill()


@given(histories())
def test_one_by_one_the_lag_is_bounded_by_queue_and_window(
    history: tuple[int, int, int, list[tuple[str, int]]],
) -> None:
    num_queued, size, _, events = history
    window = filled(num_queued, size)
    next_place = num_queued
    for kind, number in events:
        waiting = places(list(window))
        if kind != "take":
            window.finish(waiting[number % len(waiting)])
            continue
        for unit in window.take(1):
            assert window.lag(unit) <= num_queued + size - 2
            window.submit(Unit(next_place, f"g{next_place}"))
            next_place += 1


@given(st.sets(st.integers(0, 15)), st.integers(1, 16))
def test_a_window_of_1_is_fifo_and_of_all_takes_any_unit(finished: set[int], num: int) -> None:
    strict = places(filled(16, 1, finished).take(num))
    assert strict == (list(range(num)) if set(range(num)) <= finished else [])
    greedy = places(filled(16, 16, finished).take(num))
    assert greedy == (sorted(finished)[:num] if len(finished) >= num else [])


@given(st.text("abc", min_size=1, max_size=20), st.integers(1, 8), st.integers(1, 4), st.data())
def test_every_batch_waits_only_for_quotas_not_yet_queued(
    labels: str, size: int, num_each: int, data: st.DataObject
) -> None:
    quotas = {"a": num_each, "b": data.draw(st.integers(1, 4))}
    num_units = sum(quotas.values())
    finished = data.draw(st.sets(st.integers(0, len(labels) - 1)))
    window = labelled(labels, size, finished)
    chosen = window.choose(num_units, quotas)
    assert all(unit.is_finished for unit in chosen)
    assert Counter(unit.label for unit in chosen) == (quotas if chosen else {})
    for position in range(len(labels)):
        window.finish(position)
    is_queued = all(labels.count(label) >= num for label, num in quotas.items())
    assert len(window.take(num_units, quotas)) == (num_units if is_queued else 0)


# -- batches bounded by their tokens -----------------------------------------------------------------------------------


def sized(sizes: list[int], window_size: int, finished: Collection[int], labels: str = "") -> Window:
    window = Window(window_size)
    for position, num_tokens in enumerate(sizes):
        label = labels[position % len(labels)] if labels else ""
        window.submit(Unit(position, f"g{position}", label, position in finished, num_tokens=num_tokens))
    return window


def num_tokens(units: list[Unit]) -> int:
    return sum(unit.num_tokens for unit in units)


def halves(num_units: int) -> dict[str, int]:
    return {"a": num_units - num_units // 2, "b": num_units // 2}


def test_a_batch_ends_before_the_unit_that_would_not_fit() -> None:
    window = sized([3, 4, 2, 5, 1], 5, range(5))
    assert places(window.take_within(9, 5)) == [0, 1, 2]
    assert places(window.take_within(9, 2)) == [3, 4]
    assert window.take_within(9, 2) == []


def test_a_unit_beyond_all_bounds_is_taken_alone() -> None:
    assert places(sized([90, 1, 1], 3, range(3)).take_within(9, 3)) == [0]


def test_a_batch_waits_until_it_is_known_whether_one_more_fits() -> None:
    window = sized([3, 4, 2], 3, {0, 1})
    assert window.take_within(9, 3) == []
    assert places(sized([3, 4, 2], 3, {0, 1}).take_within(7, 3)) == [0, 1], "it is full"
    window.finish(2)
    assert places(window.take_within(9, 3)) == [0, 1, 2]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=24),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from(["", "ab", "aab", "abbb", "a"]),
    st.data(),
)
def test_a_bounded_batch_is_the_largest_that_the_order_allows(
    sizes: list[int], size: int, max_tokens: int, max_units: int, labels: str, data: st.DataObject
) -> None:
    finished = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    window, same = sized(sizes, size, finished, labels), sized(sizes, size, finished, labels)
    quotas = halves if labels else None
    taken = window.take_within(max_tokens, max_units, quotas)
    assert len(window) == len(same) - len(taken)
    assert window.num_taken == len(taken)
    if taken:
        assert len(taken) <= max_units
        assert num_tokens(taken) <= max_tokens or len(taken) == 1
        # The order is that of a batch of so many units; with one more it would be too large.
        assert taken == same.choose(len(taken), halves(len(taken)) if labels else None)
        more = same.choose(len(taken) + 1, halves(len(taken) + 1) if labels else None)
        assert len(taken) == max_units or num_tokens(taken) >= max_tokens or num_tokens(more) > max_tokens
    # Once all is finished, a queue that holds the largest batch gives one.
    for position in range(len(sizes)):
        same.finish(position)
    wanted = halves(max_units) if labels else {"": max_units}
    is_queued = all(sum(unit.label == label for unit in same) >= num for label, num in wanted.items())
    assert same.take_within(max_tokens, max_units, quotas) or not is_queued


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 20), st.data())
def test_bounded_batches_of_a_full_queue_train_all_once(
    num_queued: int, max_units: int, max_tokens: int, data: st.DataObject
) -> None:
    max_units, size = min(max_units, num_queued), data.draw(st.integers(1, num_queued))
    window = Window(size)
    seen: list[int] = []
    for position in range(60):
        window.submit(Unit(position, f"g{position}", num_tokens=data.draw(st.integers(1, 9))))
        waiting = places([unit for unit in window if not unit.is_finished])
        ending = data.draw(st.integers(0, 2 * len(waiting)))
        if ending < len(waiting):
            window.finish(waiting[ending])
        while len(window) == num_queued:
            taken = window.take_within(max_tokens, max_units)
            assert all(window.lag(unit) <= num_queued + size - 2 + max_units for unit in taken)
            seen += places(taken)
            if not taken:
                window.finish(places([unit for unit in window if not unit.is_finished])[0])
    assert len(seen) == len(set(seen)) == 60 - len(window)
