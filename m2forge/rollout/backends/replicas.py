"""Several engines that serve the same policy, as one engine: prompts in, each sampled by one replica.

Prompts of one affinity go to one replica, whose prefix cache holds what they share; the first of them goes to the
replica with the fewest completions in flight. A replica that fails a request, or does not say its state, is down until
it says it again: meanwhile prompts go to the others, also those of its affinities, which stay there. A request is never
repeated at another replica; its caller retries it. While all are down, prompts go to them all the same and wait or fail
as they would with one engine.

Replicas may serve different versions: each token is recorded with the version of the replica that sampled it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

from m2forge.errors import EngineError
from m2forge.protocols import Chunk, Engine, EngineState, Prompt, ReplicaState
from m2forge.records import PolicyVersion

MAX_AFFINITIES = 1 << 16
"""Affinities remembered, the last used ones."""
STATE_S = 1.0
"""How long the other replicas may take to say their state once one has."""
PROBE_S = 0.2
"""Time between two requests for the state of a replica that is down."""


class Replica:
    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.num_running = self.num_requests = 0
        self.chosen = 0
        """When it was last chosen for an affinity, as a number that grows."""
        self.probe: asyncio.Task[None] | None = None
        """Asks for its state until there is an answer; None while it is up."""

    @property
    def is_up(self) -> bool:
        return self.probe is None


class ReplicatedEngine:
    """See `Engine`."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        """`engines`: by the names that metrics use."""
        self._replicas = [Replica(name, engine) for name, engine in engines.items()]
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._num_chosen = 0

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        replica = self._choose(prompt.affinity)
        replica.num_requests += 1
        replica.num_running += prompt.num_samples
        try:
            async with aclosing(replica.engine.generate(prompt)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineError:
            self._note_down(replica)
            raise
        finally:
            replica.num_running -= prompt.num_samples

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        await asyncio.gather(*(replica.engine.load(folder, version) for replica in self._replicas))

    async def state(self) -> EngineState:
        """The replicas that answer: their completions, and the oldest of their versions."""
        asked = {asyncio.create_task(replica.engine.state()): replica for replica in self._replicas}
        states: list[EngineState] = []
        failures: list[EngineError] = []
        try:
            waiting = {*asked}
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=STATE_S if states else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    try:
                        states.append(task.result())
                    except EngineError as error:
                        failures.append(error)
                        self._note_down(asked[task])
            for task in waiting:
                self._note_down(asked[task])
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not states:
            raise failures[0]
        oldest = min(states, key=lambda state: state.version.step)
        num_running, num_waiting = (
            sum(state.num_running for state in states),
            sum(state.num_waiting for state in states),
        )
        return EngineState(oldest.version, num_running, num_waiting)

    def replicas(self) -> list[ReplicaState]:
        return [
            ReplicaState(replica.name, replica.is_up, replica.num_running, replica.num_requests)
            for replica in self._replicas
        ]

    async def close(self) -> None:
        probes = [replica.probe for replica in self._replicas if replica.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas))

    def _choose(self, affinity: str | None) -> Replica:
        replica = None if affinity is None else self._homes.get(affinity)
        candidates = [each for each in self._replicas if each.is_up] or self._replicas
        if replica not in candidates:
            replica = min(candidates, key=lambda each: (each.num_running, each.chosen))
            self._num_chosen += 1
            replica.chosen = self._num_chosen
        assert replica is not None
        if affinity is not None:
            self._homes[affinity] = replica
            self._homes.move_to_end(affinity)
            if len(self._homes) > MAX_AFFINITIES:
                self._homes.popitem(last=False)
        return replica

    def _note_down(self, replica: Replica) -> None:
        if replica.is_up:
            replica.probe = asyncio.create_task(self._probe(replica))

    async def _probe(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                await replica.engine.state()
            except EngineError:
                continue
            replica.probe = None
            return
