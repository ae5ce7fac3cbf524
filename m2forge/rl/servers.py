"""The launchers of a run's processes; its trainer; its samplers and gateways: servers, each on a socket that outlives
it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from m2forge.cluster.config import RayConfig
from m2forge.cluster.keeper import KeptLauncher, fingerprint
from m2forge.cluster.launcher import SOCKET, Launched, Launcher, Role
from m2forge.cluster.local import LocalLauncher
from m2forge.cluster.ray_launcher import Node, RayLauncher, RayPlan, require_nodes
from m2forge.errors import ConfigError
from m2forge.key import make_key
from m2forge.rl.child_main import MODULE
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import (
    GATEWAY,
    SAMPLER,
    SQLITE,
    TRAINER,
    TRAINER_NODE,
    Layout,
    gateway_names,
    host_names,
    sampler_names,
    trainer_node_names,
)
from m2forge.rl.ranks import num_ranks
from m2forge.sandbox.image import HOST as HOST_IMAGE
from m2forge.sandbox.image import ImageStore
from m2forge.sandbox.shared_images import share_images
from m2forge.tasks.folders.folder import find_folders
from m2forge.tasks.folders.task_image import base_names
from m2forge.tasks.source import SourceKind, parse_source
from m2forge.train.run_dir import CONFIG_FILE

HOST = "127.0.0.1"


def require_cluster(config: RLConfig, runs: Path) -> list[Node]:
    """Raise a ConfigError unless the run's processes can run on the machines that `cluster` names; call it before
    anything is written. Returns the nodes of a Ray cluster that could have the trainer."""
    if config.cluster.launcher == "local":
        return []
    if config.gateway.host != HOST:
        raise ConfigError(
            f'gateway.host: with cluster.launcher = "ray" each server listens on the address of its node, received '
            f"{config.gateway.host}; leave it out"
        )
    is_new = not (runs / config.name / CONFIG_FILE).exists()
    server, variables = config.engine.server, dict[str, str]()
    if is_new and server is not None and server.key_env is not None:
        variables[server.key_env] = "engine.server.key_env"
    nodes = require_nodes(config.cluster.ray, _num_gpus(config), runs, variables)
    trainer_nodes = [node for node in nodes if _could_train(node, config.cluster.ray)]
    if is_new:
        _refuse_idle_gpus(config, nodes)
        _refuse_mixed_gpus(config, trainer_nodes)
    num_machines = len({node.address for node in nodes})
    if num_machines > 1 and config.pool.url.startswith(SQLITE):
        raise ConfigError(
            f"pool.url: SQLite works on one machine, and the Ray cluster has {num_machines}; give the URL of a "
            "PostgreSQL database, postgresql://USER@HOST/DATABASE"
        )
    return trainer_nodes


def _could_train(node: Node, ray: RayConfig) -> bool:
    is_type = not ray.trainer_gpus or ray.gpu is None or ray.gpu in node.gpus
    return is_type and node.num_gpus >= ray.trainer_gpus and node.num_cpus >= ray.cpus


def _refuse_idle_gpus(config: RLConfig, nodes: Sequence[Node]) -> None:
    """Raise if a process that takes a GPU where it sees one would reserve none of those that there are."""
    node = next((node for node in nodes if node.num_gpus), None)
    if node is None:
        return
    ray, machine = config.cluster.ray, config.train.machine
    wanted = num_ranks(machine, ray.trainer_nodes, ray.trainer_gpus)
    users = [(TRAINER, "train.machine.device", machine.device, ray.trainer_gpus, wanted)]
    if config.engine.server is None:
        users.append((SAMPLER, "engine.device", config.engine.device, ray.sampler_gpus, 1))
    for role, key, device, num_gpus, wanted in users:
        if device == "auto" and not num_gpus:
            raise ConfigError(
                f'cluster.ray.{role}_gpus is 0 and {key} "auto": the {role} would run on a CPU, and node {node.name} '
                f'of the Ray cluster has {node.num_gpus:g} GPU; set {role}_gpus = {wanted}, or {key} = "cpu"'
            )


def _refuse_mixed_gpus(config: RLConfig, nodes: Sequence[Node]) -> None:
    """Raise if `nodes`, between which the trainer's ranks are divided, have GPUs of different types."""
    ray = config.cluster.ray
    if ray.trainer_nodes == 1 or not ray.trainer_gpus or ray.gpu is not None:
        return
    types = {node.name: " and ".join(node.gpus) for node in nodes if node.gpus}
    if len({*types.values()}) > 1:
        listed = "; ".join(f"{name}: {gpu}" for name, gpu in types.items())
        raise ConfigError(
            f"cluster.ray.gpu: nodes of the trainer could have different GPUs ({listed}); set it to one of these types"
        )


def open_launchers(config: RLConfig, layout: Layout) -> tuple[Launcher, Launcher]:
    """The launcher of the trainer, which ends with the loop, and that of all other processes."""
    own_names = [TRAINER, *trainer_node_names(config.cluster)]
    other_names = [name for name in _num_gpus(config) if name not in own_names]
    if not config.cluster.agent_hosts:
        # One launcher for all.
        own_names += other_names
    plan = _plan(config, layout, own_names)
    own: Launcher = (
        LocalLauncher(layout.log, layout.processes) if plan is None else RayLauncher(plan, layout.log, layout.processes)
    )
    if not config.cluster.agent_hosts:
        return own, own
    if config.cluster.launcher == "ray":
        share_run_images(config, layout)
    mark = fingerprint((layout.run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    kept_plan = _plan(config, layout, other_names)
    return own, KeptLauncher(layout.run_dir, mark, config.cluster.outlive_s, kept_plan)


def _plan(config: RLConfig, layout: Layout, names: list[str]) -> RayPlan | None:
    if config.cluster.launcher == "local":
        return None
    num_gpus = _num_gpus(config)
    return RayPlan.make(config.cluster.ray, {name: num_gpus[name] for name in names}, layout.run_dir)


def _num_gpus(config: RLConfig) -> dict[str, int]:
    """The run's processes, and the GPUs that each reserves on a Ray cluster."""
    ray = config.cluster.ray
    trainer = dict.fromkeys((TRAINER, *trainer_node_names(config.cluster)), ray.trainer_gpus)
    samplers = dict.fromkeys(sampler_names(config.cluster), ray.sampler_gpus)
    others = [*gateway_names(config.cluster), *host_names(config.cluster)]
    return {**trainer, **samplers, **dict.fromkeys(others, 0)}


def share_run_images(config: RLConfig, layout: Layout) -> None:
    """Put the images that attempts name into the run's folder, so that they are the same on all nodes, and have this
    process use them there. Images that are built for task folders follow when they are used."""
    share_images(layout.images)
    sandbox, store = config.agent.sandbox, ImageStore()
    names = {sandbox.image, *sandbox.layers, config.verify.base_image or HOST_IMAGE}
    for source in map(parse_source, config.curriculum.family_keys):
        if source.kind is SourceKind.FOLDERS:
            names = names.union(*map(base_names, find_folders(Path(source.target))))
    for name in sorted(names):
        if store.has(name):
            store.find(name)


async def launch_trainer(
    launcher: Launcher, config: RLConfig, layout: Layout, is_done: Callable[[], bool]
) -> list[Launched]:
    """The process that ends when the training does; then those of the trainer's other nodes."""
    command, others = (MODULE, TRAINER, str(layout.run_dir)), trainer_node_names(config.cluster)
    if not others:
        return [await launcher.launch(Role(TRAINER, command), is_done)]
    keys = (make_key(),)
    roles = [Role(TRAINER, (*command, SOCKET), keys, (HOST, 0))]
    for index, name in enumerate(others, start=1):
        roles.append(Role(name, (MODULE, TRAINER_NODE, str(layout.run_dir), str(index)), keys))
    return [await launcher.launch(role, is_done) for role in roles]


@dataclass(frozen=True)
class Server:
    child: Launched

    @property
    def url(self) -> str:
        return self.child.url

    @property
    def key(self) -> str:
        """API key that the sampler requires on every route and the gateway on its admin routes."""
        return self.child.keys[0]


@dataclass(frozen=True)
class Servers:
    samplers: tuple[Server, ...]
    gateways: tuple[Server, ...]

    @property
    def all(self) -> tuple[Server, ...]:
        return self.samplers + self.gateways


async def make_servers(launcher: Launcher, layout: Layout, config: RLConfig) -> Servers:
    """Create the servers without starting them."""

    async def make(kind: str, name: str, address: tuple[str, int], engine_keys: tuple[str, ...] = ()) -> Server:
        numbered = () if name == kind else (name,)
        command = (MODULE, kind, str(layout.run_dir), SOCKET, *numbered)
        return Server(await launcher.launch(Role(name, command, (make_key(), *engine_keys), address)))

    samplers = [await make(SAMPLER, name, (HOST, 0)) for name in sampler_names(config.cluster)]
    keys = tuple(sampler.key for sampler in samplers)
    gateways = []
    for index, name in enumerate(gateway_names(config.cluster)):
        port = config.gateway_port and config.gateway_port + index
        gateways.append(await make(GATEWAY, name, (config.gateway.host, port), keys))
    return Servers(tuple(samplers), tuple(gateways))
