"""Checkpoints that ranks write together (`scale.py --part checkpoints`).

Two processes shard a network over gloo. Measured on each rank: the peak of its memory from the start of loading until a
checkpoint is written and loaded again, above what the process had before, over the bytes of its slice (weights, masters
and moments); the time of a step alone, and of one beside which a checkpoint is written; the bytes on disk over those of
the state.
"""

import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from report import Bar, print_table
from torch.multiprocessing.spawn import spawn

from m2forge.model.checkpoint import save_model
from m2forge.model.config import ModelConfig
from m2forge.model.preset import preset
from m2forge.model.start import Start, start_from
from m2forge.records import Pack
from m2forge.train.checkpoint import CheckpointStore, load_start, restore
from m2forge.train.config import CheckpointConfig, MachineConfig, MeshConfig, OptimizerConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.machine import load_network
from m2forge.train.parallel import ProcessRanks, held_weights
from m2forge.train.position import Position

NUM_RANKS, NUM_STEPS, PACK_TOKENS = 2, 3, 256
GIB = 1 << 30
MACHINE = MachineConfig(device="cpu", mesh=MeshConfig(shard=NUM_RANKS))


@dataclass(frozen=True)
class Measured:
    slice_bytes: int
    peak_bytes: int
    alone_s: float
    beside_s: float
    save_s: float


class Peak(threading.Thread):
    """The largest anonymous memory of this process while it runs. Pages of mapped files, which the kernel drops when it
    needs memory, do not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.peak, self._ends = anonymous_bytes(), 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ends.wait(0.005):
            self.peak = max(self.peak, anonymous_bytes())

    def end(self) -> int:
        self._ends.set()
        self.join()
        return self.peak - self.before


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def make_engine(start: Start, ranks: ProcessRanks) -> TrainEngine:
    model = load_network(start, MACHINE, torch.bfloat16, ranks, "benchmark")
    return TrainEngine(model, OptimizerConfig(), ranks=ranks, router_bias="balanced")


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=NUM_RANKS)
    ranks, peak = ProcessRanks(torch.device("cpu")), Peak()
    engine, store = make_engine(start_from(folder / "base"), ranks), CheckpointStore(folder, CheckpointConfig())
    held = [*held_weights(engine.model).values(), *engine.optimizer.held().values()]
    slice_bytes = sum(rows.tensor.nbytes for rows in held)
    started_s = time.perf_counter()
    store.save(engine, Position(step=1))
    save_s = time.perf_counter() - started_s
    saved = store.newest()
    assert saved is not None
    del engine, held
    engine = make_engine(load_start(saved), ranks)
    restore(engine, saved)
    peak_bytes = peak.end()
    tokens = np.arange(PACK_TOKENS, dtype=np.int32)
    pack = Pack(tokens, tokens, np.array([PACK_TOKENS], np.int32), np.zeros(1, np.int32))
    spent_s: dict[str, list[float]] = {"alone": [], "beside": []}
    engine.step_rows([pack], lr=1e-4)
    for step in range(2, 2 + NUM_STEPS):
        for kind, times in spent_s.items():
            if kind == "beside":
                store.begin(engine, Position(step=step))
            ranks.max_int(0)
            started_s = time.perf_counter()
            engine.step_rows([pack], lr=1e-4).read()
            times.append(time.perf_counter() - started_s)
    store.wait()
    alone_s, beside_s = (float(np.median(times)) for times in spent_s.values())
    torch.save(Measured(slice_bytes, peak_bytes, alone_s, beside_s, save_s), folder / f"{rank}.measured")
    dist.destroy_process_group()


def network(quick: bool) -> ModelConfig:
    config = preset("m2-mini")
    if not quick or config.moe is None:
        return config
    moe = config.moe.model_copy(update={"num_experts": 16})
    return config.with_layers(1).model_copy(update={"vocab_size": 4096, "moe": moe})


def checkpoints(quick: bool) -> list[Bar]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(Start(network(quick)).build("cpu", torch.bfloat16), folder / "base")
        spawn(partial(run_rank, folder=folder), nprocs=NUM_RANKS)
        ranks: list[Measured] = [
            torch.load(folder / f"{rank}.measured", weights_only=False) for rank in range(NUM_RANKS)
        ]
        newest = max(folder.glob("step-*"))
        num_bytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    state_bytes = sum(rank.slice_bytes for rank in ranks)
    rows = [
        (
            f"rank {index}",
            f"{rank.slice_bytes / 1e6:.0f}",
            f"{rank.peak_bytes / 1e6:.0f}",
            f"{rank.save_s:.2f}",
            f"{rank.alone_s:.2f}",
            f"{rank.beside_s:.2f}",
        )
        for index, rank in enumerate(ranks)
    ]
    columns = ("", "slice MB", "peak MB of loading, saving, loading", "save s", "step s", "step beside a save s")
    print_table(f"Checkpoints of {state_bytes / 1e6:.0f} MB, {num_bytes / 1e6:.0f} MB on disk", columns, rows)
    beside = max(rank.beside_s / (rank.alone_s + rank.save_s) for rank in ranks)
    most = max(rank.peak_bytes / (1.25 * rank.slice_bytes + GIB) for rank in ranks)
    return [
        Bar.at_most("peak memory of a rank / (1.25 slices + 1 GiB)", most, 1.0),
        Bar.at_most("bytes on disk / bytes of the state", num_bytes / state_bytes, 1.05),
        Bar.at_most("step beside a save / (step + save)", beside, 1.0),
    ]
