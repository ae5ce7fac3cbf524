"""Each axis of the mesh over two processes beside its limit (`scale.py --part mesh`).

Two processes of one thread each train the same step over gloo: four packs, of which either trains two, or a half of
each on the axis `context`. The limit, measured in the same run:

    half of a step that each process takes alone, both at the same time  +  bytes received / bandwidth of the collective

Both alone at once, because two cores share memory bandwidth and clock, whatever runs on them. The bandwidth is that of
the axis' collectives for one large tensor. Bytes are counted in the step and compared with those of `m2forge plan`.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from report import Bar, print_table
from torch.multiprocessing.spawn import spawn

from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.preset import preset
from m2forge.plan.parallel_layout import ParallelLayout, link_bytes
from m2forge.records import Pack
from m2forge.train.activation import MicroBatch
from m2forge.train.config import MeshConfig, OptimizerConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.memory import TrainingStep
from m2forge.train.parallel import ProcessRanks, context_group, shard_model

NUM_RANKS, NUM_PACKS = 2, 4
LEAST_BYTES = 1 << 14
"""Smaller collectives, of counts and norms, do not count."""
PROBE_BYTES, NUM_PROBES = 16 << 20, 5
AXES = {
    "replicate": (MeshConfig(replicate=2), ParallelLayout(2, 1, 1, 1, "none")),
    "shard": (MeshConfig(shard=2), ParallelLayout(1, 2, 1, 1, "none")),
    "context": (MeshConfig(context=2), ParallelLayout(1, 1, 2, 1, "none")),
    "expert": (MeshConfig(shard=2, expert=2), ParallelLayout(1, 2, 1, 2, "none")),
}


@dataclass(frozen=True)
class Measured:
    whole_s: dict[str, float]
    """A step of one process over all packs, beside another that does the same, by turns with the axis."""
    step_s: dict[str, float]
    num_bytes: dict[str, float]
    bandwidth: dict[str, float]


def network() -> ModelConfig:
    """`m2-tiny` with a smaller vocabulary: its weights would otherwise be most of what replicas exchange."""
    return preset("m2-tiny").model_copy(update={"vocab_size": 2048, "num_mtp": 0})


def draw_packs(num_tokens: int) -> list[Pack]:
    generator = np.random.default_rng(0)
    lengths, tags = np.array([num_tokens], np.int32), np.zeros(1, np.int32)
    tokens = generator.integers(0, network().vocab_size, (NUM_PACKS, num_tokens + 1)).astype(np.int32)
    return [Pack(row[:-1], row[1:], lengths, tags) for row in tokens]


def medians_s(calls: Sequence[Callable[[], object]], ranks: ProcessRanks, num_times: int) -> list[float]:
    """The median time of each call, of the slower process; both begin at the same time, and the calls take turns, so
    that all meet the same machine."""
    spent_s = np.empty((num_times + 1, len(calls)))
    for row in spent_s:
        for index, call in enumerate(calls):
            ranks.max_int(0)
            started_s = time.perf_counter()
            call()
            row[index] = time.perf_counter() - started_s
    slowest = torch.from_numpy(np.median(spent_s[1:], axis=0))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(seconds) for seconds in slowest]


def train_on(axis: str, ranks: ProcessRanks, packs: list[Pack]) -> Callable[[], object]:
    mesh, _ = AXES[axis]
    model = build(network(), seed=0)
    if mesh.is_sharded:
        shard_model(model, mesh, ranks)
    engine = TrainEngine(model, OptimizerConfig(), ranks=ranks, context=context_group(mesh, ranks, model.config))
    own = packs if axis == "context" else packs[ranks.rank :: NUM_RANKS]
    return lambda: engine.step_rows(own, lr=1e-4).read()


def bandwidth(axis: str, ranks: ProcessRanks) -> float:
    """Bytes per second that a process receives in the axis' collectives."""
    whole = torch.ones(PROBE_BYTES // 4)
    part = torch.ones(PROBE_BYTES // 4 // NUM_RANKS)
    collectives: dict[str, list[Callable[[], object]]] = {
        "replicate": [lambda: dist.all_reduce(whole)],
        "shard": [
            lambda: dist.all_gather_into_tensor(whole, part),
            lambda: dist.reduce_scatter_tensor(part, whole),
        ],
        "context": [lambda: dist.all_to_all_single(torch.empty_like(whole), whole)],
    }
    collectives["expert"] = collectives["context"]
    received = PROBE_BYTES / NUM_RANKS * (2 if axis == "replicate" else 1)
    return float(np.mean([received / seconds for seconds in medians_s(collectives[axis], ranks, NUM_PROBES)]))


def run_rank(rank: int, folder: Path, pack_tokens: int, num_steps: int) -> None:
    sys.path.append(str(Path(__file__).parent.parent))
    from tests.train.received import Received

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=NUM_RANKS)
    ranks, packs = ProcessRanks(torch.device("cpu")), draw_packs(pack_tokens)
    alone = TrainEngine(build(network(), seed=0), OptimizerConfig())
    whole_s, step_s, num_bytes, rates = {}, {}, {}, {}
    for axis in AXES:
        step = train_on(axis, ranks, packs)
        both = (lambda: alone.step_rows(packs, lr=1e-4).read(), step)
        whole_s[axis], step_s[axis] = medians_s(both, ranks, num_steps)
        with Received(LEAST_BYTES) as received:
            step()
        num_bytes[axis], rates[axis] = received.num_bytes, bandwidth(axis, ranks)
    if rank == 0:
        torch.save(Measured(whole_s, step_s, num_bytes, rates), folder / "measured")
    dist.destroy_process_group()


def planned_bytes(axis: str, pack_tokens: int) -> float:
    _, layout = AXES[axis]
    batch = MicroBatch(pack_tokens, pack_tokens, pack_tokens).cut(pack_tokens // layout.context)
    step = TrainingStep(
        network(),
        OptimizerConfig(),
        batch,
        NUM_PACKS * layout.context // layout.num_gpus,
        item_bytes=4,
        device="cpu",
        shard=layout.holders,
        expert=layout.expert,
        context=layout.context,
    )
    return sum(link_bytes(step, layout).values())


def mesh(quick: bool) -> list[Bar]:
    pack_tokens, num_steps = (1024, 3) if quick else (2048, 7)
    with tempfile.TemporaryDirectory() as name:
        spawn(partial(run_rank, folder=Path(name), pack_tokens=pack_tokens, num_steps=num_steps), nprocs=NUM_RANKS)
        measured: Measured = torch.load(Path(name) / "measured", weights_only=False)
    rows, bars = [], []
    for axis in AXES:
        num_bytes, step_s = measured.num_bytes[axis], measured.step_s[axis]
        links_s = num_bytes / measured.bandwidth[axis]
        limit_s = measured.whole_s[axis] / NUM_RANKS + links_s
        planned = planned_bytes(axis, pack_tokens)
        cells = (
            f"{1e3 * measured.whole_s[axis]:.0f}",
            f"{1e3 * step_s:.0f}",
            f"{1e3 * limit_s:.0f}",
            f"{1e3 * links_s:.0f}",
            f"{limit_s / step_s:.0%}",
        )
        rows.append((axis, *cells, f"{num_bytes / 1e6:.2f}", f"{planned / 1e6:.2f}"))
        bars.append(Bar.at_least(f"{axis}: limit over step", limit_s / step_s, 0.85))
        bars.append(Bar.at_most(f"{axis}: bytes off the plan's", abs(num_bytes / planned - 1), 0.0))
    columns = (
        "axis",
        "one alone ms",
        "step ms",
        "limit ms",
        "of it links",
        "of the limit",
        "MB received",
        "MB planned",
    )
    print_table(f"Two processes of one thread: m2-tiny, {NUM_PACKS} packs of {pack_tokens} tokens", columns, rows)
    return bars
