"""One rank's share of a training step, timed on the GPU at hand; rates fitted to the seconds.

`rank_share` makes a step for one GPU of what a rank of a layout does: its part of the experts and of the tokens, with
the adapters, activation checkpointing and walk of the step. What other ranks do for it has no equal on one GPU:

    links       nothing is sent; their time is predicted, not measured
    state       the one GPU holds whole weights and moments, so only as many layers as then fit (`calibrating_steps`)
    attention   where `context` ranks share a pack, paths end with the rank's tokens
    experts     a token's experts are at most the rank's

The rates are fitted to what the timed step did, `step_work` of the share, and so none of this distorts them. A step
that is predicted to take long gets fewer layers, down to two, or one of each kind. Its size is logged before it is
built, and every phase's seconds as it ends. `fit` finds the rates that explain measured steps best: it minimizes the
squared logarithms of predicted over measured seconds, with a weak pull towards the rates it starts from, because few
steps do not determine all six.
"""

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from m2forge.errors import ConfigError
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.lora import attach
from m2forge.plan.gpu import Rates
from m2forge.plan.work import Work, step_work
from m2forge.records import Pack
from m2forge.train.config import MachineConfig, MeshConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.machine import machine_settings, set_up_model
from m2forge.train.memory import TrainingStep, rank_memory, weights

FITTED = ("dense", "expert", "attention", "flex_attention", "bandwidth", "block_s")
PULL = 0.01
"""Weight of the squared distance from the first rates."""
NUM_WARM_UPS = 2
FILLED_SHARE = 0.85
"""Share of the free memory that a calibrating step may need."""
LONGEST_S = 3.0
"""Predicted seconds from which a calibrating step gets fewer layers."""
ENOUGH_LAYERS = 2
"""Layers that a step keeps, if they fit, however long it takes: one would not tell a layer's time from the head's."""
ENOUGH_S = 3.0
"""Seconds of timed steps after which no other is timed."""
UNEVEN_SHARE = 8
"""An eighth of a path is cut off where paths of one length would leave no document of another."""
FIRST_BLOCK_S = 1e-3
"""Initial value of an unknown launch time."""
_log = logging.getLogger(__name__)


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
    """Train `step` on random tokens; `step` must be unsharded. At most `num_steps` are timed."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch._dynamo.reset()
        # An engine may lie in a cycle of references, and would count in the peak of the next step.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    machine = _machine(step)
    started_s = time.perf_counter()
    engine = make_engine(step, device)
    packs = [random_pack(step, seed) for seed in range(step.num_batches)]
    compiles = "; compiling" if step.is_compiled else ""
    _log.info("  weights drawn on %s in %.1f s%s", device, time.perf_counter() - started_s, compiles)
    timed_s: list[float] = []
    with machine_settings(machine, device):
        for index in range(NUM_WARM_UPS + num_steps):
            started_s = time.perf_counter()
            engine.step_rows(packs, lr=1e-4, pack_tokens=step.batch.num_tokens, mtp_weight=0.1).read()
            if is_cuda:
                torch.cuda.synchronize(device)
            passed_s = time.perf_counter() - started_s
            if index < NUM_WARM_UPS:
                _log.info("  warm-up %d of %d: %.3g s", index + 1, NUM_WARM_UPS, passed_s)
                continue
            timed_s.append(passed_s)
            if sum(timed_s) >= ENOUGH_S:
                break
    seconds = statistics.median(timed_s)
    _log.info("  timed: %.3g s, the median of %d", seconds, len(timed_s))
    if not is_cuda:
        return Measured(seconds, 0, 0, 0)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    peak, most = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return Measured(seconds, peak, most, total - free - reserved)


def make_engine(step: TrainingStep, device: torch.device) -> TrainEngine:
    """The engine that trains `step`, with drawn weights."""
    if step.shard * step.expert * step.context > 1:
        raise ConfigError(f"a step of {step.shard} ranks cannot run on one; give the rank_share of it")
    model = build(step.network, device, torch.bfloat16 if step.item_bytes == 2 else torch.float32)
    if step.lora is not None:
        # The base model's folder is only written into an exported adapter.
        attach(model, step.lora, Path())
    engine = TrainEngine(model, step.optimizer, offload="host" if step.offload == "host" else "none", walk=step.walk)
    set_up_model(model, _machine(step), device)
    return engine


def _machine(step: TrainingStep) -> MachineConfig:
    return MachineConfig.model_validate(
        {
            "recompute": "walk" if step.walk is not None else step.recompute,
            "walk": None if step.walk is None else step.walk.model_dump(),
            "mesh": MeshConfig().model_dump(),
        }
    )


def random_pack(step: TrainingStep, seed: int) -> Pack:
    """Documents of `context` tokens, and a last one with the remaining tokens."""
    generator, batch = np.random.default_rng(seed), step.batch
    whole, rest = divmod(batch.num_tokens, batch.context)
    lengths = [batch.context] * whole + [rest] * (rest > 0)
    tokens = generator.integers(0, step.network.vocab_size, batch.num_tokens + 1).astype(np.int32)
    none = np.zeros(len(lengths), np.int32)
    return Pack(tokens[:-1], tokens[1:], np.array(lengths, np.int32), none)


# -- one rank's share --------------------------------------------------------------------------------------------------


def rank_share(step: TrainingStep) -> TrainingStep:
    """What one GPU runs of a rank's `step`, with all layers."""
    network = step.network.model_copy(update={"num_mtp": step.batch.num_mtp})
    if network.moe is not None:
        num_experts = network.moe.num_experts // step.expert
        held = {"num_experts": num_experts, "top_k": min(network.moe.top_k, num_experts)}
        network = network.model_copy(update={"moe": network.moe.model_copy(update=held)})
    walk = step.walk
    if walk is not None:
        walk = walk.model_copy(update={"segment_tokens": -(-walk.segment_tokens // step.context)})
    # Two micro-batches show what adding up gradients takes.
    num_batches = min(step.num_batches, 2)
    share = replace(step, network=network, num_batches=num_batches, walk=walk, shard=1, expert=1, context=1)
    return _resized(share, network.num_layers, step.batch.num_tokens, step.batch.context)


def _resized(share: TrainingStep, num_layers: int, num_tokens: int, context: int) -> TrainingStep:
    """The same with at most so many tokens and so long paths, which stay equally long or of different lengths."""
    context = max(1, min(context, num_tokens))
    if share.batch.is_even:
        num_tokens -= num_tokens % context
    while not share.batch.is_even and num_tokens % context == 0 and context > 1:
        context -= -(-context // UNEVEN_SHARE)
    batch = replace(share.batch.cut(num_tokens), context=context)
    return replace(share, network=share.network.with_layers(num_layers), batch=batch)


def calibrating_steps(share: TrainingStep, free_bytes: float, rates: Rates) -> list[TrainingStep]:
    """The share with as many layers as fit on one GPU and do not take long, and with fewer layers, fewer tokens and
    shorter paths."""
    most, tokens, context = share.network.num_layers, share.batch.num_tokens, share.batch.context
    while most and rank_memory(_resized(share, most, tokens, context)).total > FILLED_SHARE * free_bytes:
        most -= 1
    if not most:
        raise ConfigError(
            f"--measure: not one layer of a rank's share, {tokens:,} tokens with whole weights and moments, fits into "
            f"the {free_bytes / 1e9:.1f} GB that this GPU has free; leave it out"
        )
    while (
        most > _enough_layers(share.network)
        and step_work(_resized(share, most, tokens, context)).seconds(rates) > LONGEST_S
    ):
        most -= 1
    sizes = (
        (most, tokens, context),
        (max(1, most // 2), tokens, context),
        (most, max(1, tokens // 2), context),
        (most, tokens, max(1, context // 4)),
        (max(1, most // 2), max(1, tokens // 4), max(1, context // 8)),
    )
    return list(dict.fromkeys(_resized(share, *size) for size in sizes))


def _enough_layers(network: ModelConfig) -> int:
    """At least one layer of each kind."""
    kinds = [(network.is_sparse(layer), network.is_windowed(layer)) for layer in range(network.num_layers)]
    return max(ENOUGH_LAYERS, 1 + max(kinds.index(kind) for kind in kinds))


@dataclass(frozen=True)
class Timed:
    """A step of the share, and its seconds as timed and predicted."""

    step: TrainingStep
    seconds: float
    before_s: float
    """Predicted before anything was timed."""
    fitted_s: float
    """Predicted with the rates fitted to it and the others."""


@dataclass(frozen=True)
class Calibration:
    rank: TrainingStep
    """What a rank of the layout does, of which a share was timed."""
    timed: tuple[Timed, ...]
    """The share itself first."""
    rates: Rates


def calibrate(
    rank: TrainingStep, start: Rates, free_bytes: float, time_step: Callable[[TrainingStep], float], name: str
) -> Calibration:
    """Rates fitted to the share of `rank`. `time_step`: the seconds of a step on the GPU called `name`."""
    steps = calibrating_steps(rank_share(rank), free_bytes, start)
    records = []
    for index, step in enumerate(steps, start=1):
        title = f"step {index} of {len(steps)} on {name}: {_describe(step, rank.network.num_layers)}"
        _log.info("%s; predicted: %.3g s", title, step_work(step).seconds(start))
        try:
            records.append((step, time_step(step)))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"--measure: {title}: out of memory, with {free_bytes / 1e9:.1f} GB free at the start; end other "
                "processes on this GPU, or leave it out"
            ) from error
    rates = fit(records, start, "")
    timed = tuple(
        Timed(step, seconds, work.seconds(start), work.seconds(rates))
        for (step, seconds), work in zip(records, [step_work(step) for step in steps], strict=True)
    )
    missed = max(abs(one.fitted_s / one.seconds - 1) for one in timed)
    origin = f"fitted to {len(timed)} steps of one rank's share, timed by --measure on {name}, within {missed:.1%}"
    return Calibration(rank, timed, replace(rates, origin=origin))


def _describe(step: TrainingStep, num_layers: int) -> str:
    """`num_layers`: of the whole network."""
    batch, num_weights = step.batch, sum(weight.numel for weight in weights(step.network, step.lora))
    return (
        f"{step.network.num_layers} of {num_layers} layers with {num_weights / 1e9:.3g} billion parameters, "
        f"{batch.num_tokens:,} tokens in paths up to {batch.context:,}, {rank_memory(step).total / 1e9:.1f} GB"
    )


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
