"""Entry points of the loop's child processes, each configured from the run's directory alone:

    python -m m2forge.rl.child_main trainer RUN_DIR [SOCKET]            on a mesh, starts itself once for each rank
    python -m m2forge.rl.child_main trainer-node RUN_DIR INDEX          the ranks of the trainer's other nodes
    python -m m2forge.rl.child_main sampler RUN_DIR SOCKET [NAME]       serves the newest published weights by HTTP
    python -m m2forge.rl.child_main gateway RUN_DIR SOCKET [NAME]       NAME: of one of several
    python -m m2forge.rl.child_main host RUN_DIR NAME                   an agent host (rl/host.py)

SOCKET is the file descriptor of a listening socket that outlives the process (cluster/launcher.py). Standard input
holds the API keys, one per line: the server's own, then for a gateway the samplers'; for a host the gateways'; for a
trainer on several nodes their key. URLs of servers are in the records of their processes. At most one trainer, and one
process of each gateway, run at a time: if a node was lost and its process is still alive there, the successor waits
until that process has ended.

A gateway's process also executes tasks' tools: it runs the families' code in worker processes and adds each call's
latency.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from m2forge.cluster.launcher import end_with_error
from m2forge.cluster.process_record import RoleUrl
from m2forge.config import load_resolved
from m2forge.errors import ConfigError, M2ForgeError, TrainingError
from m2forge.importing import importing
from m2forge.observe.log import set_up_logging
from m2forge.protocols import Engine
from m2forge.records import JsonValue, PolicyVersion, Task
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import GATEWAY, SAMPLER, TRAINER, TRAINER_NODE, Layout, gateway_names, sampler_names
from m2forge.tasks.runner import TaskRunner
from m2forge.text.message import tool_to_openai
from m2forge.train.run_dir import CONFIG_FILE
from m2forge.weights.store import is_version

if TYPE_CHECKING:
    from m2forge.rl.ranks import Nodes

MODULE = "m2forge.rl.child_main"
POLL_S = 0.1
_log = logging.getLogger(__name__)
MAX_PERF = 1.0
"""Upper bound of a posted reward, because it counts as the perf of a deployed agent's episode."""


def run_trainer(run_dir: Path, descriptor: str | None = None) -> None:
    """`descriptor`: of the socket on which other nodes find the first one of a trainer on several."""
    config = load_resolved(RLConfig, run_dir / CONFIG_FILE)
    if not config.train.machine.mesh.is_single and "RANK" not in os.environ:
        from m2forge.rl.ranks import lead, run_ranks

        nodes = _trainer_nodes(config, run_dir)
        with alone(run_dir / "trainer.lock"):
            if descriptor is None:
                sys.exit(run_ranks(nodes.command, nodes.num_ranks, nodes.log_folder))
            (key,) = read_keys(1)
            sys.exit(lead(nodes, socket.socket(fileno=int(descriptor)), key))
    with importing():
        from m2forge.rl.trainer import train

    with contextlib.nullcontext() if "RANK" in os.environ else alone(run_dir / "trainer.lock"):
        train(run_dir)


def run_trainer_node(run_dir: Path, index: str) -> None:
    from m2forge.rl.ranks import follow

    (key,) = read_keys(1)
    config = load_resolved(RLConfig, run_dir / CONFIG_FILE)
    url = RoleUrl(Layout(run_dir).processes, TRAINER)
    follow(_trainer_nodes(config, run_dir), int(index), url, key)


def _trainer_nodes(config: RLConfig, run_dir: Path) -> "Nodes":
    from m2forge.rl.ranks import Nodes, num_ranks

    num_nodes = config.cluster.ray.trainer_nodes
    command = (MODULE, TRAINER, str(run_dir))
    return Nodes(num_nodes, num_ranks(config.train.machine, num_nodes), command, Layout(run_dir).log)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other process holds the lock, on any machine that shares the run's folder."""
    with lock.open("w") as file:
        # Unlike a lock by flock, no forked process can hold this one longer.
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def run_sampler(run_dir: Path, descriptor: str, name: str = SAMPLER) -> None:
    (key,) = read_keys(1)
    config, has_begun = load_resolved(RLConfig, run_dir / CONFIG_FILE), False

    def announce(url: str) -> None:
        nonlocal has_begun
        has_begun = True
        _announce(url)

    serve = _make_model_server(run_dir, config, name) if config.engine.server is None else _make_relay(config, name)
    with socket.socket(fileno=int(descriptor)) as listener:
        while True:
            version, folder = _newest_weights(run_dir, config)
            try:
                return serve(version, folder, key, announce, listener.dup())
            except (M2ForgeError, OSError) as error:
                if has_begun or is_version(folder):
                    raise
                # A trainer that starts over removes versions, also while they are read.
                _log.info("%s was removed while it was read; reading the newest version (%s)", folder, error)


Serve = Callable[[PolicyVersion, Path, str, Callable[[str], None], socket.socket], None]


def _make_relay(config: RLConfig, name: str) -> Serve:
    with importing():
        from m2forge.rl.relay import serve_relay

    index = sampler_names(config.cluster).index(name)

    def serve(
        version: PolicyVersion, folder: Path, key: str, announce: Callable[[str], None], listener: socket.socket
    ) -> None:
        serve_relay(config, folder, version, key, announce, listener, index)

    return serve


def _make_model_server(run_dir: Path, config: RLConfig, name: str) -> Serve:
    with importing():
        import torch

        from m2forge.rollout.config import ServeConfig, ServerConfig
        from m2forge.rollout.server.model_server import serve_model

    if config.cluster.launcher == "local" and name != SAMPLER:
        index = sampler_names(config.cluster).index(name)
        os.environ.update(visible_gpu(index, os.environ, torch.cuda.device_count()))
    if config.engine.num_threads is not None:
        torch.set_num_threads(config.engine.num_threads)

    def serve(
        version: PolicyVersion, folder: Path, key: str, announce: Callable[[str], None], listener: socket.socket
    ) -> None:
        serving = ServeConfig(
            lineage=version.lineage,
            step=version.step,
            branch=version.branch,
            device=config.engine.device,
            dtype=config.engine.dtype,
            rollout=config.engine.rollout,
            server=ServerConfig(host=listener.getsockname()[0]),
        )
        if config.weights.sync == "files":
            serve_model(folder, serving, key, announce, listener)
            return
        from m2forge.weights.collective import Receiver

        receiver = Receiver(Layout(run_dir).broadcast)
        try:
            serve_model(folder, serving, key, announce, listener, receiver)
        finally:
            receiver.stop()

    return serve


def visible_gpu(index: int, env: Mapping[str, str], num_gpus: int) -> dict[str, str]:
    """The variable that lets the sampler of this index see one GPU of a machine with several: from the last on, because
    a trainer's ranks take the first ones. `num_gpus`: that this process sees, by its environment `env`."""
    if num_gpus < 2:
        return {}
    listed = env.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(place) for place in range(num_gpus)]
    return {"CUDA_VISIBLE_DEVICES": names[-1 - index % len(names)].strip()}


def _newest_weights(run_dir: Path, config: RLConfig) -> tuple[PolicyVersion, Path]:
    store = Layout(run_dir).weight_store(config)
    while (newest := store.newest()) is None:
        # A trainer that starts over removes what it had published.
        time.sleep(POLL_S)
    return newest


def run_gateway(run_dir: Path, descriptor: str, name: str = GATEWAY) -> None:
    config = load_resolved(RLConfig, run_dir / CONFIG_FILE)
    admin_key, *sampler_keys = read_keys(1 + config.cluster.samplers)
    with importing():
        from m2forge.gateway.server import serve_gateway
        from m2forge.model.config_file import read_config
        from m2forge.model.hub import find_folder
        from m2forge.rollout.backends.remote import RemoteEngine
        from m2forge.rollout.backends.replicas import ReplicatedEngine
    from m2forge.text.format import make_format
    from m2forge.text.tokenizer import load_tokenizer

    layout, folder = Layout(run_dir), find_folder(config.model, config.revision)
    network, rollout = read_config(folder), config.engine.rollout
    listener = socket.socket(fileno=int(descriptor))
    journal = layout.journals(config.cluster)[gateway_names(config.cluster).index(name)]
    tools = layout.run_dir / "tools" / ("" if name == GATEWAY else name)
    own = {
        # Where others can reach it, every route needs a key.
        "host": listener.getsockname()[0],
        "journal": str(journal),
        "records_experts": config.policy.replay == "recorded",
        "max_reward": min(config.gateway.max_reward, MAX_PERF),
    }

    def make_engine() -> Engine:
        keys = dict(zip(sampler_names(config.cluster), sampler_keys, strict=True))
        engines = {name: RemoteEngine(RoleUrl(layout.processes, name), key=key) for name, key in keys.items()}
        return ReplicatedEngine(engines) if len(engines) > 1 else engines[SAMPLER]

    journal.mkdir(parents=True, exist_ok=True)
    with alone(journal / "gateway.lock"):
        serve_gateway(
            # The loop has checked the template, and logged the cost if it rewrites its prefix.
            make_format(config.gateway.format, load_tokenizer(folder)),
            config.gateway.model_copy(update=own),
            make_engine,
            _announce,
            admin_key=admin_key,
            context=min(rollout.max_context or network.max_context, network.max_context),
            vocab_size=network.vocab_size,
            listener=listener,
            open_tool_host=lambda: open_tool_host(config, tools),
        )


def run_host(run_dir: Path, name: str) -> None:
    config, layout = load_resolved(RLConfig, run_dir / CONFIG_FILE), Layout(run_dir)
    keys = read_keys(config.cluster.gateways)
    with importing():
        from m2forge.rl import host
        from m2forge.sandbox.shared_images import share_images

    if config.cluster.launcher == "ray":
        share_images(layout.images)
    host.run_host(layout, config, name, keys)


def read_keys(num_keys: int) -> list[str]:
    """Read the keys from standard input, up to its end."""
    keys = sys.stdin.read().split()
    if len(keys) != num_keys:
        raise ConfigError(f"standard input: expected {num_keys} keys, a line for each, received {len(keys)}")
    return keys


def _announce(url: str) -> None:
    print(f"listening on {url}", flush=True)


class FamilyToolHost:
    """See `ToolHost`."""

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner

    async def tools(self, task: Task) -> Sequence[Mapping[str, JsonValue]]:
        return [tool_to_openai(tool) for tool in await self._runner.tools(task)]

    async def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        answer = await self._runner.call(task, name, arguments)
        await asyncio.sleep(answer.latency_s)
        return answer.content


@contextlib.asynccontextmanager
async def open_tool_host(config: RLConfig, folder: Path) -> AsyncGenerator[FamilyToolHost, None]:
    """`folder`: working directory of the workers."""
    async with TaskRunner(config.verify, folder, config.curriculum.family_keys) as runner:
        yield FamilyToolHost(runner)


PROCESSES: dict[str, Callable[..., None]] = {
    TRAINER: run_trainer,
    TRAINER_NODE: run_trainer_node,
    "sampler": run_sampler,
    "gateway": run_gateway,
    "host": run_host,
}


if __name__ == "__main__":
    # As the `m2forge` command does, before torch is loaded.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")
    set_up_logging()
    kind, directory, *arguments = sys.argv[1:]
    try:
        PROCESSES[kind](Path(directory), *arguments)
    except (ConfigError, TrainingError) as error:
        # A restart would fail in the same way.
        end_with_error(error)
