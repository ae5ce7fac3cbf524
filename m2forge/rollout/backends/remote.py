"""Client of an engine behind this package's server (see `server`), on this machine or another.

The remote engine's promises hold here: it rejects and aborts requests and reports versions; this side only transports
them. A lost connection raises an `EngineError`; no request is retried, because one without a seed would be sampled a
second time.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

from m2forge.errors import EngineError
from m2forge.protocols import Chunk, EngineState, Prompt
from m2forge.records import PolicyVersion
from m2forge.rollout.backends.client import ANSWER_S, Client
from m2forge.rollout.backends.update_lock import deadline_of, within_deadline
from m2forge.rollout.server import wire


class RemoteEngine:
    """See `Engine`. The server must be able to read the folders that it is asked to load."""

    def __init__(self, url: str | Callable[[], str], *, key: str | None = None) -> None:
        """`url`: of the server, or a function that returns it, for one that may move. `key`: its API key, sent with
        every request."""
        self._client = Client(url, key=key, read_error=wire.read_error)

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        async with aclosing(within_deadline(self._sample(prompt), prompt)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        await self._client.post("/weights", {"folder": str(folder.absolute()), "version": version.to_dict()})

    async def state(self) -> EngineState:
        health = self._client.parse(await self._client.get("/health"))
        try:
            return EngineState(PolicyVersion(**health["version"]), health["num_running"], health["num_waiting"])
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self._client.url}/health did not return an engine state: {health!r}") from error

    async def close(self) -> None:
        """Closes the connections. The server and its engine keep running."""
        await self._client.close()

    async def _sample(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        # The server enforces the deadline; this later one covers a server that no longer responds.
        deadline_s = deadline_of(prompt, ANSWER_S)
        async with aclosing(self._client.batches("/generate", wire.write_prompt(prompt), deadline_s)) as batches:
            async for lines in batches:
                for chunk in wire.read_chunks(lines):
                    yield chunk
