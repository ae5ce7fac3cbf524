"""Decode steps between host syncs: as many as are of use, and blocks for no more."""

import pytest

from m2forge.protocols import Prompt
from m2forge.records import PolicyVersion
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.kv.scheduler import Scheduler
from m2forge.rollout.request import Request
from tests.rollout.draw import ids_of

VERSION = PolicyVersion("p", 0)


def running(num_blocks: int, *wanted: int, max_running: int = 8) -> tuple[Scheduler, list[Request]]:
    """Requests whose prompts, one block each, are prefilled, up to the first token."""
    config = RolloutConfig(block_tokens=4, num_blocks=num_blocks, max_running=max_running, step_tokens=64)
    scheduler = Scheduler(config, 4096)
    requests = []
    for index, max_tokens in enumerate(wanted):
        prompt = Prompt(ids_of(*[index + 1] * 4), max_tokens + 1)
        requests.append(Request(str(index), 0, prompt, seed=0, arrival=index))
        scheduler.add(requests[-1])
    for request, num_tokens in scheduler.schedule(VERSION, admits=True).items():
        request.ids.append(1)
        scheduler.advance(request, num_tokens, VERSION)
    return scheduler, [request for request in requests if request.blocks]


@pytest.mark.parametrize(
    ("wanted", "depth", "tokens_per_step", "num_steps"),
    [(100, 0, 1.0, 8), (5, 0, 1.0, 5), (5, 3, 2.5, 2), (6, 3, 2.5, 3), (1, 3, 2.5, 1), (100, 3, 4.0, 8)],
)
def test_no_step_runs_beyond_the_longest_completion(
    wanted: int, depth: int, tokens_per_step: float, num_steps: int
) -> None:
    scheduler, requests = running(64, 1, wanted)
    assert scheduler.num_steps_per_sync(requests, depth, tokens_per_step) == num_steps


def test_steps_end_with_a_completion_while_requests_wait() -> None:
    scheduler, requests = running(64, 3, 100, 50, max_running=2)
    assert len(requests) == 2
    assert scheduler.num_steps_per_sync(requests, 0, 1.0) == 3


def test_few_blocks_allow_one_step_unless_few_are_needed() -> None:
    # Two hold a block each: of four, two are left.
    scheduler, requests = running(4, 50, 50)
    assert scheduler.num_steps_per_sync(requests, 0, 1.0) == 1
    scheduler, requests = running(4, 4, 4)
    assert scheduler.num_steps_per_sync(requests, 3, 1.0) == 4


def test_blocks_are_reserved_for_remaining_tokens_only() -> None:
    scheduler, requests = running(64, 3, 100)
    assert scheduler.reserve_steps(requests, [1, 2], 0, 1) == [1, 2]
    assert scheduler.reserve_steps(requests, [1, 2], 3, 2) == [3, 11]
    assert [len(request.blocks) for request in requests] == [2, 4]
    scheduler, requests = running(2, 100)
    assert scheduler.reserve_steps(requests, [1], 3, 8) == [4]
