"""A gateway on a real socket, in a thread of its own, over a scripted engine that remembers what it saw and said."""

import asyncio
import contextlib
import random
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.gateway.episodes.episode import Episode
from m2forge.gateway.server import GatewayServer
from m2forge.protocols import Chunk, Prompt, ToolHost
from m2forge.records import Call
from m2forge.testing.scripted import ScriptedEngine
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool
from tests.gateway.dialogue import sample
from tests.text.draw import TOOLS

T = TypeVar("T")
ADMIN_KEY = "admin-key"
CONTEXT = 4096
Seen = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a prompt, and those of a completion."""
Drawn = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], tuple[int, ...]]
"""The same, with the log-probabilities and versions of the completion."""
TOKENS_PER_VERSION = 5


class Scene:
    """What the model says, message after message, in tokens of its own choice; the policy's samples after that."""

    def __init__(self, format: ChatFormat, says: Iterable[Message] = (), tools: Sequence[Tool] = TOOLS) -> None:
        rng = random.Random(1)
        self.lines = deque(sample(format, message, rng, tools).tolist() for message in says)

    def __call__(self, ids: tuple[int, ...]) -> list[int] | None:
        return self.lines.popleft() if self.lines else None


class ToolScene(Scene):
    """Speaks only to prompts that offer tools; a side call, such as for a title, is answered beside the script."""

    def __init__(self, format: ChatFormat, says: Iterable[Message] = (), tools: Sequence[Tool] = TOOLS) -> None:
        super().__init__(format, says, tools)
        self._decode = format.tokenizer.decode
        self._title = sample(format, Message("assistant", "A title"), random.Random(2), ()).tolist()

    def __call__(self, ids: tuple[int, ...]) -> list[int] | None:
        return super().__call__(ids) if offers_tools(self._decode(ids)) else self._title


def offers_tools(prompt: str) -> bool:
    return "<tools>" in prompt


class WatchedEngine(ScriptedEngine):
    """Keeps all prompts and completions, those that were broken off too. It says that it has taken over other weights
    after every few tokens."""

    def __init__(self, format: ChatFormat, scene: Scene, *, delay_s: float = 0.0, context: int = CONTEXT) -> None:
        tokenizer = format.tokenizer
        super().__init__(
            tokenizer.vocab_size, script=scene, context=context, decode=tokenizer.decode_bytes, delay_s=delay_s
        )
        self.prompts: list[Prompt] = []
        self.completions: list[list[list[int]]] = []
        self.chunks: list[list[Chunk]] = []
        """The chunks of each prompt."""
        self.num_aborted = 0

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        completions: list[list[int]] = [[] for _ in range(prompt.num_samples)]
        self.prompts.append(prompt)
        self.completions.append(completions)
        said: list[Chunk] = []
        self.chunks.append(said)
        is_over = False
        try:
            async with contextlib.aclosing(super().generate(prompt)) as chunks:
                async for chunk in chunks:
                    completions[chunk.sample] += chunk.ids.tolist()
                    said.append(replace(chunk, versions=chunk.versions + len(said) // TOKENS_PER_VERSION))
                    yield said[-1]
            is_over = True
        finally:
            self.num_aborted += not is_over

    def seen(self) -> list[Seen]:
        return [
            (tuple(prompt.ids.tolist()), tuple(ids))
            for prompt, completions in zip(self.prompts, self.completions, strict=True)
            for ids in completions
        ]

    def drawn(self) -> list[Drawn]:
        return [
            (
                tuple(prompt.ids.tolist()),
                tuple(id for chunk in mine for id in chunk.ids.tolist()),
                tuple(logprob for chunk in mine for logprob in chunk.logprobs.tolist()),
                tuple(version for chunk in mine for version in chunk.versions.tolist()),
            )
            for prompt, chunks in zip(self.prompts, self.chunks, strict=True)
            for sample in range(prompt.num_samples)
            for mine in [[chunk for chunk in chunks if chunk.sample == sample]]
        ]


class Live:
    def __init__(self, loop: asyncio.AbstractEventLoop, server: GatewayServer, engine: WatchedEngine) -> None:
        self._loop, self.server, self.engine = loop, server, engine
        self.url, self.episodes, self.counts = server.url, server.episodes, server.app.counts

    def episode(self, task_id: str = "task", budget: Budget | None = None) -> tuple[Episode, str]:
        return self.run(lambda: self.episodes.create(task_id, budget=budget))

    def run(self, function: Callable[[], T]) -> T:
        """The result of a function that runs in the gateway's thread."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(60)

    def num_listeners(self) -> int:
        """Return the number of listeners of all running generations."""
        return sum(generation.num_listeners for generation in self.server.app.calls.running)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(60):
                while not holds():
                    await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(62)


@contextlib.contextmanager
def live(
    format: ChatFormat,
    says: Iterable[Message] = (),
    config: GatewayConfig | None = None,
    *,
    tools: Sequence[Tool] = TOOLS,
    delay_s: float = 0.0,
    tool_host: ToolHost | None = None,
    context: int = CONTEXT,
    scene: type[Scene] = Scene,
) -> Iterator[Live]:
    engine = WatchedEngine(format, scene(format, says, tools), delay_s=delay_s, context=context)
    started: list[Live] = []
    is_started, stop = threading.Event(), asyncio.Event()
    failures: list[BaseException] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        own = config or GatewayConfig(port=0)
        server = GatewayServer(engine, format, own, context=context, admin_key=ADMIN_KEY, tool_host=tool_host)
        async with server:
            started.append(Live(loop, server, engine))
            is_started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:  # noqa: BLE001  (told in the test's own thread)
            failures.append(error)
        finally:
            is_started.set()
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    is_started.wait(60)
    try:
        if not failures:
            yield started[0]
    finally:
        if started:
            loop.call_soon_threadsafe(stop.set)
        thread.join(60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def recorded(episode: Episode) -> list[Seen]:
    return [(tuple(call.prompt_ids.tolist()), tuple(call.response_ids.tolist())) for call in episode.calls()]


def check_recorded(gateway: Live, *episodes: Episode) -> None:
    """The trees, flattened, are what the engine saw and said, token for token, with log-probabilities and versions."""
    calls: list[Call] = gateway.run(lambda: [call for episode in episodes for call in episode.calls()])
    found = [
        tuple(tuple(array.tolist()) for array in (call.prompt_ids, call.response_ids, call.logprobs, call.versions))
        for call in calls
    ]
    assert sorted(found) == sorted(gateway.engine.drawn())


def num_new_tokens(format: ChatFormat, seen: Sequence[Seen]) -> int:
    """Count the prompt tokens of an append-only conversation that are neither an earlier prompt's nor sampled."""
    known: list[int] = []
    num_new = 0
    for prompt_ids, response_ids in seen:
        assert list(prompt_ids[: len(known)]) == known, "the history was written anew"
        num_new += len(prompt_ids) - len(known)
        known = [*prompt_ids, *response_ids]
        if not response_ids or response_ids[-1] not in format.stop_ids:
            known.append(format.stop_ids[0])
    return num_new
