"""Versions by broadcast: whole in each sampler or not there, whichever process dies; else the folder is read."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from m2forge.errors import CheckpointError
from m2forge.model.checkpoint import load_model
from m2forge.model.transformer import Transformer
from m2forge.records import PolicyVersion
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.weights import collective
from m2forge.weights.collective import Receiver, Sender
from m2forge.weights.store import WeightStore
from tests.forked import start
from tests.weights.test_store import make_model

LIMIT_S = 60.0


def publish(store: WeightStore, model: Transformer, step: int, sender: Sender) -> tuple[PolicyVersion, Path]:
    with torch.no_grad():
        model.norm.weight.fill_(float(step))
    folder = store.publish(model, step, send=sender.send)
    return PolicyVersion("run", step, store.branch), folder


def is_whole(images: Mapping[str, Tensor], folder: Path) -> bool:
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    return {name: image.numpy().tobytes() for name, image in images.items()} == files


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def registered(receiver: Receiver, store: WeightStore, sender: Sender, model: Transformer, step: int) -> int:
    """Publish until a broadcast reaches this sampler; returns the step."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        version, folder = publish(store, model, step, sender)
        if images := receiver.take(version):
            assert is_whole(images, folder)
            return step
        assert time.monotonic() < until_s
        step += 1
        time.sleep(0.1)


def test_every_sampler_receives_the_files_of_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 1000)
    address, model = tmp_path / "broadcast.json", make_model()
    store = WeightStore(tmp_path / "weights", "run", keep=9, anchor_every=3)
    receivers = [Receiver(address), Receiver(address)]
    sender = Sender(address)
    try:
        assert address.stat().st_mode & 0o077 == 0
        last = max(registered(receiver, store, sender, model, 100 * index) for index, receiver in enumerate(receivers))
        receivers.append(Receiver(address))
        last = registered(receivers[2], store, sender, model, last + 1)
        for step in range(last + 1, last + 5):  # whole versions and changes
            version, folder = publish(store, model, step, sender)
            assert all(is_whole(receiver.take(version), folder) for receiver in receivers)
            assert receivers[0].take(version) == {}, "memory is given up with the first use"
        # Another trainer process takes over.
        sender.close()
        sender = Sender(address)
        registered(receivers[1], store, sender, model, last + 5)
    finally:
        sender.close()
        for receiver in receivers:
            receiver.stop()


def receive_and_die(address: Path) -> None:
    """A sampler that is killed while it receives its second version."""
    torch.set_num_threads(1)
    receive, num_received = collective.broadcast, 0

    def count(group: object, content: Tensor) -> None:
        nonlocal num_received
        num_received += 1
        if num_received == 2:
            receive(group, content[: collective.BUCKET_BYTES])
            os.kill(os.getpid(), signal.SIGKILL)
        receive(group, content)

    collective.broadcast, collective.BUCKET_BYTES = count, 1000
    Receiver(address)
    time.sleep(LIMIT_S)


def test_a_sampler_killed_in_a_broadcast_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 1000)
    monkeypatch.setattr(collective, "ACCEPT_S", 3.0)
    address, model = tmp_path / "broadcast.json", make_model()
    store, sender, receiver = WeightStore(tmp_path / "weights", "run"), Sender(address), Receiver(address)
    dying = start(receive_and_die, address)
    try:
        step = 0
        while dying.is_alive():
            version, folder = publish(store, model, step, sender)
            images = receiver.take(version)
            assert not images or is_whole(images, folder), "a version is there or not, never a part of it"
            assert store.newest() == (version, folder), "the version is published whatever became of the broadcast"
            step += 1
        assert dying.exitcode == -signal.SIGKILL
        registered(receiver, store, sender, model, step)
    finally:
        dying.kill()
        dying.join()
        sender.close()
        receiver.stop()


def make_core(folder: Path, images: dict[str, Tensor]) -> Core:
    return Core(load_model(folder), RolloutConfig(num_blocks=8), PolicyVersion("run", 1), received=lambda _: images)


def test_a_changed_file_is_refused_and_the_old_version_stays(tmp_path: Path) -> None:
    store, model = WeightStore(tmp_path / "weights", "run"), make_model()
    first = store.publish(model, 1)
    with torch.no_grad():
        model.norm.weight.fill_(2.0)
    second = store.publish(model, 2)
    path = second / "model.safetensors"
    whole = path.read_bytes()
    images: dict[str, Tensor] = {}
    core = make_core(first, images)
    for torn in (whole[:-4] + b"\x00\x00\x01\x3f", whole[: len(whole) // 2]):
        path.write_bytes(torn)
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*(copy|Copy|fetch)"):
            core.load(second, PolicyVersion("run", 2))
        assert core.version.step == 1
        assert (core.model.norm.weight == 1).all()
    # What came by broadcast is not affected, and is compared as well.
    images[path.name] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    core.load(second, PolicyVersion("run", 2))
    assert (core.model.norm.weight == 2).all()
    path.write_bytes(whole)
    images[path.name] = torch.frombuffer(bytearray(whole[:-4] + b"\x00\x00\x01\x3f"), dtype=torch.uint8)
    core.load(second, PolicyVersion("run", 3))
    assert (core.model.norm.weight == 2).all()
    assert core.version.step == 3
