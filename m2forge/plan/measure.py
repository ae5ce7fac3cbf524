"""One rank's share of a training step, run by the train engine: seconds and peak memory; rates fitted to them.

`fit` finds the rates that explain measured steps best: it minimizes the squared logarithms of predicted over measured
seconds, with a weak pull towards the rates it starts from, because few steps do not determine all six.
"""

import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from m2forge.errors import ConfigError
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.plan.gpu import Rates
from m2forge.plan.work import Work, step_work
from m2forge.records import Pack
from m2forge.train.activation import MicroBatch
from m2forge.train.config import MachineConfig, MeshConfig, OptimizerConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.machine import machine_settings, set_up_model
from m2forge.train.memory import TrainingStep, rank_memory

FITTED = ("dense", "expert", "attention", "flex_attention", "bandwidth", "block_s")
PULL = 0.01
"""Weight of the squared distance from the first rates."""
NUM_WARM_UPS = 2
FILLED_SHARE = 0.85
"""Share of the free memory that a calibrating step may need."""
MIN_CALIBRATING = 4
FIRST_BLOCK_S = 1e-3
"""Initial value of an unknown launch time."""


@dataclass(frozen=True)
class Measured:
    seconds: float
    """Median of the timed steps."""
    peak_bytes: int
    """Peak of torch's allocated memory; 0 on a CPU, where torch does not count it."""
    reserved_bytes: int
    """Peak of torch's reserved memory, free blocks included."""
    other_bytes: int
    """Device memory in use that torch's allocator does not hold: the CUDA context, and other processes."""


def measure_step(step: TrainingStep, device: torch.device, num_steps: int = 3) -> Measured:
    """Train `step` on random tokens; `step` must be unsharded."""
    if step.shard > 1 or step.lora is not None:
        raise ConfigError("measuring runs one unsharded rank without adapters; measure its share of the layers")
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch._dynamo.reset()
        # An engine may lie in a cycle of references, and would count in the peak of the next step.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    dtype = torch.bfloat16 if step.item_bytes == 2 else torch.float32
    machine = MachineConfig.model_validate(
        {
            "recompute": "walk" if step.walk is not None else step.recompute,
            "walk": None if step.walk is None else step.walk.model_dump(),
            "mesh": MeshConfig().model_dump(),
        }
    )
    model = build(step.network, device, dtype)
    engine = TrainEngine(model, step.optimizer, offload="host" if step.offload == "host" else "none", walk=step.walk)
    set_up_model(model, machine, device)
    packs = [random_pack(step, seed) for seed in range(step.num_batches)]
    times_s = []
    with machine_settings(machine, device):
        for _ in range(NUM_WARM_UPS + num_steps):
            started_s = time.perf_counter()
            engine.step_rows(packs, lr=1e-4, pack_tokens=step.batch.num_tokens, mtp_weight=0.1).read()
            if is_cuda:
                torch.cuda.synchronize(device)
            times_s.append(time.perf_counter() - started_s)
    seconds = statistics.median(times_s[NUM_WARM_UPS:])
    if not is_cuda:
        return Measured(seconds, 0, 0, 0)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    peak, most = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return Measured(seconds, peak, most, total - free - reserved)


def random_pack(step: TrainingStep, seed: int) -> Pack:
    """Documents of `context` tokens, and a last one with the remaining tokens."""
    generator, batch = np.random.default_rng(seed), step.batch
    whole, rest = divmod(batch.num_tokens, batch.context)
    lengths = [batch.context] * whole + [rest] * (rest > 0)
    tokens = generator.integers(0, step.network.vocab_size, batch.num_tokens + 1).astype(np.int32)
    none = np.zeros(len(lengths), np.int32)
    return Pack(tokens[:-1], tokens[1:], np.array(lengths, np.int32), none)


# -- fitting -----------------------------------------------------------------------------------------------------------


def fit(records: Sequence[tuple[TrainingStep, float]], start: Rates, origin: str) -> Rates:
    """`records`: steps and their measured seconds."""
    works = [(step_work(step), seconds) for step, seconds in records]
    start = replace(start, block_s=start.block_s or FIRST_BLOCK_S)
    logs = [0.0] * len(FITTED)
    stride, best = 0.5, _error(works, start, logs)
    while stride > 1e-4:
        improved = False
        for index in range(len(FITTED)):
            for sign in (1, -1):
                tried = [*logs]
                tried[index] += sign * stride
                error = _error(works, start, tried)
                if error < best:
                    logs, best, improved = tried, error, True
        if not improved:
            stride /= 2
    return replace(_moved(start, logs), origin=origin)


def _error(works: Sequence[tuple[Work, float]], start: Rates, logs: Sequence[float]) -> float:
    rates = _moved(start, logs)
    misses = sum(math.log(work.seconds(rates) / seconds) ** 2 for work, seconds in works)
    return misses + PULL * sum(value**2 for value in logs)


def _moved(start: Rates, logs: Sequence[float]) -> Rates:
    return replace(start, **{name: getattr(start, name) * math.exp(x) for name, x in zip(FITTED, logs, strict=True)})


def calibrating_steps(network: ModelConfig, optimizer: OptimizerConfig, free_bytes: float) -> list[TrainingStep]:
    """Steps of a network's first layers that fit on one GPU: more and fewer layers, tokens and context, and one of
    documents of two lengths, which FlexAttention serves."""
    steps: list[TrainingStep] = []
    for num_layers in range(min(4, network.num_layers), 0, -1):
        part = network.with_layers(num_layers)
        for tokens, context in ((16_384, 4096), (16_384, 16_384), (16_384, 10_000), (4096, 2048)):
            context = min(context, network.max_context)
            batch = MicroBatch(tokens, context, tokens, network.num_mtp, is_even=tokens % context == 0)
            step = TrainingStep(part, optimizer, batch)
            if rank_memory(step).total < FILLED_SHARE * free_bytes:
                steps.append(step)
        if len(steps) >= MIN_CALIBRATING:
            return steps
    if not steps:
        raise ConfigError("--measure: not one layer of this network trains on the GPU at hand; leave it out")
    return steps
