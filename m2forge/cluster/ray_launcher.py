"""Launches roles on the nodes of a Ray cluster: each is the child of an actor, which Ray places.

    driver (loop or keeper) ── placement group, SPREAD ──▶ actor on a node ── child ──▶ sampler, gateway, host-0, …

The actor starts, restarts, records and stops its child as `local` does. The child dies with the actor, and the actor
with its driver. If a node or an actor is lost, the driver starts another actor for the role where Ray finds room; a
server then has another URL, which the record of its process holds. Ray carries no requests: samples, attempts and
weights never pass through actors.

All nodes have the same code, and see the run's folder and the one that it was started in under the same paths.
`require_nodes` checks this before a run writes anything, and every actor checks its own node, which may have joined
later. A server listens on the address of its node.
"""

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from m2forge.cluster.config import RayConfig
from m2forge.cluster.launcher import NODE_ADDRESS, Launched, Role
from m2forge.cluster.local import MAX_DEATHS, SHORT_S, STOP_S, LocalLauncher
from m2forge.cluster.process_record import ProcessRecord, record_size
from m2forge.errors import ConfigError, EngineError, M2ForgeError
from m2forge.files import shared_token
from m2forge.loop_thread import LoopThread
from m2forge.python_source import code_digest

GPU_TYPE = "accelerator_type:"
"""Prefix of Ray's resource for a GPU's type."""
GPU_SHARE = 0.001
"""Share of a node's `accelerator_type` that a role reserves, as Ray's own option of that name does."""
CONNECT_S = 5.0
REPEAT_S = 60.0
"""Time between two warnings that a role waits for a node."""
SLACK_S = 5.0
"""Seconds that stopping an actor takes beyond stopping its child."""
_log = logging.getLogger(__name__)

NO_VARIABLES: Mapping[str, str] = {}

Needs = Mapping[str, float]
"""Numbers of Ray's resources: CPU, GPU, accelerator_type:…"""


@dataclass(frozen=True, slots=True)
class RayPlan:
    """The resources that a driver reserves, and the requirements on its nodes."""

    address: str
    start_s: float
    needs: Mapping[str, Needs]
    """By role."""
    folder: str
    """The run's folder, or before it exists the one that will hold it."""
    cwd: str
    digest: str

    @classmethod
    def make(cls, config: RayConfig, num_gpus: Mapping[str, int], folder: Path) -> "RayPlan":
        """`num_gpus`: of each role."""
        needs: dict[str, dict[str, float]] = {name: {"CPU": config.cpus} for name in num_gpus}
        for name, num in num_gpus.items():
            if num:
                needs[name]["GPU"] = num
                if config.gpu is not None:
                    needs[name][f"{GPU_TYPE}{config.gpu}"] = GPU_SHARE
        return cls(config.address, config.start_s, needs, str(folder.absolute()), str(Path.cwd()), code_digest())

    @classmethod
    def read(cls, text: str) -> "RayPlan":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def problem_here(self, token: str | None = None, variables: Mapping[str, str] = NO_VARIABLES) -> str | None:
        """Why this node cannot run roles. `token`: a file that the driver wrote to the folder. `variables`: those that
        its environment must have, and the configuration's key that names each."""
        if not Path(self.folder).is_dir() or (token is not None and not Path(self.folder, token).exists()):
            return f"{self.folder} is not the folder of that name on the other nodes; put runs on a shared file system"
        if not Path(self.cwd).is_dir():
            return f"{self.cwd}, where the run was started, is not there; start it in a folder that all nodes have"
        if code_digest() != self.digest:
            return "m2forge has other code there; install the same version on all nodes"
        for name, key in variables.items():
            if not os.environ.get(name):
                return f"{key}: the environment variable {name} is not set there; set it where `ray start` runs"
        return None

    def shortage(self, nodes: list[dict[str, Any]]) -> str | None:
        """Why these nodes, if they were idle, would be too small for the roles."""
        free = [dict(node["Resources"]) for node in nodes]
        for name, need in sorted(self.needs.items(), key=lambda pair: sorted(pair[1].items()), reverse=True):
            room = next((one for one in free if all(one.get(what, 0) >= num for what, num in need.items())), None)
            if room is None:
                return self.describe_shortage(name, nodes)
            for what, num in need.items():
                room[what] -= num
        return None

    def describe_shortage(self, name: str, nodes: list[dict[str, Any]]) -> str:
        asked = "; ".join(f"{role}: {_listed(need)}" for role, need in self.needs.items())
        has = "; ".join(f"{_label(node)}: {_listed(node['Resources'])}" for node in nodes)
        return (
            f"cluster.ray: the Ray cluster has no room for {name}. The run requests {asked}. The nodes have {has}. Add "
            "nodes, end other jobs there, or request less by cluster.ray.cpus"
        )


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, idle."""

    name: str
    address: str
    num_cpus: float
    num_gpus: float
    gpus: tuple[str, ...]
    """Types of its GPUs, as Ray names them."""
    id: str = ""

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> "Node":
        """`node`: as Ray describes it."""
        resources = node["Resources"]
        types = [name.removeprefix(GPU_TYPE) for name in resources if name.startswith(GPU_TYPE)]
        cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
        return cls(_label(node), node["NodeManagerAddress"], cpus, gpus, tuple(sorted(types)), node["NodeID"])


def require_nodes(
    config: RayConfig, num_gpus: Mapping[str, int], folder: Path, variables: Mapping[str, str] = NO_VARIABLES
) -> list[Node]:
    """Raise a ConfigError that names the node and the remedy, unless the cluster's nodes can run the roles. Returns the
    nodes. `folder`: the one that holds runs; nothing stays behind in it. `variables`: see `RayPlan.problem_here`."""
    connect(config.address)
    ray = _ray()
    plan = RayPlan.make(config, num_gpus, folder)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if (shortage := plan.shortage(nodes)) is not None:
        raise ConfigError(shortage)
    with shared_token(folder) as token:
        asked = {_label(node): _ask(node["NodeID"], plan, token.name, variables) for node in nodes}
        until_s = time.monotonic() + config.start_s
        for name, answer in asked.items():
            try:
                problem = ray.get(answer, timeout=max(0.0, until_s - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                problem = f"it did not answer within cluster.ray.start_s, {config.start_s:g} s; repair or remove it"
            except ray.exceptions.RayError as error:
                last = str(error).strip().splitlines()[-1]
                problem = f"m2forge cannot run there ({last}); install the same version on all nodes"
            if problem is not None:
                raise ConfigError(f"node {name} of the Ray cluster: {problem}")
    return [Node.of(node) for node in nodes]


def _ask(node_id: str, plan: RayPlan, token: str, variables: Mapping[str, str]) -> Any:
    here = _ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
    asked = _ray().remote(num_cpus=0, max_retries=0, scheduling_strategy=here)(RayPlan.problem_here)
    return asked.remote(plan, token, variables)


def free_on_nodes(
    config: RayConfig, nodes: Sequence[Node], num_gpus: int, read: Callable[[], list[int]]
) -> Iterator[tuple[Node, list[int] | str]]:
    """Each node with what `read` returns there, or with why it returns nothing, in the order in which they answer.
    Meanwhile Ray gives `read` `num_gpus` GPUs, as it would give them to a role: those in use by other jobs are not
    among them."""
    ray = _ray()
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = {}
    for node in nodes:
        here = place(node.id, soft=False)
        asking = ray.remote(num_cpus=0, num_gpus=num_gpus, max_retries=0, scheduling_strategy=here)(_read_there)
        asked[asking.remote(read)] = node
    until_s = time.monotonic() + config.start_s
    try:
        while asked:
            answered, _ = ray.wait([*asked], timeout=max(0.0, until_s - time.monotonic()))
            if not answered:
                late = f"{num_gpus} of its GPUs did not become free within cluster.ray.start_s, {config.start_s:g} s"
                yield from [(node, f"{late}; end other jobs there, or use another node") for node in asked.values()]
                return
            node = asked.pop(answered[0])
            try:
                yield node, ray.get(answered[0])
            except ray.exceptions.RayError as error:
                last = str(error).strip().splitlines()[-1]
                yield node, f"its GPUs cannot be used ({last}); repair or remove it"
    finally:
        for answer in asked:
            ray.cancel(answer, force=True)


def _read_there(read: Callable[[], list[int]]) -> list[int] | str:
    try:
        return read()
    except ConfigError as error:
        return str(error)


def connect(address: str) -> None:
    """Make this process a driver of the cluster."""
    try:
        ray = _ray()
    except ImportError as error:
        raise ConfigError(
            f'cluster.launcher = "ray": Ray is not installed ({error}); pip install "m2forge[ray]"'
        ) from error
    if ray.is_initialized():
        return
    # Ray ends the process on SIGTERM; its owner has a cleaner way.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address, namespace="m2forge", log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cluster.ray.address: no Ray cluster at {address} ({' '.join(str(error).split())}); start one with `ray "
            "start --head`, on this machine or with this machine as a node, or give the HOST:PORT of its head"
        ) from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _ray() -> Any:
    """The optional package Ray. Its own types omit some of its options."""
    importlib.import_module("ray.util.scheduling_strategies")
    return importlib.import_module("ray")


class RayLauncher:
    """See `Launcher`."""

    def __init__(self, plan: RayPlan, log_folder: Path, record_folder: Path) -> None:
        """`plan`: has the roles that it will launch."""
        self._plan, self._log_folder, self._record_folder = plan, log_folder, record_folder
        self._group: Any = None
        self._launched: list[RayRole] = []

    async def launch(self, role: Role, is_done: Callable[[], bool] = lambda: False) -> Launched:
        """`is_done` is evaluated on the role's node."""
        if self._group is None:
            self._group = await self._reserve()
        index = list(self._plan.needs).index(role.name)
        arguments = (self._plan, self._log_folder, self._record_folder, is_done)
        launched = RayRole(role, self._group, index, *arguments)
        self._launched.append(launched)
        await launched.place()
        return launched

    async def _reserve(self) -> Any:
        """The placement group of all roles, or a ConfigError if the cluster is too busy for it."""
        connect(self._plan.address)
        ray = _ray()
        group = ray.util.placement_group([dict(need) for need in self._plan.needs.values()], strategy="SPREAD")
        if await asyncio.to_thread(group.wait, self._plan.start_s):
            return group
        ray.util.remove_placement_group(group)
        roles = ", ".join(self._plan.needs)
        problem = self._plan.describe_shortage(roles, [node for node in ray.nodes() if node["Alive"]])
        raise ConfigError(f"{problem}. Free within {self._plan.start_s:g} s: {_listed(ray.available_resources())}")

    async def close(self) -> None:
        if self._group is None:
            return
        for launched in self._launched:
            launched.kill()
        _ray().util.remove_placement_group(self._group)
        self._group = None


class RayRole:
    """See `Launched`."""

    def __init__(
        self,
        role: Role,
        group: Any,
        index: int,
        plan: RayPlan,
        log_folder: Path,
        record_folder: Path,
        is_done: Callable[[], bool],
    ) -> None:
        self.name, self.keys, self.url = role.name, role.keys, ""
        self._role, self._group, self._index, self._plan, self._is_done = role, group, index, plan, is_done
        self._log_folder, self._record_folder = log_folder, record_folder
        self._actor: Any = None
        self._node = ""
        self._is_stopping = False
        self._num_short, self._placed_s = 0, 0.0

    @property
    def num_starts(self) -> int:
        """Not a count: a number that changes whenever its process starts or ends."""
        return record_size(self._record_folder, self.name)

    async def place(self) -> None:
        """Start an actor for it, which binds the socket of a server."""
        while not self._is_stopping:
            self._placed_s = time.monotonic()
            self._actor = self._make_actor()
            try:
                placed: Placed = await self._until_placed()
            except _ray().exceptions.RayError as error:
                self._note_loss(error)
                continue
            self._node, self.url = placed.node, placed.url
            if placed.problem is not None:
                raise EngineError(f"node {placed.node} of the Ray cluster: {placed.problem}")
            if placed.url:
                parts = urlsplit(placed.url)
                self._role = replace(self._role, address=(str(parts.hostname), int(parts.port or 0)))
            return

    def _make_actor(self) -> Any:
        ray = _ray()
        need = dict(self._plan.needs[self.name])
        strategies = ray.util.scheduling_strategies
        place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._index)
        options: dict[str, Any] = {"num_cpus": need.pop("CPU"), "num_gpus": need.pop("GPU", 0), "resources": need}
        # Two concurrent calls: one supervises, one stops.
        actor = ray.remote(max_concurrency=2, scheduling_strategy=place, **options)(Shell)
        return actor.remote(self._role, self._plan, self._log_folder, self._record_folder, self._is_done)

    async def _until_placed(self) -> "Placed":
        placing = asyncio.ensure_future(self._actor.place.remote())
        while not placing.done():
            await asyncio.wait({placing}, timeout=REPEAT_S)
            if not placing.done() and not self._is_stopping:
                need = _listed(self._plan.needs[self.name])
                _log.warning("the %s process waits for a node of the Ray cluster with %s", self.name, need)
        placed: Placed = placing.result()
        return placed

    def _note_loss(self, error: Exception) -> None:
        """Record the loss of its actor or node; raises after too many losses in a row."""
        self.kill()
        if self._is_stopping:
            return
        if self._node:
            ProcessRecord(self._record_folder, self.name, self._node).end(-signal.SIGKILL, is_death=True)
        reason = str(error).strip().splitlines()[0]
        self._num_short = self._num_short + 1 if time.monotonic() - self._placed_s < SHORT_S else 1
        if self._num_short >= MAX_DEATHS:
            raise EngineError(f"the {self.name} process lost its actor {self._num_short} times in a row: {error}")
        where = f"with node {self._node} or its actor" if self._node else "before it was placed"
        _log.warning("the %s process was lost %s (%s); Ray places it again", self.name, where, reason)

    async def supervise(self) -> None:
        while not self._is_stopping:
            try:
                problem: str | None = await self._actor.supervise.remote()
            except _ray().exceptions.RayError as error:
                self._note_loss(error)
                await self.place()
                continue
            if problem is not None:
                raise EngineError(problem)
            return

    async def stop(self) -> None:
        self._is_stopping = True
        if self._actor is None:
            return
        with contextlib.suppress(_ray().exceptions.RayError, TimeoutError):
            async with asyncio.timeout(STOP_S + SLACK_S):
                await self._actor.stop.remote()
        self.kill()

    def kill(self) -> None:
        """Its child dies with the actor."""
        ray = _ray()
        if self._actor is not None:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(self._actor)


# -- on the role's node ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    node: str
    url: str = ""
    problem: str | None = None


class Shell:
    """The actor of a role."""

    def __init__(
        self, role: Role, plan: RayPlan, log_folder: Path, record_folder: Path, is_done: Callable[[], bool]
    ) -> None:
        self._role, self._plan, self._is_done = role, plan, is_done
        self._folders = log_folder, record_folder
        # The child dies with the thread that starts it, so this thread must last.
        self._thread = LoopThread(role.name)

    def place(self) -> Placed:
        ray = _ray()
        node_id = ray.get_runtime_context().get_node_id()
        name = next(_label(node) for node in ray.nodes() if node["NodeID"] == node_id)
        problem = self._plan.problem_here()
        if problem is not None:
            return Placed(name, problem=problem)
        os.chdir(self._plan.cwd)
        os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        # It keeps the socket open.
        launcher = self._launcher = LocalLauncher(*self._folders, name)
        role = self._role
        if role.address is not None:
            role = replace(role, address=(os.environ[NODE_ADDRESS], role.address[1]))
        try:
            self._child = self._thread.run(launcher.launch(role, self._is_done))
        except ConfigError:
            assert role.address is not None, "only a server can fail to be placed"
            # The port is the one that it had on another node, or another process has it here.
            role = replace(role, address=(role.address[0], 0))
            self._child = self._thread.run(launcher.launch(role, self._is_done))
        return Placed(name, self._child.url)

    def supervise(self) -> str | None:
        """Returns the error with which the run must end."""
        try:
            self._thread.run(self._child.supervise())
        except M2ForgeError as error:
            return str(error)
        return None

    def stop(self) -> None:
        self._thread.run(self._child.stop())


def _label(node: Mapping[str, Any]) -> str:
    """The name that `ray start --node-name` gave a node, else that of its machine."""
    name = str(node.get("NodeName", ""))
    return name if name and name != node["NodeManagerAddress"] else str(node["NodeManagerHostname"])


def _listed(numbers: Needs) -> str:
    """CPUs, GPUs and their types; Ray's other resources are left out."""
    shown = [f"{numbers[name]:g} {name}" for name in ("CPU", "GPU") if name in numbers]
    types = [name.removeprefix(GPU_TYPE) for name in numbers if name.startswith(GPU_TYPE)]
    return ", ".join([*shown, *types]) or "nothing"
