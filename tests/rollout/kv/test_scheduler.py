"""Steps keep to their budget, prompts that begin alike are read once, and everybody gets to the end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2forge.protocols import Prompt
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.kv.scheduler import Scheduler
from m2forge.rollout.request import Drawn, Request
from tests.rollout.draw import version


def make(**changes: int) -> Scheduler:
    return Scheduler(
        RolloutConfig(**{"block_tokens": 4, "num_blocks": 8, "max_running": 4, "step_tokens": 8} | changes)  # type: ignore[arg-type]
    )


def request(name: str, ids: list[int], max_tokens: int = 4, priority: int = 0) -> Request:
    """Arrives in the order of the names."""
    prompt = Prompt(np.array(ids, np.int32), max_tokens, priority=priority)
    return Request(name, 0, prompt, seed=0, arrival=ord(name))


def step(scheduler: Scheduler) -> dict[str, int]:
    """Compute what is due, and draw a token, always 99, where all is computed."""
    batch = scheduler.schedule(version(0))
    assert sum(batch.values()) <= scheduler.config.step_tokens
    for member, num_tokens in batch.items():
        scheduler.advance(member, num_tokens, version(0))
        if member.num_uncomputed == 0:
            member.extend(Drawn([99], [0.0], [0.0]), 0)
    for member in batch:
        if member.finish_reason:
            scheduler.remove(member)
    scheduler.audit()
    return {member.id: num_tokens for member, num_tokens in batch.items()}


def test_a_step_is_the_next_tokens_then_parts_of_prompts() -> None:
    scheduler = make()
    scheduler.add(request("a", [1, 2, 3]))
    assert step(scheduler) == {"a": 3}
    scheduler.add(request("b", list(range(10, 20))))
    scheduler.add(request("c", [5]))
    assert step(scheduler) == {"a": 1, "b": 7}
    assert step(scheduler) == {"a": 1, "b": 3, "c": 1}


def test_what_is_being_read_is_waited_for() -> None:
    scheduler = make(num_blocks=16)
    shared = list(range(10))
    for name, own in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.add(request(name, [*shared, own]))
    scheduler.add(request("d", [7]))
    assert step(scheduler) == {"a": 8}
    # Two blocks of four are shared by now; what fills no block is read by each.
    assert step(scheduler) == {"a": 3, "b": 3, "c": 2}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_who_cannot_fit_waits_and_lets_nobody_pass() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(request("a", [1] * 8))
    scheduler.add(request("b", [2] * 12))
    scheduler.add(request("c", [3]))
    assert step(scheduler) == {"a": 8}
    assert step(scheduler) == {"a": 1}
    assert [waiting.id for waiting in scheduler.waiting] == ["b", "c"]


def test_the_youngest_gives_way_and_comes_back_with_its_tokens() -> None:
    scheduler = make(num_blocks=4, step_tokens=16)
    a, b = request("a", [1] * 7, 8), request("b", [2] * 7, 8)
    for member in (a, b):
        scheduler.add(member)
    assert step(scheduler) == {"a": 7, "b": 7}
    assert step(scheduler) == {"a": 1, "b": 1}
    before = b.ids.copy()
    assert step(scheduler) == {"a": 1}  # takes a third block
    assert scheduler.num_preempted == 1
    assert b.ids == before
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert b.num_sampled == 8
    assert b.ids[: len(before)] == before


def test_lower_priority_gives_way_before_age() -> None:
    scheduler = make(num_blocks=4, step_tokens=16)
    low, high = request("a", [1] * 7, 8, priority=0), request("b", [2] * 7, 8, priority=1)
    for member in (low, high):
        scheduler.add(member)
    for _ in range(3):
        batch = step(scheduler)
    assert batch == {"b": 1}


def test_nobody_is_pushed_out_in_vain() -> None:
    scheduler = make(num_blocks=8, step_tokens=32)
    scheduler.add(request("a", [1] * 20, 8, priority=2))
    scheduler.add(request("b", [2] * 4, 4, priority=0))
    step(scheduler)
    scheduler.add(request("c", [3] * 20, 8, priority=1))
    assert step(scheduler) == {"a": 1, "b": 1}


@given(
    sizes=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 10), st.integers(0, 2)), min_size=1, max_size=12),
    num_more=st.integers(0, 5),
    block_tokens=st.integers(1, 5),
    max_running=st.integers(1, 6),
    num_spare=st.integers(0, 6),
)
def test_everybody_ends(
    sizes: list[tuple[int, int, int]], num_more: int, block_tokens: int, max_running: int, num_spare: int
) -> None:
    scheduler = make(
        num_blocks=-(-23 // block_tokens) + num_more,
        block_tokens=block_tokens,
        max_running=max_running,
        step_tokens=max_running + num_spare,
    )
    members = [
        request(chr(65 + place), [place % 3] * num_prompt, max_tokens, priority)
        for place, (num_prompt, max_tokens, priority) in enumerate(sizes)
    ]
    for member in members:
        scheduler.add(member)
    num_steps = 0
    while scheduler.running or scheduler.waiting:
        assert step(scheduler), "a step without progress"
        num_steps += 1
        assert num_steps < 2000
    assert all(member.num_sampled == member.prompt.max_tokens for member in members)
    assert scheduler.pool.num_held == 0
