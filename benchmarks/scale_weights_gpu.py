"""Policy versions on a GPU: how long sampling pauses, and how long it takes from an optimizer step to a new token.

A trainer, this process, changes every weight of `m2-mini` and publishes in a thread, as `m2forge rl` does; a sampler, a
process of its own on the same GPU, decodes all the while, and is told of a version as the loop would: once a look at
the folder, every tenth of a second, finds it. The pause is the time in which no step runs because weights are copied
in; it is compared with a bare copy of as many bytes from pinned host memory. The way from the step to the first token
of its version is compared with its slowest link, measured alone with the same bytes: device to host, the folder's file
system (written and read by one thread), the broadcast over loopback, host to device.
"""

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from report import Bar, print_table

from m2forge.model.build import build
from m2forge.model.checkpoint import load_model
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.protocols import Prompt
from m2forge.records import PolicyVersion, Sampling
from m2forge.rl.weight_updates import LOOK_S
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.rollout.engine import NativeEngine
from m2forge.rollout.server.app import SWITCH_S
from m2forge.train.checkpoint import Writing
from m2forge.weights.collective import LOCAL, Receiver, Sender, broadcast, dist, join_group
from m2forge.weights.store import WeightStore

NUM_REQUESTS, NUM_TOKENS = 32, 200
NUM_VERSIONS = 5
START_S = 300.0
WRITE_BYTES = 1 << 24


def sample(pipe: Connection, folder: Path, address: Path | None) -> None:
    asyncio.run(_sample(pipe, folder, address))


async def _sample(pipe: Connection, folder: Path, address: Path | None) -> None:
    sys.setswitchinterval(SWITCH_S)  # as a sampler's server does
    receiver = None if address is None else Receiver(address)
    model = load_model(folder, device="cuda")
    config = RolloutConfig(num_blocks=2048, max_running=NUM_REQUESTS)
    engine = NativeEngine(Core(model, config, PolicyVersion("run", 0), broadcasts=receiver))
    first_s: dict[int, float] = {}

    async def decode(index: int) -> None:
        rng = np.random.default_rng(index)
        while True:
            prompt = Prompt(rng.integers(0, 1000, 64, dtype=np.int32), NUM_TOKENS, Sampling(1.0))
            async for chunk in engine.generate(prompt):
                for version in set(chunk.versions.tolist()):
                    first_s.setdefault(version, time.monotonic())

    decoders = [asyncio.create_task(decode(index)) for index in range(NUM_REQUESTS)]
    await asyncio.sleep(10.0)  # graphs are captured
    pipe.send("ready")
    while (found := await asyncio.to_thread(pipe.recv)) is not None:
        version, path = found
        before_s = (await engine.metrics())["total_load_seconds"]
        await engine.load(path, version)
        while version.step not in first_s:
            await asyncio.sleep(0.001)
        pause_s = (await engine.metrics())["total_load_seconds"] - before_s
        pipe.send((first_s[version.step], pause_s))
    for decoder in decoders:
        decoder.cancel()
    for decoder in decoders:
        with suppress(asyncio.CancelledError):
            await decoder
    await engine.close()
    pipe.send(copy_to_device_s(model))


def copy_to_device_s(model: Transformer) -> float:
    state = model.state_dict()
    copies = {name: torch.empty_like(tensor, device="cpu").pin_memory() for name, tensor in state.items()}
    for name, tensor in state.items():
        copies[name].copy_(tensor)
    return fastest(lambda: [state[name].copy_(copy, non_blocking=True) for name, copy in copies.items()])


def fastest(act: Callable[[], object], number: int = 5) -> float:
    found = []
    for _ in range(number):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        act()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started_s)
    return min(found)


def links_s(model: Transformer, folder: Path) -> dict[str, float]:
    """Seconds in which all weights pass each link, alone."""
    flat = torch.cat([weight.detach().reshape(-1).view(torch.uint8) for weight in model.parameters()])
    host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
    found = {"device to host": fastest(lambda: host.copy_(flat, non_blocking=True))}
    path, content = folder / "bytes", host.numpy().data

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(content), WRITE_BYTES):
                file.write(content[start : start + WRITE_BYTES])

    def read() -> None:
        into = host.numpy().data
        with path.open("rb", buffering=0) as file:
            for start in range(0, len(into), WRITE_BYTES):
                file.readinto(into[start : start + WRITE_BYTES])

    found |= {"write": fastest(write, 2), "read": fastest(read, 2)}
    path.unlink()
    return found | {"host to device": fastest(lambda: flat.copy_(host, non_blocking=True))}


def broadcast_s(num_bytes: int) -> float:
    """A broadcast of as many bytes to one process."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
    process = context.Process(target=_receive, args=(store.port, num_bytes))
    process.start()
    content, seconds = torch.zeros(num_bytes, dtype=torch.uint8), []
    group = join_group(store, "alone", 0, 2)
    for _ in range(3):
        started_s = time.perf_counter()
        broadcast(group, content)
        group.barrier().wait()
        seconds.append(time.perf_counter() - started_s)
    process.join()
    return min(seconds)


def _receive(port: int, num_bytes: int) -> None:
    store = dist.TCPStore(LOCAL, port, is_master=False)
    group = join_group(store, "alone", 1, 2)
    content = torch.empty(num_bytes, dtype=torch.uint8)
    for _ in range(3):
        broadcast(group, content)
        group.barrier().wait()


def update(model: Transformer, by_broadcast: bool, scratch: Path) -> tuple[float, float, float]:
    """Medians of the seconds from the step to the first token, and of the pause; and those of a bare copy."""
    store, address = WeightStore(scratch / "weights", "run", keep=2), scratch / "broadcast.json"
    sender = Sender(address) if by_broadcast else None
    first = store.publish(model, 0)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=sample, args=(theirs, first, address if by_broadcast else None))
    process.start()
    assert pipe.poll(START_S)
    pipe.recv()
    latencies_s, pauses_s = [], []
    for step in range(1, NUM_VERSIONS + 2):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.001)
        torch.cuda.synchronize()
        started_s = time.monotonic()
        publishing = Writing(partial(store.publish, model, step, send=None if sender is None else sender.send))
        while ((newest := store.newest()) is None or newest[0].step < step) and publishing.is_alive():
            time.sleep(LOOK_S)
        published_s = time.monotonic() - started_s
        pipe.send(newest)
        first_s, pause_s = pipe.recv()
        publishing.end()
        print(
            f"version {step}: published {published_s:.3f} s, token after {first_s - started_s:.3f}, pause {pause_s:.4f}"
        )
        if step > 1:  # the first forms the group, and pins memory
            latencies_s.append(first_s - started_s)
            pauses_s.append(pause_s)
    pipe.send(None)
    copy_s = pipe.recv()
    process.join()
    if sender is not None:
        sender.close()
    return statistics.median(latencies_s), statistics.median(pauses_s), copy_s


def updates_on_gpu() -> list[Bar]:
    torch.manual_seed(0)
    model = build(preset("m2-mini"), torch.device("cuda"), torch.bfloat16)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    bars = []
    with tempfile.TemporaryDirectory() as name:
        links = links_s(model, Path(name))
    links["broadcast"] = broadcast_s(num_bytes)
    speeds = [(link, f"{1e3 * seconds:.0f}", f"{num_bytes / seconds / 1e9:.1f}") for link, seconds in links.items()]
    print_table(f"{num_bytes / 1e9:.2f} GB over each link, alone", ("link", "ms", "GB/s"), speeds)
    rows = []
    for by_broadcast, title in ((False, "files"), (True, "collective")):
        with tempfile.TemporaryDirectory() as name:
            latency_s, pause_s, copy_s = update(model, by_broadcast, Path(name))
        passed = [link for link in links if link != ("write" if by_broadcast else "broadcast")]
        slowest_s = max(links[link] for link in passed)
        rows.append((title, f"{latency_s:.3f}", f"{slowest_s:.3f}", f"{1e3 * pause_s:.1f}", f"{1e3 * copy_s:.1f}"))
        bars += [
            Bar.at_most(f"{title}, GPU: pause over the bare copy", pause_s / copy_s, 1.25),
            Bar.at_most(f"{title}, GPU: step to first token over the slowest link", latency_s / slowest_s, 2.0),
        ]
    columns = ("by", "step to first token s", "slowest link s", "pause ms", "bare copy ms")
    print_table(f"Versions of {num_bytes / 1e9:.2f} GB to a sampler on the same GPU", columns, rows)
    return bars
