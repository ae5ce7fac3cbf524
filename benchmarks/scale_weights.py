"""Policy versions on the way to several samplers: how long publishing takes, and how long sampling pauses.

Receivers are processes with a network of their own, as samplers have. A version has reached them when each has it in
staging memory, by broadcast while rank 0 publishes or from its files afterwards. The pause is the copy into the network
alone, in processor time of one thread; it is compared with a bare copy of as many bytes into the same network.

All processes share the cores of this machine, so four receivers also take four times the processor time of one. On
machines with more cores than processes the network or the disk would be the limit.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import xxhash
from report import Bar, print_table
from torch import Tensor

from m2forge.model.checkpoint import load_model, open_source
from m2forge.model.staging import Staged
from m2forge.model.transformer import Transformer
from m2forge.records import PolicyVersion
from m2forge.weights.collective import Receiver, Sender
from m2forge.weights.store import WeightStore

NUMBERS = (1, 4)
NUM_VERSIONS = 3
NUM_COPIES = 3
"""The fastest counts: the first touches memory that no process had."""
START_S = 300.0


def digest(model: Transformer) -> int:
    found = xxhash.xxh3_64()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.intdigest()


def receive(pipe: Connection, folder: Path, address: Path | None) -> None:
    """A replica: stages each version that it is sent the name of, copies it in, and reports how that went."""
    torch.set_num_threads(1)
    model, loaded = load_model(folder), folder
    receiver = None if address is None else Receiver(address)
    if receiver is not None:
        receiver.start(model)
    pipe.send("ready")
    while (found := pipe.recv()) is not None:
        version, path = found
        arrival = None if receiver is None else receiver.take(version)
        arrived = None if arrival is None else arrival.staged(path)
        staged = Staged(model, open_source(path), loaded, arrived)
        pipe.send(arrived is not None)
        pipe.recv()  # all replicas are ready
        started_s = time.thread_time()
        staged.fill(model, loaded)
        pause_s, loaded = time.thread_time() - started_s, path
        state = model.state_dict()
        copies = {name: tensor.clone() for name, tensor in state.items()}
        copy_s = min(timed_copy(copies, state) for _ in range(NUM_COPIES))
        pipe.send((digest(model), pause_s, copy_s))
    if receiver is not None:
        receiver.stop()


@torch.no_grad()
def timed_copy(source: Mapping[str, Tensor], dest: Mapping[str, Tensor]) -> float:
    started_s = time.thread_time()
    for name, tensor in source.items():
        dest[name].copy_(tensor)
    return time.thread_time() - started_s


def replicate(
    model: Transformer, number: int, by_broadcast: bool, scratch: Path
) -> tuple[float, float, float, int, int]:
    """Publish versions to `number` replicas; median seconds until all had a version staged, of the pause and of a bare
    copy, and how many versions differed in a bit or did not come by broadcast."""
    store, address = WeightStore(scratch / "weights", "run", keep=2), scratch / "broadcast.json"
    sender = Sender(address) if by_broadcast else None
    first = store.publish(model, 0)
    context = multiprocessing.get_context("spawn")
    ends: list[tuple[Connection, BaseProcess]] = []
    for _ in range(number):
        pipe, theirs = context.Pipe()
        process = context.Process(target=receive, args=(theirs, first, address if by_broadcast else None))
        process.start()
        ends.append((pipe, process))
    pipes = [pipe for pipe, _ in ends]
    for pipe in pipes:
        assert pipe.poll(START_S)
        pipe.recv()
    time.sleep(2.0)  # receivers register
    staged_s, pauses_s, copies_s, num_different, num_read = [], [], [], 0, 0
    for step in range(NUM_VERSIONS + 1):
        with torch.no_grad():
            for weight in model.parameters():
                weight.view(-1)[step::7] += 1.0
        started_s = time.perf_counter()
        path = store.publish(model, step + 1, send=None if sender is None else sender.send)
        for pipe in pipes:
            pipe.send((PolicyVersion("run", step + 1, store.branch), path))
        came = [pipe.recv() for pipe in pipes]
        passed_s = time.perf_counter() - started_s
        published = digest(model)
        for pipe in pipes:
            pipe.send("copy")
            found, pause_s, copy_s = pipe.recv()  # one after another: they would slow each other down
            num_different += found != published
            if step:  # the first forms the group
                pauses_s.append(pause_s)
                copies_s.append(copy_s)
        if step:
            staged_s.append(passed_s)
            num_read += by_broadcast and not all(came)
    for pipe, running in ends:
        pipe.send(None)
        running.join()
    if sender is not None:
        sender.close()
    medians = (statistics.median(values) for values in (staged_s, pauses_s, copies_s))
    return (*medians, num_different, num_read)


def publish_to_replicas(model: Transformer) -> list[Bar]:
    rows, bars = [], []
    for by_broadcast, name in ((False, "files"), (True, "collective")):
        seconds, ratios, different, missed = {}, [], 0, 0
        for number in NUMBERS:
            with tempfile.TemporaryDirectory() as scratch:
                staged_s, pause_s, copy_s, num_different, num_read = replicate(
                    model, number, by_broadcast, Path(scratch)
                )
            seconds[number], different, missed = staged_s, different + num_different, missed + num_read
            ratios.append(pause_s / copy_s)
            rows.append((name, str(number), f"{staged_s:.2f}", f"{1e3 * pause_s:.1f}", f"{1e3 * copy_s:.1f}"))
        few, many = NUMBERS
        bars += [
            Bar.at_most(f"{name}: publishing to {many} over {few}, shared cores", seconds[many] / seconds[few], 1.3),
            Bar.at_most(f"{name}: pause over the bare copy", max(ratios), 1.25),
            Bar.at_most(f"{name}: replicas that differ in a bit", different, 0),
        ]
        if by_broadcast:
            bars.append(Bar.at_most(f"{name}: versions read from files", missed, 0))
    print_table("Versions to replicas", ("by", "replicas", "publish to staged s", "pause ms", "bare copy ms"), rows)
    if not torch.cuda.is_available():
        print("not measured: the bars of a GPU (pause over host-to-device copy, optimizer step to first token)")
    return bars
