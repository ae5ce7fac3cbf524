"""For servers that say neither which weights drew a token nor when time is up.

`Turns` lets requests and changes of weights take turns, so that all tokens of a request are of one version and it is
known which. `within_deadline` ends a request at its prompt's deadline, with what is there.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np

from m2forge.errors import EngineError, RequestError
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, PolicyVersion


class Turns:
    def __init__(self, version: PolicyVersion) -> None:
        self.version = version
        self._num_requests = 0
        self._is_open, self._is_quiet = asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_quiet.set()
        self._one_load = asyncio.Lock()
        self._doubt: str | None = None

    async def wait(self, deadline_s: float | None = None) -> None:
        """Until no weights are being changed. Raises TimeoutError when the loop's clock reaches `deadline_s`."""
        async with asyncio.timeout_at(deadline_s):
            while not self._is_open.is_set():
                await self._is_open.wait()
        if self._doubt is not None:
            raise EngineError(self._doubt)

    @contextmanager
    def request(self) -> Iterator[PolicyVersion]:
        """Right after `wait`: weights stay as they are inside."""
        self._num_requests += 1
        self._is_quiet.clear()
        try:
            yield self.version
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._is_quiet.set()

    @asynccontextmanager
    async def load(self, version: PolicyVersion) -> AsyncIterator[None]:
        """Inside no request is under way. The version is the new one if all goes well, and stays if not."""
        async with self._one_load:
            self._is_open.clear()
            try:
                await self._is_quiet.wait()
                yield
                self.version, self._doubt = version, None
            finally:
                self._is_open.set()

    @contextmanager
    def changing(self, folder: Path) -> Iterator[None]:
        """Around what changes the weights, inside `load`. A refusal changes nothing. Where it breaks off otherwise
        nobody knows which weights there are, and requests are refused until a load succeeds."""
        try:
            yield
        except RequestError:
            raise
        except BaseException as error:
            told = f"loading {folder} broke off ({type(error).__name__}: {error})"
            self._doubt = f"it is not known which weights the server has: {told}; load again"
            raise


def deadline_of(prompt: Prompt, grace_s: float = 0.0) -> float | None:
    """When time is up, and `grace_s` more, on the loop's clock."""
    return None if prompt.timeout_s is None else asyncio.get_running_loop().time() + prompt.timeout_s + grace_s


async def within_deadline(chunks: AsyncGenerator[Chunk, None], prompt: Prompt) -> AsyncGenerator[Chunk, None]:
    """These chunks, until they raise TimeoutError: then the completions that have not ended do, as aborted."""
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
        raise EngineError(f"the server ended its answer with {len(unfinished)} completions unfinished")
    for sample in sorted(unfinished):
        ids, logprobs = np.array([], np.int32), np.array([], np.float32)
        yield Chunk(sample, ids, logprobs, logprobs, versions=ids, finish_reason=FinishReason.ABORT)
