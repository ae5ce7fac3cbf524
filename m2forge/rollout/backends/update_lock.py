"""Version tracking and deadlines for servers that report no policy version and keep no deadline.

`UpdateLock` keeps requests and weight updates apart, so that all tokens of a request have one known version.
`within_deadline` ends a request at its prompt's deadline, with the tokens received so far.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np

from m2forge.errors import EngineError, RequestError
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, PolicyVersion


class UpdateLock:
    def __init__(self, version: PolicyVersion) -> None:
        self.version = version
        self._num_requests = 0
        self._is_open, self._is_drained = asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_drained.set()
        self._load_lock = asyncio.Lock()
        self._unknown_weights: str | None = None

    async def wait(self, deadline_s: float | None = None) -> None:
        """Wait until no weight update is running. Raises TimeoutError when the loop's clock reaches `deadline_s`."""
        async with asyncio.timeout_at(deadline_s):
            while not self._is_open.is_set():
                await self._is_open.wait()
        if self._unknown_weights is not None:
            raise EngineError(self._unknown_weights)

    @contextmanager
    def request(self) -> Iterator[PolicyVersion]:
        """Enter right after `wait`; the weights do not change inside."""
        self._num_requests += 1
        self._is_drained.clear()
        try:
            yield self.version
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._is_drained.set()

    @asynccontextmanager
    async def load(self, version: PolicyVersion) -> AsyncIterator[None]:
        """No request is in flight inside. On success the version becomes `version`; on an error it stays."""
        async with self._load_lock:
            self._is_open.clear()
            try:
                await self._is_drained.wait()
                yield
                self.version, self._unknown_weights = version, None
            finally:
                self._is_open.set()

    @contextmanager
    def changing(self, folder: Path) -> Iterator[None]:
        """Wraps the calls that change the weights, inside `load`. A RequestError leaves the weights as they were. After
        any other error the server's weights are unknown, and requests fail until a load succeeds."""
        try:
            yield
        except RequestError:
            raise
        except BaseException as error:
            reason = f"loading {folder} failed ({type(error).__name__}: {error})"
            self._unknown_weights = f"the server's weights are unknown: {reason}; load again"
            raise


def deadline_of(prompt: Prompt, grace_s: float = 0.0) -> float | None:
    """The prompt's deadline plus `grace_s`, on the loop's clock."""
    return None if prompt.timeout_s is None else asyncio.get_running_loop().time() + prompt.timeout_s + grace_s


async def within_deadline(chunks: AsyncGenerator[Chunk, None], prompt: Prompt) -> AsyncGenerator[Chunk, None]:
    """Yields the chunks; if they raise TimeoutError, ends each unfinished completion with an ABORT chunk."""
    unfinished, is_late = set(range(prompt.num_samples)), False
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    unfinished.discard(chunk.sample)
                yield chunk
        except TimeoutError:
            is_late = True
    if unfinished and not is_late:
        raise EngineError(f"the server ended its response with {len(unfinished)} completions unfinished")
    for sample in sorted(unfinished):
        ids, logprobs = np.array([], np.int32), np.array([], np.float32)
        yield Chunk(sample, ids, logprobs, logprobs, versions=ids, finish_reason=FinishReason.ABORT)
