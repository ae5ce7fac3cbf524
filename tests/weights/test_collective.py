"""Versions by broadcast: whole in each sampler or not there, whichever process dies; else the folder is read."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from m2forge.errors import CheckpointError
from m2forge.model import checkpoint, safetensors_file
from m2forge.model.checkpoint import load_model, public_tensors, save_model
from m2forge.model.config import LoRAConfig
from m2forge.model.lora import ADAPTER_FILE, attach
from m2forge.model.staging import Arrival
from m2forge.model.transformer import Transformer
from m2forge.records import PolicyVersion
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.weights import collective
from m2forge.weights.collective import Meeting, Receiver, Sender, _Membership
from m2forge.weights.store import Share, WeightStore
from tests.cost import ROOT
from tests.forked import start
from tests.weights.test_store import make_model

LIMIT_S = 60.0
OTHER = "127.0.0.2"


def publish(store: WeightStore, model: Transformer, step: int, sender: Sender) -> tuple[PolicyVersion, Path]:
    with torch.no_grad():
        model.norm.weight.fill_(float(step))
    folder = store.publish(model, step, send=sender.send)
    return PolicyVersion("run", step, store.branch), folder


def is_whole(arrival: Arrival | None, folder: Path) -> bool:
    """Whether the version in `folder` came, and is the same in each bit."""
    if arrival is None:
        return False
    if not arrival.images:
        expected, memory = load_model(folder).state_dict(), arrival.staged(folder)
        found = {} if memory is None else memory.tensors
        return expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    return {name: image.numpy().tobytes() for name, image in arrival.images.items()} == files


def receiving(address: Path) -> Receiver:
    receiver = Receiver(address)
    receiver.start(make_model())
    return receiver


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
        if (arrival := receiver.take(version)) is not None:
            assert is_whole(arrival, folder)
            return step
        assert time.monotonic() < until_s
        step += 1
        time.sleep(0.1)


def test_every_sampler_receives_the_files_of_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 1000)
    address, model = tmp_path / "broadcast.json", make_model()
    store = WeightStore(tmp_path / "weights", "run", keep=9, anchor_every=3)
    receivers = [receiving(address), receiving(address)]
    sender = Sender(address)
    try:
        assert address.stat().st_mode & 0o077 == 0
        last = max(registered(receiver, store, sender, model, 100 * index) for index, receiver in enumerate(receivers))
        receivers.append(receiving(address))
        last = registered(receivers[2], store, sender, model, last + 1)
        for step in range(last + 1, last + 5):  # whole versions and changes
            version, folder = publish(store, model, step, sender)
            assert all(is_whole(receiver.take(version), folder) for receiver in receivers)
            assert receivers[0].take(version) is None, "memory is given up with the first use"
        # Another trainer process takes over.
        sender.close()
        sender = Sender(address)
        registered(receivers[1], store, sender, model, last + 5)
    finally:
        sender.close()
        for receiver in receivers:
            receiver.stop()


def listening_at(port: int) -> list[str]:
    """The addresses at which this process listens on a port; another one may have the same port at another address."""
    own, found = set[str](), list[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own.add(str(descriptor.readlink()))
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            address, _, number = fields[1].partition(":")
            if fields[3] == "0A" and int(number, 16) == port and f"socket:[{fields[9]}]" in own:
                words = [
                    int(address[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(address), 8)
                ]
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


def test_rank_0_has_one_address_and_leaves_strangers_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address, model, store = tmp_path / "broadcast.json", make_model(), WeightStore(tmp_path / "weights", "run")
    # Another address of this machine, which samplers reach from 127.0.0.1 as from another node.
    sender, receiver = Sender(address, host=OTHER), receiving(address)
    try:
        meeting = Meeting.read(address)
        assert meeting.host == OTHER
        assert listening_at(meeting.port) == [OTHER]
        registered(receiver, store, sender, model, 0)
        # A stranger reads the keys of a TCPStore, and repeats what a sampler has set, or makes a name of its own.
        stranger, own = meeting.connect()
        assert own == "127.0.0.1"
        (known,) = (stranger.get(key) for key in stranger.list_keys() if key.startswith("sampler/"))
        for said in (known, b"stranger 00", b"\xff"):
            stranger.set(f"sampler/{stranger.add('num_samplers', 1)}", said)
        version, folder = publish(store, model, 1000, sender)
        assert is_whole(receiver.take(version), folder)
        assert caplog.text.count("without the token of this run tried to receive versions") == 3
        assert "no longer take part" not in caplog.text
    finally:
        sender.close()
        receiver.stop()


def test_a_sampler_that_comes_during_an_offer_has_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps the name that it registered, so the sender waits for one answer."""
    address, model, store = tmp_path / "broadcast.json", make_model(), WeightStore(tmp_path / "weights", "run")
    comes, is_seen = threading.Event(), threading.Event()
    find, register, take_part = Sender._newcomers, _Membership._register, _Membership._accept
    accepted = list[int]()

    def find_none(sender: Sender) -> list[str]:
        found = find(sender)
        if not is_seen.is_set():
            is_seen.set()
            wait_until(lambda: bool(accepted))
        return found

    def register_late(membership: _Membership) -> None:
        comes.set()
        assert is_seen.wait(LIMIT_S)
        register(membership)

    def accept(membership: _Membership, number: int, num_ranks: int) -> Arrival | None:
        accepted.append(number)
        return take_part(membership, number, num_ranks)

    monkeypatch.setattr(Sender, "_newcomers", find_none)
    monkeypatch.setattr(_Membership, "_register", register_late)
    monkeypatch.setattr(_Membership, "_accept", accept)
    sender, receiver = Sender(address), receiving(address)
    try:
        assert comes.wait(LIMIT_S)
        version, _ = publish(store, model, 1, sender)
        wait_until(lambda: accepted == [1])
        assert receiver.take(version) is None
        version, folder = publish(store, model, 2, sender)
        assert is_whole(receiver.take(version), folder)
        assert "no longer take part" not in caplog.text
    finally:
        sender.close()
        receiver.stop()


def test_a_sampler_that_finds_an_offer_open_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It registers after the offer was made, and before the sender looks who is there."""
    address, model, store = tmp_path / "broadcast.json", make_model(), WeightStore(tmp_path / "weights", "run")
    find, sender, receiver = Sender._newcomers, Sender(address), Receiver(address)

    def find_late(sender: Sender) -> list[str]:
        if receiver._thread is None:
            receiver.start(make_model())
            wait_until(lambda: bool(sender._store.add("num_samplers", 0)))
        return find(sender)

    monkeypatch.setattr(Sender, "_newcomers", find_late)
    try:
        version, folder = publish(store, model, 1, sender)
        assert is_whole(receiver.take(version), folder)
    finally:
        sender.close()
        receiver.stop()


def test_a_sampler_too_slow_for_an_offer_goes_on_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it reads an offer, the sender has made two more and has deleted it."""
    address, model, store = tmp_path / "broadcast.json", make_model(), WeightStore(tmp_path / "weights", "run")
    sender, read, late = Sender(address), _Membership._read, list[str]()
    reads, goes_on = threading.Event(), threading.Event()

    def read_late(membership: _Membership, kind: str, number: int) -> dict[str, Any] | None:
        if number == 1:
            reads.set()
            assert goes_on.wait(LIMIT_S)
        found = read(membership, kind, number)
        if number == 1 and found is None:
            late.append(kind)
        return found

    monkeypatch.setattr(_Membership, "_read", read_late)
    publish(store, model, 0, sender)
    receiver = receiving(address)
    try:
        assert reads.wait(LIMIT_S)
        monkeypatch.setattr(collective, "ACCEPT_S", 0.1)
        for step in (1, 2, 3):
            publish(store, model, step, sender)
        goes_on.set()
        monkeypatch.setattr(collective, "ACCEPT_S", 10.0)
        registered(receiver, store, sender, model, 4)
        assert late == ["offer"]
    finally:
        sender.close()
        receiver.stop()


NEAR, FAR = "192.168.9.1", "192.168.9.2"
TWO_NETWORKS = f"""
set -e
unshare -n sleep 300 & far=$!
trap 'kill $far' EXIT
until [ "$(readlink /proc/$far/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add near type veth peer name far netns $far
ip addr add {NEAR}/24 dev near; ip link set near up; ip link set lo up
nsenter -t $far -n sh -c 'ip addr add {FAR}/24 dev far; ip link set far up; ip link set lo up'
echo connected
nsenter -t $far -n "$@" receive_there & there=$!
"$@" publish_here
wait $there
"""
"""Two network namespaces, each with its own loopback, that a pair of interfaces connects; the command runs in each."""


def publish_here(folder: Path) -> None:
    torch.set_num_threads(1)
    sender, store, model = (
        Sender(folder / "broadcast.json", host=NEAR),
        WeightStore(folder, "run", keep=999),
        make_model(),
    )
    for step in range(300):
        publish(store, model, step, sender)
        if (folder / "received").exists():
            break
        time.sleep(0.1)
    sender.close()


def receive_there(folder: Path) -> None:
    torch.set_num_threads(1)
    receiver, store = receiving(folder / "broadcast.json"), WeightStore(folder, "run")
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        if (newest := store.newest()) is not None and (arrival := receiver.take(newest[0])) is not None:
            assert is_whole(arrival, newest[1])
            (folder / "received").touch()
            break
        time.sleep(0.01)
    receiver.stop()


def part(folder: str, name: str) -> None:
    {"publish_here": publish_here, "receive_there": receive_there}[name](Path(folder))


@pytest.mark.slow
def test_a_version_reaches_a_sampler_on_another_network(tmp_path: Path) -> None:
    program = "import sys; from tests.weights import test_collective as own; own.part(*sys.argv[1:])"
    command = [
        "unshare",
        "-Urnpf",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        TWO_NETWORKS,
        "sh",
        sys.executable,
        "-c",
        program,
        str(tmp_path),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False, cwd=ROOT)
    except FileNotFoundError:
        pytest.skip("no unshare")
    if "connected" not in done.stdout:
        pytest.skip(f"this machine allows no networks of one's own: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "received").exists(), done.stderr


def receive_and_die(address: Path) -> None:
    """A sampler that is killed while it receives the file of its second version."""
    torch.set_num_threads(1)
    receive, num_files = collective.broadcast, 0

    def count(group: object, content: Tensor, timeout_s: float = LIMIT_S) -> None:
        nonlocal num_files
        num_files += len(content) != collective.HEADER_BYTES
        if num_files == 2:
            receive(group, content[: collective.BUCKET_BYTES])
            os.kill(os.getpid(), signal.SIGKILL)
        receive(group, content, timeout_s)

    collective.broadcast, collective.BUCKET_BYTES = count, 1000
    receiving(address)
    time.sleep(LIMIT_S)


def test_a_sampler_killed_in_a_broadcast_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 1000)
    monkeypatch.setattr(collective, "ACCEPT_S", 3.0)
    address, model = tmp_path / "broadcast.json", make_model()
    store, sender, receiver = WeightStore(tmp_path / "weights", "run"), Sender(address), receiving(address)
    dying = start(receive_and_die, address)
    try:
        step = 0
        while dying.is_alive():
            version, folder = publish(store, model, step, sender)
            arrival = receiver.take(version)
            assert arrival is None or is_whole(arrival, folder), "a version is there or not, never a part of it"
            assert store.newest() == (version, folder), "the version is published whatever became of the broadcast"
            step += 1
        assert dying.exitcode == -signal.SIGKILL
        registered(receiver, store, sender, model, step)
    finally:
        dying.kill()
        dying.join()
        sender.close()
        receiver.stop()


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of as many files as there are large tensors, of which one is written at a time."""
    write_small_files(monkeypatch.setattr)


def write_small_files(set_to: Callable[[object, str, object], object]) -> None:
    set_to(checkpoint, "VERSION_SHARD_BYTES", 1 << 16)
    set_to(safetensors_file, "NUM_THREADS", 1)


def files_staged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that samplers of this process stage from now on."""
    names, add = list[str](), Arrival.add

    def note(arrival: Arrival, name: str, content: Tensor) -> None:
        add(arrival, name, content)
        names.append(name)

    monkeypatch.setattr(Arrival, "add", note)
    return names


def before_file(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> list[str]:
    """Call `act` before a version's file of this number is written; the names of those that are."""
    names, write = list[str](), safetensors_file.write_together

    def write_after(folder: Path, files: Mapping[str, list[str]], *arguments: Any) -> None:
        if len(names) == number:
            act()
        write(folder, files, *arguments)
        names.extend(files)

    monkeypatch.setattr(safetensors_file, "write_together", write_after)
    return names


@pytest.mark.usefixtures("many_files")
def test_a_file_is_staged_before_the_next_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, model = tmp_path / "broadcast.json", make_model()
    store, sender, receiver = WeightStore(tmp_path / "weights", "run"), Sender(address), receiving(address)
    try:
        step = registered(receiver, store, sender, model, 0) + 1
        staged = files_staged(monkeypatch)
        written = before_file(monkeypatch, 2, lambda: wait_until(lambda: len(staged) == 2))
        version, folder = publish(store, model, step, sender)
        assert set(staged[:2]) == set(written[:2])
        assert len(written) > 4
        assert is_whole(receiver.take(version), folder)
    finally:
        sender.close()
        receiver.stop()


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("moment", ["before a file", "before the manifest"])
def test_a_version_never_completed_leaves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    address, model = tmp_path / "broadcast.json", make_model()
    store, sender, receiver = WeightStore(tmp_path / "weights", "run"), Sender(address), receiving(address)

    def fail(*_: object) -> None:
        wait_until(lambda: bool(staged))
        raise OSError("no space left")

    try:
        step = registered(receiver, store, sender, model, 0)
        newest = store.newest()
        with monkeypatch.context() as patch:
            staged = files_staged(patch)
            if moment == "before a file":
                before_file(patch, 2, fail)
            else:
                patch.setattr(checkpoint, "complete_version", fail)
            with pytest.raises(OSError, match="no space left"):
                publish(store, model, step + 1, sender)
        assert store.newest() == newest
        failed = f"the broadcast of version {step + 1} failed" in caplog.text
        assert failed == (moment == "before a file")
        version = PolicyVersion("run", step + 1, store.branch)
        assert (receiver.take(version) is None) == failed
        # The same step, with other weights: what came of the first is not taken for it.
        with torch.no_grad():
            model.embedding.weight.add_(1.0)
        registered(receiver, store, sender, model, step + 1)
    finally:
        sender.close()
        receiver.stop()


def publish_and_die(folder: Path) -> None:
    """A trainer that is killed after it has sent the first file of a version."""
    torch.set_num_threads(1)
    store, sender, model = WeightStore(folder / "weights", "run"), Sender(folder / "broadcast.json"), make_model()
    write_small_files(setattr)
    for step in itertools.count():
        publish(store, model, step, sender)
        if (folder / "received").exists():
            break
        time.sleep(0.05)
    announce, num_files = collective.send_header, 0

    def count(group: object, header: tuple[str, int] | None) -> None:
        nonlocal num_files
        num_files += 1
        if num_files >= 2:  # in either stream
            (folder / "sent").touch()
            wait_until((folder / "staged").exists)
            os.kill(os.getpid(), signal.SIGKILL)
        announce(group, header)

    collective.send_header = count
    publish(store, model, step + 1, sender)


def test_a_trainer_killed_in_a_broadcast_leaves_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, store = tmp_path / "broadcast.json", WeightStore(tmp_path / "weights", "run", keep=999)
    staged = files_staged(monkeypatch)
    receiver, trainer = receiving(address), start(publish_and_die, tmp_path)
    try:
        wait_until(lambda: bool(staged))
        (tmp_path / "received").touch()
        wait_until((tmp_path / "sent").exists)
        newest = store.newest()
        assert newest is not None
        wait_until(lambda: len(staged) % len(list(newest[1].glob("*.safetensors"))) == 1)
        (tmp_path / "staged").touch()
        trainer.join(LIMIT_S)
        assert trainer.exitcode == -signal.SIGKILL
        (torn,) = store.folder.glob(".step-*.partial")
        step, branch = torn.name.removeprefix(".step-").removesuffix(".partial").split("-")
        assert receiver.take(PolicyVersion("run", int(step), branch)) is None
        assert newest[0].step == int(step) - 1
        assert store.newest() == newest
        sender = Sender(address)
        registered(receiver, store, sender, make_model(), int(step))
        sender.close()
        assert not torn.exists()
    finally:
        trainer.kill()
        trainer.join()
        receiver.stop()


@pytest.mark.usefixtures("many_files")
def test_each_rank_sends_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, model, barrier = tmp_path / "broadcast.json", make_model(), threading.Barrier(2)
    store, passed = WeightStore(tmp_path / "weights", "run"), [None, None]
    receiver, num_steps = receiving(address), 100

    def exchange(value: Any, rank: int) -> list[Any]:
        passed[rank] = value
        barrier.wait(LIMIT_S)
        found = passed.copy()
        barrier.wait(LIMIT_S)
        return found

    def publish_part(rank: int) -> int:
        exchange_of = partial(exchange, rank=rank)
        sender, own = Sender(address, rank, exchange_of), WeightStore(store.folder, "run")
        own.branch = store.branch
        tensors = dict(itertools.islice(public_tensors(model).items(), rank, None, 2))
        for step in range(num_steps):
            folder = own.publish(model, step, Share(rank, tensors, exchange_of), sender.send)
            arrival = receiver.take(PolicyVersion("run", step, store.branch)) if rank == 0 else None
            if exchange_of(arrival is not None)[0]:
                if rank == 0:
                    assert is_whole(arrival, folder)
                    assert {name[:15] for name in staged} == {"model-rank00000", "model-rank00001"}
                break
        sender.close()
        return step

    staged = files_staged(monkeypatch)
    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(publish_part, range(2))
        assert first == second < num_steps - 1
    finally:
        receiver.stop()


def test_an_adapter_is_broadcast(tmp_path: Path) -> None:
    address, lora, model = tmp_path / "broadcast.json", LoRAConfig(rank=2, targets=("q_proj",)), make_model()
    save_model(model, tmp_path / "base")
    attach(model, lora, tmp_path / "base")
    store, sender, receiver = WeightStore(tmp_path / "weights", "run", keep=999), Sender(address), receiving(address)
    try:
        step = registered(receiver, store, sender, model, 1)
        core = make_core(store.publish(model, step + 1), brought := Brought())
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(".b"):
                    weight.fill_(0.5)
        version, folder = publish(store, model, step + 2, sender)
        brought.arrival = receiver.take(version)
    finally:
        sender.close()
        receiver.stop()
    assert brought.arrival is not None
    assert list(brought.arrival.images) == [ADAPTER_FILE]
    expected = load_model(folder).state_dict()
    # What came is enough, and is compared with the digest.
    (folder / ADAPTER_FILE).unlink()
    core.load(folder, version)
    assert all(torch.equal(weight, expected[name]) for name, weight in core.model.state_dict().items())
    brought.arrival.images[ADAPTER_FILE][-1] += 1
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        core.load(folder, PolicyVersion("run", step + 3))


class Brought:
    """Brings what a test has put here."""

    arrival: Arrival | None = None

    def start(self, model: Transformer) -> None: ...

    def take(self, version: PolicyVersion) -> Arrival | None:
        return self.arrival


def make_core(folder: Path, brought: Brought) -> Core:
    return Core(load_model(folder), RolloutConfig(num_blocks=8), PolicyVersion("run", 1), broadcasts=brought)


def test_a_changed_file_is_refused_and_the_old_version_stays(tmp_path: Path) -> None:
    store, model = WeightStore(tmp_path / "weights", "run"), make_model()
    first = store.publish(model, 1)
    with torch.no_grad():
        model.norm.weight.fill_(2.0)
    second = store.publish(model, 2)
    path = second / "model.safetensors"
    whole = path.read_bytes()
    core = make_core(first, brought := Brought())
    changed = whole[:-4] + b"\x00\x00\x01\x3f"
    for torn in (whole[: len(whole) // 2], changed):
        path.write_bytes(torn)
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*(copy|Copy|fetch)"):
            core.load(second, PolicyVersion("run", 2))
        assert core.version.step == 1
        assert (core.model.norm.weight == 1).all()
    # What came by broadcast needs no values of the folder.
    brought.arrival = arrival_of(core.model, [(path.name, whole)])
    core.load(second, PolicyVersion("run", 2))
    assert (core.model.norm.weight == 2).all()


@pytest.mark.usefixtures("many_files")
def test_what_came_is_used_only_if_it_has_each_digest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, model = WeightStore(tmp_path / "weights", "run"), make_model()
    core = make_core(store.publish(model, 0), brought := Brought())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    folder = store.publish(model, 1)
    whole = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    name, *others = sorted(whole)
    expected, changed = model.state_dict(), whole[name][:-1] + b"\x01"
    # Its first tensor fits, and is copied before the second is found not to.
    misshapen = save({"lm_head.weight": expected["head.weight"] + 1, "model.norm.weight": torch.ones(3)})
    rest = [(other, whole[other]) for other in others]
    cases = {
        "changed": [(name, changed), *rest],
        "not there": rest,
        "of other tensors": [(name, whole[name].replace(b"model.", b"mudel.")), *rest],
        "short": [(name, whole[name][:1000]), *rest],
        "not a file": [(name, b"\xff" * 1000), *rest],
        "superfluous": [*whole.items(), ("model-extra.safetensors", whole[name])],
        "superfluous and misshapen": [*whole.items(), ("model-extra.safetensors", misshapen)],
        "twice": [*whole.items(), (name, changed), (name, whole[name])],
    }
    for step, (case, files) in enumerate(cases.items(), 1):
        with torch.no_grad():
            core.model.norm.weight.zero_()
        caplog.clear()
        brought.arrival = arrival_of(core.model, files)
        core.load(folder, PolicyVersion("run", step))
        state = core.model.state_dict()
        assert all(torch.equal(state[name], expected[name]) for name in expected), case
        assert "the broadcast brought other files than the manifest states" in caplog.text, case


def arrival_of(model: Transformer, files: Iterable[tuple[str, bytes]]) -> Arrival:
    arrival = Arrival(model)
    for name, content in files:
        arrival.add(name, torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return arrival
