"""Weight updates: published policy versions in, samplers that serve the newest one out.

    weights/step-…  ── POST /weights ──▶  sampler, or sampler-0, sampler-1, … at the same time

A version counts as served once all samplers that respond have it. The next one is sent when all have answered, so two
of them differ for the length of one load. A sampler that was restarted loads the newest version by itself and holds the
others up no longer; it is asked what it serves, and sent the newest again, which may have changed while it loaded. A
sampler whose engine has failed is about to exit; the version goes to its successor.

After the trainer has resumed from an earlier checkpoint, the pool follows the new lineage again only when every sampler
has loaded a version of it, those that restart included: tokens record only their step, which a lost version shares.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from m2forge.cluster.process_record import VERSIONS_FILE
from m2forge.errors import EngineError
from m2forge.files import write_atomic
from m2forge.http_client import HttpClient, Response, encode_json
from m2forge.model.config_file import CONFIG_FILE
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.records import JsonValue, PolicyVersion
from m2forge.rl.attempts import gather
from m2forge.rl.layout import Layout
from m2forge.rl.servers import Server
from m2forge.weights.store import WeightStore

LOAD_S = 600.0
"""Timeout of a request to a sampler, which may wait until weights are loaded."""
POLL_S = 0.02
LOOK_S = 0.1
"""How often the loop looks for a new version and for samplers that were restarted."""
FAILED = 503
"""HTTP status of a sampler whose engine has failed."""


class Replica:
    """A sampler, and what it serves."""

    def __init__(self, server: Server, log_folder: Path) -> None:
        self._process, self.name = server.child, server.child.name
        self._log_path = log_folder / f"{self.name}.log"
        self._http = HttpClient(lambda: server.child.url, key=server.key)
        self._num_starts = self._process.num_starts
        """The start of the process that the fields below describe."""
        self.is_up = True
        """Whether it answered the last request, or has not had any."""
        self.version: PolicyVersion | None = None
        """The version that it said it serves; None before it said so."""
        self._is_sent = False
        """Whether it was sent that version, rather than found it itself."""

    async def watch(self, note: Callable[[], None]) -> None:
        """Ask each restarted process for its version, forever. `note`: called when there is an answer."""
        while True:
            num_starts = self._process.num_starts
            if num_starts != self._num_starts or not self.is_up:
                self.is_up = self._is_sent = False
                response = await self._request(num_starts, "GET", "/health")
                if response is not None and response.is_success:
                    self.version = PolicyVersion(**json.loads(response.content)["version"])
                    self._num_starts, self.is_up, self._is_sent = num_starts, True, False
                    note()
            await asyncio.sleep(LOOK_S)

    def lacks(self, version: PolicyVersion) -> bool:
        return not self._is_sent or self.version != version

    async def load(self, version: PolicyVersion, folder: Path) -> None:
        """Have it load a version. If it fails meanwhile, it is not up."""
        num_starts = self._num_starts
        body: JsonValue = {"folder": str(folder.absolute()), "version": version.to_dict()}
        response = await self._request(num_starts, "POST", "/weights", encode_json(body))
        if response is not None and response.is_success:
            if num_starts == self._num_starts:
                self.version, self._is_sent = version, True
            return
        # When the trainer removes a version, it deletes its config first; the newest version is sent next.
        if response is not None and response.status != FAILED:
            if (folder / CONFIG_FILE).exists():
                raise EngineError(
                    f"the sampler refused version {version.step} in {folder} with status {response.status}: "
                    f"{response.text[:500]}. See {self._log_path}, repair the cause, then start the run again"
                )
            return
        self.is_up = False

    async def _request(self, num_starts: int, method: str, path: str, body: bytes = b"") -> Response | None:
        """None if there was no response, or if the process was restarted meanwhile."""
        task = asyncio.create_task(self._http.request(method, path, body, timeout_s=LOAD_S))
        try:
            while not task.done() and self._process.num_starts == num_starts:
                await asyncio.wait({task}, timeout=POLL_S)
        finally:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Response):
            return outcome
        if not isinstance(outcome, OSError | asyncio.CancelledError):
            raise outcome
        return None

    def close(self) -> None:
        self._http.close()


class WeightUpdates:
    def __init__(
        self,
        weights: WeightStore,
        pool: Pool,
        pin: asyncio.Lock,
        note_served: Callable[[PolicyVersion], None],
        layout: Layout,
    ) -> None:
        """`pin`: held during each update. `note_served`: called with each version that all samplers serve."""
        self._weights, self._pool, self._pin = weights, pool, pin
        self._note_served, self._log_folder = note_served, layout.log
        self._versions_path = layout.processes / VERSIONS_FILE
        self._written: dict[str, int] = {}

    async def run(self, samplers: Sequence[Server], writer: PoolWriter) -> None:
        """Send every new version to the samplers, forever."""
        replicas = [Replica(sampler, self._log_folder) for sampler in samplers]

        def note() -> None:
            self._write_versions(replicas)
            versions = {replica.version for replica in replicas if replica.is_up}
            if len(versions) == 1 and (version := versions.pop()) is not None:
                self._note_served(version)

        async def update() -> None:
            while True:
                newest = self._weights.newest()
                if newest is not None and any(replica.is_up and replica.lacks(newest[0]) for replica in replicas):
                    await self._update(replicas, writer)
                    note()
                await asyncio.sleep(LOOK_S)

        with contextlib.ExitStack() as stack:
            for replica in replicas:
                stack.callback(replica.close)
            await gather([update(), *(replica.watch(note) for replica in replicas)])

    def _write_versions(self, replicas: Sequence[Replica]) -> None:
        """For the run page."""
        steps = {replica.name: replica.version.step for replica in replicas if replica.version is not None}
        if steps != self._written:
            write_atomic(self._versions_path, json.dumps(steps))
            self._written = steps

    async def _update(self, replicas: Sequence[Replica], writer: PoolWriter) -> None:
        # A pinned evaluation holds this lock, so look up the version after acquiring it.
        async with self._pin:
            # Read before the version: versions published under an earlier epoch may be lost.
            epoch = await writer.run(self._pool.epoch)
            newest = self._weights.newest()
            if newest is None:
                return
            version, folder = newest
            lacking = [replica for replica in replicas if replica.is_up and replica.lacks(version)]

            async def load(replica: Replica) -> None:
                await replica.load(version, folder)
                self._write_versions(replicas)

            await gather(load(replica) for replica in lacking)
            if not any(replica.lacks(version) for replica in replicas):
                await writer.run(self._pool.rejoin, epoch)
