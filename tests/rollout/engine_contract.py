"""What every engine promises, as checks that run against any of them.

A check is a coroutine over an `Engine` whose context is at least `CONTEXT`, which samples slowly enough that a
completion of `MANY` tokens can be caught on its way, and which starts at version 0.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from m2forge.errors import EngineError, M2ForgeError, RequestError
from m2forge.protocols import Chunk, Engine, Prompt
from m2forge.records import FinishReason, PolicyVersion, Sampling

VOCAB_SIZE = 32
CONTEXT = 128
MANY = 100
PROMPT_IDS = (3, 1, 4, 1, 5)


@dataclass(frozen=True)
class Facts:
    """What a check must know of the engine."""

    vocab_size: int = VOCAB_SIZE
    write_weights: Callable[[Path], object] = Path.mkdir
    """Makes a folder that the engine can load."""
    num_looks: int = 1
    """How often its state is looked at before it must be true."""


Check = Callable[[Engine, Facts], Awaitable[None]]


def make_prompt(ids: Sequence[int] = PROMPT_IDS, *, max_tokens: int = 8, **more: object) -> Prompt:
    return Prompt(np.array(ids, np.int32), max_tokens, **more)  # type: ignore[arg-type]  # keywords as the caller has them


async def collect(chunks: AsyncIterator[Chunk], num_samples: int = 1) -> list[list[Chunk]]:
    """The chunks of each completion, in order."""
    found: list[list[Chunk]] = [[] for _ in range(num_samples)]
    async for chunk in chunks:
        found[chunk.sample].append(chunk)
    return found


def join(chunks: Sequence[Chunk], name: str = "ids") -> list[float]:
    return [value for chunk in chunks for value in getattr(chunk, name).tolist()]


async def complete(engine: Engine, prompt: Prompt) -> list[float]:
    (chunks,) = await collect(engine.generate(prompt))
    return join(chunks)


async def settled(engine: Engine) -> None:
    """Wait until nothing runs; an abort takes a moment."""
    for _ in range(4000):
        state = await engine.state()
        if state.num_running == state.num_waiting == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still busy: {await engine.state()}")


async def check_every_token_has_its_figures(engine: Engine, facts: Facts) -> None:
    (chunks,) = await collect(engine.generate(make_prompt(seed=1)))
    for chunk in chunks:
        sizes = {getattr(chunk, name).shape for name in ("ids", "logprobs", "raw_logprobs", "versions")}
        assert sizes == {chunk.ids.shape}
        assert chunk.ids.dtype == chunk.versions.dtype == np.int32
        assert chunk.logprobs.dtype == chunk.raw_logprobs.dtype == np.float32
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == FinishReason.LENGTH
    assert len(join(chunks)) == 8
    assert all(0 <= id < facts.vocab_size for id in join(chunks))
    assert join(chunks, "versions") == [0] * 8
    assert all(-100 < value < 1e-4 for value in join(chunks, "logprobs"))


async def check_plain_sampling_draws_from_the_raw_policy(engine: Engine, facts: Facts) -> None:
    (chunks,) = await collect(engine.generate(make_prompt(seed=2)))
    # float32, each computed by its own route
    assert np.allclose(join(chunks, "logprobs"), join(chunks, "raw_logprobs"), atol=1e-5)


async def check_greedy_tokens_are_certain(engine: Engine, facts: Facts) -> None:
    prompt = make_prompt(sampling=Sampling(temperature=0))
    (chunks,) = await collect(engine.generate(prompt))
    assert join(chunks, "logprobs") == [0] * 8
    assert all(value < 0 for value in join(chunks, "raw_logprobs"))
    assert await complete(engine, prompt) == join(chunks)


async def check_a_seed_draws_the_same_whatever_runs_beside_it(engine: Engine, facts: Facts) -> None:
    prompt = make_prompt(max_tokens=12, seed=7)
    alone = await complete(engine, prompt)
    others = [make_prompt(ids=PROMPT_IDS[: 1 + n % 5], max_tokens=4 + n, seed=n) for n in range(6)]
    beside = await asyncio.gather(*(complete(engine, other) for other in [*others[:3], prompt, *others[3:]]))
    assert beside[3] == alone
    assert await complete(engine, make_prompt(max_tokens=12, seed=8)) != alone


async def check_a_stop_id_ends_a_completion_and_belongs_to_it(engine: Engine, facts: Facts) -> None:
    free = await complete(engine, make_prompt(max_tokens=12, seed=3))
    stop_id = free[4]
    (chunks,) = await collect(engine.generate(make_prompt(max_tokens=12, seed=3, stop_ids=(int(stop_id),))))
    num_tokens = free.index(stop_id) + 1
    assert join(chunks) == free[:num_tokens]
    assert chunks[-1].finish_reason == FinishReason.STOP
    # A token that is both, the last allowed and a stop id, stopped the completion.
    (chunks,) = await collect(engine.generate(make_prompt(max_tokens=num_tokens, seed=3, stop_ids=(int(stop_id),))))
    assert join(chunks) == free[:num_tokens]
    assert chunks[-1].finish_reason == FinishReason.STOP


async def check_samples_differ_and_each_ends_once(engine: Engine, facts: Facts) -> None:
    prompt = make_prompt(max_tokens=10, seed=5, num_samples=3)
    samples = await collect(engine.generate(prompt), 3)
    for chunks in samples:
        assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    drawn = [tuple(join(chunks)) for chunks in samples]
    assert len(set(drawn)) == 3
    again = await collect(engine.generate(prompt), 3)
    assert [tuple(join(chunks)) for chunks in again] == drawn


async def check_closing_the_iterator_aborts(engine: Engine, facts: Facts) -> None:
    async with aclosing(engine.generate(make_prompt(max_tokens=MANY, num_samples=2))) as chunks:
        await anext(chunks)
        for look in range(facts.num_looks):
            await asyncio.sleep(0.01 * look)
            state = await engine.state()
            num_requests = state.num_running + state.num_waiting
            if num_requests == 2:
                break
        assert num_requests == 2
    await settled(engine)


async def check_cancelling_who_waits_aborts(engine: Engine, facts: Facts) -> None:
    task = asyncio.create_task(complete(engine, make_prompt(max_tokens=MANY)))
    while not (await engine.state()).num_running:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settled(engine)


async def check_a_deadline_gives_what_is_there(engine: Engine, facts: Facts) -> None:
    prompt = make_prompt(max_tokens=MANY, num_samples=2, timeout_s=0.05)
    for chunks in await collect(engine.generate(prompt), 2):
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == FinishReason.ABORT
        assert len(join(chunks)) < MANY
    await settled(engine)


async def check_a_prompt_that_never_fits_is_refused_at_once(engine: Engine, facts: Facts) -> None:
    with pytest.raises(RequestError):
        await anext(engine.generate(make_prompt(max_tokens=10**6)))
    with pytest.raises(RequestError):
        await anext(engine.generate(make_prompt(ids=(1, facts.vocab_size))))
    assert len(await complete(engine, make_prompt())) == 8


async def check_weights_are_taken_over_and_named(engine: Engine, facts: Facts) -> None:
    before = await engine.state()
    assert before.version.step == 0
    prompt = make_prompt(max_tokens=12, seed=9)
    old = await complete(engine, prompt)
    version = PolicyVersion(before.version.lineage, 3)
    with TemporaryDirectory() as folder:
        facts.write_weights(Path(folder) / "model")
        await engine.load(Path(folder) / "model", version)
    assert (await engine.state()).version == version
    (chunks,) = await collect(engine.generate(prompt))
    assert join(chunks, "versions") == [3] * 12
    assert join(chunks) != old


async def check_a_folder_that_is_none_is_refused(engine: Engine, facts: Facts) -> None:
    with pytest.raises(M2ForgeError, match="no-such-model"):
        await engine.load(Path("/no-such-model"), PolicyVersion("other", 1))
    assert (await engine.state()).version.step == 0
    assert len(await complete(engine, make_prompt())) == 8


async def check_a_closed_engine_says_so(engine: Engine, facts: Facts) -> None:
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await anext(engine.generate(make_prompt()))
    await engine.close()


CONTRACT: tuple[Check, ...] = (
    check_every_token_has_its_figures,
    check_plain_sampling_draws_from_the_raw_policy,
    check_greedy_tokens_are_certain,
    check_a_seed_draws_the_same_whatever_runs_beside_it,
    check_a_stop_id_ends_a_completion_and_belongs_to_it,
    check_samples_differ_and_each_ends_once,
    check_closing_the_iterator_aborts,
    check_cancelling_who_waits_aborts,
    check_a_deadline_gives_what_is_there,
    check_a_prompt_that_never_fits_is_refused_at_once,
    check_weights_are_taken_over_and_named,
    check_a_folder_that_is_none_is_refused,
    check_a_closed_engine_says_so,
)
every_check = pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.removeprefix("check_"))


def run_check(
    check: Check,
    make: Callable[[], AbstractAsyncContextManager[Engine]],
    facts: Facts | None = None,
) -> None:
    """Run one check on an engine of its own, in a loop of its own."""

    async def run() -> None:
        async with make() as engine, asyncio.timeout(100):
            await check(engine, facts or Facts())
            await engine.close()

    asyncio.run(run())
