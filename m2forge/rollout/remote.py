"""An engine behind the server of this package (see `server`), on this machine or another.

Whatever the engine there promises holds here: it refuses, aborts and names versions, this side only carries. A server
that breaks off is an `EngineError`; nothing is asked twice, because a request without a seed would be drawn anew.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from m2forge.errors import EngineError
from m2forge.protocols import Chunk, EngineState, Prompt
from m2forge.records import PolicyVersion
from m2forge.rollout import wire
from m2forge.rollout.client import ANSWER_S, Client
from m2forge.rollout.turn import deadline_of, within_deadline


class RemoteEngine:
    """See `Engine`. Folders are the server's own: it must see what it is told to load."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        """`key`: the server's, sent with every request."""
        self._client = Client(url, key=key, read_error=wire.read_error)

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        async with aclosing(within_deadline(self._sample(prompt), prompt)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        await self._client.post("/weights", {"folder": str(folder.absolute()), "version": version.to_dict()})

    async def state(self) -> EngineState:
        told = self._client.parse(await self._client.get("/health"))
        try:
            return EngineState(PolicyVersion(**told["version"]), told["num_running"], told["num_waiting"])
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self._client.url}/health is no state of an engine: {told!r}") from error

    async def close(self) -> None:
        """Hang up. The server and its engine go on."""
        await self._client.close()

    async def _sample(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        # The server keeps the deadline; this one is for a server that does not answer any more.
        deadline_s = deadline_of(prompt, ANSWER_S)
        async with aclosing(self._client.batches("/generate", wire.write_prompt(prompt), deadline_s)) as batches:
            async for lines in batches:
                for chunk in wire.read_chunks(lines):
                    yield chunk
