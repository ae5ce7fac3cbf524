"""The machine a run trains on: device, dtype, threads, peak FLOPS, and whether a run fits into its memory."""

import functools
import os
import socket
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m2forge.config import Config, TomlValue, dump
from m2forge.errors import ConfigError
from m2forge.files import shared_token
from m2forge.model.architecture import adapted_layers
from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.model.start import Start
from m2forge.model.transformer import Transformer
from m2forge.python_source import code_digest
from m2forge.train.activation import MicroBatch
from m2forge.train.config import MachineConfig, PhaseConfig, PolicyConfig, TrainConfig, TuneConfig
from m2forge.train.memory import machine_step, policy_step, refuse_unfit
from m2forge.train.parallel import (
    SINGLE_RANK,
    ProcessRanks,
    Ranks,
    align,
    exchange,
    held_weights,
    process_ranks,
    refuse_difference,
    refuse_drift,
    shard_model,
)
from m2forge.train.run_dir import flat_keys

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 FLOPS, as stated by the vendor."""
APPEARS_S, POLL_S = 60.0, 0.2
"""Network file systems cache for up to a minute that a folder is absent."""
LONG_ENOUGH_S = 0.1
"""A matrix product that takes this long measures the speed well enough."""


def choose_device(config: MachineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('train.machine.device is "cuda", but torch sees no GPU; use "cpu" or "auto"')
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def choose_dtype(config: MachineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


@contextmanager
def machine_settings(config: MachineConfig, device: torch.device) -> Iterator[None]:
    """Apply the run's thread count and deterministic mode, which are process-wide in torch; restored on exit."""
    memory: Any = torch.utils.deterministic  # its only attribute is set at import, invisible to type checkers
    num_threads, fills = torch.get_num_threads(), memory.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    try:
        torch.set_num_threads(config.num_threads or num_threads)
        # Off on CUDA, even if the process had it on: many CUDA operations have no deterministic algorithm.
        is_deterministic = config.deterministic and device.type == "cpu"
        if config.compile_blocks == "always":
            torch.use_deterministic_algorithms(is_deterministic)
        else:
            # The same without the compiler's setting: importing the compiler takes seconds.
            torch.set_deterministic_debug_mode("error" if is_deterministic else "default")
        # Filling would write every new tensor twice; ours are never read before they are written.
        memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.set_num_threads(num_threads)
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills


@contextmanager
def machine_ranks(config: MachineConfig, run_dir: Path, whole: Config) -> Iterator[Ranks]:
    """The ranks that train together, including this process. Raises if their nodes cannot train the run `whole` in
    `run_dir` together."""
    if config.mesh.is_single:
        config.mesh.of_ranks(int(os.environ.get("WORLD_SIZE", "1")))
        yield SINGLE_RANK
        return
    with process_ranks(choose_device(config), config.mesh) as ranks:
        refuse_unlike_nodes(ranks, run_dir, whole)
        yield ranks


@dataclass(frozen=True)
class Node:
    """What all ranks must have alike, and the host where one has it."""

    host: str
    code: str
    gpu: str
    config: Mapping[str, TomlValue]
    """By dotted key."""

    def difference(self, other: "Node") -> str | None:
        """What `other` has in another way, and the remedy."""
        if self.code != other.code:
            return f"m2forge has other code there than on {self.host}; install the same version on all nodes"
        if self.gpu != other.gpu:
            return f"it trains on {other.gpu}, and {self.host} on {self.gpu}; start the run on nodes of one kind"
        for key in sorted(self.config.keys() | other.config.keys()):
            ours, theirs = self.config.get(key), other.config.get(key)
            if ours != theirs:
                return (
                    f"its configuration has {key} = {theirs!r}, and that of {self.host} {ours!r}; start all nodes with "
                    "the same file and options"
                )
        return None


def refuse_unlike_nodes(ranks: ProcessRanks, run_dir: Path, config: Config) -> None:
    """Raise a ConfigError, the same on all ranks, that names the node and the remedy, unless all nodes have the same
    code, configuration and kind of GPU, and share the folder that holds the run's. Writes nothing that stays."""
    runs, host = run_dir.absolute().parent, socket.gethostname()
    with ExitStack() as stack:
        token, problem = "", None
        if ranks.rank == 0:
            try:
                token = stack.enter_context(shared_token(runs)).name
            except OSError as error:
                problem = f"{error.filename or runs}: {error.strerror or error}; give a path that can be used"
        node = Node(host, code_digest(), gpu_name(ranks.device), flat_keys(tomllib.loads(dump(config))))
        nodes, tokens, problems = zip(*exchange((node, token, problem)), strict=True)
        found = [problems[0], *(nodes[0].difference(other) for other in nodes[1:])]
        if not any(found):
            lacks = f"{runs} is not the folder of that name on {nodes[0].host}; put runs on a shared file system"
            found = exchange(None if _appears(runs / tokens[0]) else lacks)
    # When one rank ends, launchers kill the others: not before the file is gone.
    ranks.max_int(0)
    for rank, problem in enumerate(found):
        if problem is not None:
            raise ConfigError(f"node {nodes[rank].host} (rank {rank}): {problem}")


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "its CPU"


def _appears(path: Path) -> bool:
    until_s = time.monotonic() + APPEARS_S
    while not path.exists():
        if time.monotonic() > until_s:
            return False
        time.sleep(POLL_S)
    return True


def rank_device(config: MachineConfig, ranks: Ranks) -> torch.device:
    """The device that this rank trains on."""
    return ranks.device if isinstance(ranks, ProcessRanks) else choose_device(config)


def load_network(start: Start, config: MachineConfig, dtype: torch.dtype, ranks: Ranks, source: str) -> Transformer:
    """The network that this rank trains, or its part of it, filled from `start`. `source`: where the weights come from,
    in words that must be the same on all ranks."""
    device = rank_device(config, ranks)
    if not isinstance(ranks, ProcessRanks):
        return start.build(device, dtype)
    refuse_difference("checkpoints", source, ranks)
    refuse_difference("networks", f"{start.config} {start.lora} {dtype}", ranks)
    if not config.mesh.is_sharded:
        model = start.build(device, dtype)
        align(model, ranks)
        return model
    model = start.network("meta", dtype)
    shard_model(model, config.mesh, ranks)
    model.to_empty(device=device)
    start.fill(held_weights(model))
    refuse_drift(model, ranks)
    return model


def set_up_model(model: Transformer, config: MachineConfig, device: torch.device) -> None:
    walk = config.walk_config
    model.recompute = "block" if "block" in (config.recompute, walk and walk.recompute) else "none"
    if config.compile_blocks == "always" or (config.compile_blocks == "auto" and device.type == "cuda"):
        model.compile_blocks()


def refuse_unfit_phases(
    config: TrainConfig,
    network: ModelConfig,
    phases: Sequence[PhaseConfig],
    ranks: Ranks,
    lora: LoRAConfig | None = None,
) -> None:
    """Raise, before anything is loaded, if mesh or adapters do not fit the network, the machine does not have the
    device, or a phase needs more memory than the GPU has free."""
    config.machine.mesh.refuse_misfit(network)
    if lora is not None:
        adapted_layers(network, lora)
    device = rank_device(config.machine, ranks)
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    for phase in phases:
        num_mtp, is_frozen = max(network.num_mtp, phase.num_mtp or 0), phase.trains == "mtp"
        batch = MicroBatch(
            phase.pack_tokens,
            phase.context,
            phase.pack_tokens,
            num_mtp,
            trains_main=lora is None and not is_frozen,
            freezes_main=is_frozen,
        )
        whole = network.model_copy(update={"num_mtp": num_mtp})
        num_packs, num_ranks = phase.packs_per_step, ranks.num_ranks
        step = machine_step(config.machine, "cuda", whole, config.optimizer, batch, num_packs, lora, num_ranks)
        refuse_unfit(step, free, f"phase {phase.name}")


def refuse_unfit_policy(
    config: TuneConfig, network: ModelConfig, policy: PolicyConfig, device: torch.device, num_ranks: int
) -> None:
    """The same for steps over trees."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        refuse_unfit(policy_step(config, network, policy, num_ranks), free, "the policy")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak operations per second: the vendor's figure if known, else measured with a large matrix product, once in a
    process."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, flops in PEAK_FLOPS.items():
            if known in name:
                return flops
    return _measured_flops(device, dtype, torch.get_num_threads())


@functools.cache
def _measured_flops(device: torch.device, dtype: torch.dtype, num_threads: int) -> float:
    """`num_threads`: torch's present number, which a CPU's figure depends on."""
    size, largest = 256, 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device).manual_seed(0)
    while True:
        x = torch.randn(size, size, device=device, generator=generator).to(dtype)
        passed_s = min(_product_s(x) for _ in range(4))
        # A CPU without bfloat16 instructions would take a minute for the largest size.
        if size == largest or passed_s > LONG_ENOUGH_S:
            return 2 * size**3 / passed_s
        size *= 2


def _product_s(x: torch.Tensor) -> float:
    start_s = time.perf_counter()
    float((x @ x)[0, 0])
    return time.perf_counter() - start_s
