"""What a new run needs, checked before anything of it is written: a configuration in; an error that names the setting
and a remedy out.

`refuse_misfit` compares the configuration with the network's; `--dry-run` does so too. `require_start` adds this
machine's GPUs, the server of another engine, and the database. It neither loads torch, nor does it hold GPU memory
afterwards. On a Ray cluster other machines have the GPUs and reach the server: `require_cluster` asks its nodes, and
`require_start` those that could have the trainer for the free memory of their GPUs.
"""

import ctypes
import json
import math
import subprocess
import sys
from collections.abc import Sequence

from m2forge.cluster.ray_launcher import Node, free_on_nodes
from m2forge.errors import ConfigError, EngineError
from m2forge.loop_thread import run_anywhere
from m2forge.model.architecture import adapted_layers
from m2forge.model.config import ModelConfig
from m2forge.pool.pool import require_database
from m2forge.records import PolicyVersion
from m2forge.rl.config import RLConfig, SGLangConfig, VLLMConfig
from m2forge.rl.layout import Layout
from m2forge.rl.ranks import num_ranks
from m2forge.rl.relay import make_engine, refuse_samplings
from m2forge.train.memory import policy_step, refuse_unfit

CUDA_DRIVER = "libcuda.so.1"
PROBE = (
    "import json, torch; "
    "print(json.dumps([torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]))"
)


def require_start(config: RLConfig, layout: Layout, network: ModelConfig, nodes: Sequence[Node]) -> None:
    """Raise unless a new run can start with this configuration and network. `nodes`: those of a Ray cluster that could
    have the trainer."""
    refuse_misfit(config, network)
    if config.cluster.launcher == "local":
        _require_gpus(config, network)
    elif config.cluster.ray.trainer_gpus:
        _require_node_gpus(config, network, nodes)
    if config.engine.server is not None:
        for index in range(len(config.engine.server.urls)):
            run_anywhere(_require_server(config, config.engine.server, index))
    require_database(layout.pool(config.pool), network.vocab_size)


def refuse_misfit(config: RLConfig, network: ModelConfig) -> None:
    """Raise if the run cannot train this network on any machine."""
    mesh, ray = config.train.machine.mesh, config.cluster.ray
    if "auto" not in (mesh.replicate, mesh.shard):
        mesh.of_ranks(math.prod(mesh.shape))
    elif config.cluster.launcher == "ray":
        mesh.of_ranks(ray.trainer_gpus * ray.trainer_nodes)
    mesh.refuse_misfit(network)
    config.policy.refuse_misfit(network)
    if config.train.lora is not None:
        adapted_layers(network, config.train.lora)


def _require_gpus(config: RLConfig, network: ModelConfig) -> None:
    machine = config.train.machine
    devices = {"train.machine.device": machine.device}
    if config.engine.server is None:
        devices["engine.device"] = config.engine.device
    free = [] if {*devices.values()} == {"cpu"} else free_gpu_bytes()
    for key, device in devices.items():
        if device == "cuda" and not free:
            raise ConfigError(f'{key} is "cuda", but torch sees no GPU; use "cpu" or "auto"')
    if machine.device == "cpu":
        free = []
    number = num_ranks(machine, num_gpus=len(free))
    if not free:
        return
    if number > len(free):
        raise ConfigError(
            f"train.machine.mesh: {number} ranks on this machine, which has {len(free)} GPUs; each rank needs its own: "
            "set smaller numbers"
        )
    refuse_unfit(policy_step(config.train, network, config.policy, number), min(free[:number]), "the policy")


def _require_node_gpus(config: RLConfig, network: ModelConfig, nodes: Sequence[Node]) -> None:
    """Raise unless enough of `nodes` have GPUs with the memory that the trainer's ranks need. Others may be too small:
    if Ray places the trainer there, its ranks refuse to start."""
    ray = config.cluster.ray
    step = policy_step(config.train, network, config.policy, ray.trainer_gpus * ray.trainer_nodes)
    num_missing, problems = ray.trainer_nodes, list[str]()
    for node, free in free_on_nodes(ray, nodes, ray.trainer_gpus, free_gpu_bytes):
        name = f"node {node.name} of the Ray cluster"
        if isinstance(free, str):
            problems.append(f"{name}: {free}")
        elif len(free) < ray.trainer_gpus:
            problems.append(
                f"{name}: Ray gives the trainer {ray.trainer_gpus} GPUs there, and torch sees {len(free)}; start Ray "
                "there with the GPUs that it has"
            )
        else:
            try:
                refuse_unfit(step, min(free), f"{name}: the policy")
            except ConfigError as error:
                problems.append(str(error))
                continue
            # Ray may place several parts of the trainer on one node.
            num_missing -= int(node.num_gpus // ray.trainer_gpus)
            if num_missing <= 0:
                return
    if problems:
        others = f"; {len(problems) - 1} other nodes cannot have it either" if len(problems) > 1 else ""
        raise ConfigError(f"{problems[0]}{others}")


def free_gpu_bytes() -> list[int]:
    """The free memory of each GPU that torch sees on this machine. A process of its own asks, because a CUDA context
    holds GPU memory as long as its process lives, and torch takes seconds to load."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return []
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ConfigError(
            f"the GPUs of this machine cannot be used ({last}); free or repair them, or set train.machine.device = "
            '"cpu" and engine.device = "cpu"'
        )
    free: list[int] = json.loads(done.stdout.splitlines()[-1])
    return free


async def _require_server(config: RLConfig, server: VLLMConfig | SGLangConfig, index: int) -> None:
    """Raise if the server's key is missing, or it cannot sample for the run. A server that does not respond may be
    started later. `index`: of the server among several."""
    is_here = config.cluster.launcher == "local"
    if not is_here:
        server = server.model_copy(update={"key_env": None})
    engine = make_engine(server, PolicyVersion(config.name, 0), index)
    try:
        refuse_samplings(engine, config)
        if not is_here:
            return
        try:
            await engine.state()
        except EngineError:
            return
        await engine.check_server()
    finally:
        await engine.close()
