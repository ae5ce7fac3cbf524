"""A leader and a follower of a trainer on two nodes, here two threads: their ranks start and end together."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from m2forge.cluster.launcher import FATAL_STATUS
from m2forge.config import build
from m2forge.errors import TrainingError
from m2forge.listener import address, listen
from m2forge.rl.config import RLConfig
from m2forge.rl.ranks import LOST_STATUS, Nodes, Peer, follow, interface_of, lead, log_path
from tests.rl.scene import make_config, make_model

KEY = "key"
LIMIT_S = 60.0
RANK = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("2", "0")
runs = len(list(folder.glob(f"started-{rank}-*")))
print("because", file=sys.stderr, flush=True)
(folder / f"started-{rank}-{runs}").write_text(os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"])
while not (folder / f"end-{rank}-{runs}").exists():
    time.sleep(0.02)
sys.exit(int((folder / f"end-{rank}-{runs}").read_text()))
"""


class Scene:
    """The programs of two ranks, which end as the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.listener = folder, listen("127.0.0.1", 0)
        self.nodes = Nodes(2, 1, ("rank_program", str(folder)), folder / "log")
        self.follower = threading.Thread(target=self.follow, daemon=True)

    def follow(self, key: str = KEY) -> None:
        follow(self.nodes, 1, lambda: address(self.listener), key)

    def lead(self) -> "queue.Queue[int | Exception]":
        ended: queue.Queue[int | Exception] = queue.Queue()

        def work() -> None:
            try:
                ended.put(lead(self.nodes, self.listener, KEY))
            except TrainingError as error:
                ended.put(error)

        threading.Thread(target=work, daemon=True).start()
        return ended

    def wait(self, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def wait_for_ranks(self, run: int) -> None:
        paths = [self.folder / f"started-{rank}-{run}" for rank in (0, 1)]
        self.wait(lambda: all(path.exists() and path.read_text() for path in paths))
        assert len({path.read_text() for path in paths}) == 1, "both know the same address of rank 0"

    def end(self, rank: int, run: int, status: int) -> None:
        made = self.folder / "made"
        made.write_text(str(status))
        made.rename(self.folder / f"end-{rank}-{run}")


def lines_of_ranks(capfd: pytest.CaptureFixture[str]) -> int:
    """Beside them the follower warns that it has lost its leader."""
    return capfd.readouterr().err.splitlines().count("because")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    (tmp_path / "rank_program.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    made = Scene(tmp_path)
    with made.listener:
        yield made


def test_a_failed_rank_ends_all_and_the_next_leader_runs(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    scene.follower.start()
    for run, rank in enumerate((1, 0)):
        leader = scene.lead()
        scene.wait_for_ranks(run)
        scene.end(rank, run, 3)
        assert leader.get(timeout=LIMIT_S) == 3
    leader = scene.lead()
    scene.wait_for_ranks(2)
    scene.end(1, 2, 0)
    assert scene.follower.is_alive(), "it waits for the other's ranks"
    scene.end(0, 2, 0)
    assert leader.get(timeout=LIMIT_S) == 0
    scene.follower.join(LIMIT_S)
    assert not scene.follower.is_alive()
    # The ranks of the runs before were killed: nothing has told them to end.
    assert len(list(scene.folder.glob("end-*"))) == 4
    assert log_path(scene.folder / "log", 1).read_text() == "because\n" * 3
    assert lines_of_ranks(capfd) == 3, "rank 0 writes where its leader does"


def test_a_fatal_error_of_another_node_is_the_last_line(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    scene.follower.start()
    leader = scene.lead()
    scene.wait_for_ranks(0)
    scene.end(1, 0, FATAL_STATUS)
    assert leader.get(timeout=LIMIT_S) == FATAL_STATUS
    # Rank 0's, the follower's own, and what the leader passes on.
    assert lines_of_ranks(capfd) == 3


def test_a_follower_that_starts_again_ends_the_others(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.follower.start()
    leader = scene.lead()
    scene.wait_for_ranks(0)
    again = threading.Thread(target=scene.follow, daemon=True)
    again.start()
    assert leader.get(timeout=LIMIT_S) == LOST_STATUS
    assert "the trainer's node 1 has started again" in caplog.text


def test_a_node_that_is_lost_is_named(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    leader = scene.lead()
    with socket.create_connection(scene.listener.getsockname()) as connection:
        connection.sendall(b'{"key": "key", "index": 1, "num_ranks": 1}\n')
        assert b"port" in connection.recv(100)
    assert leader.get(timeout=LIMIT_S) == LOST_STATUS
    assert "node 1 of the trainer is lost" in caplog.text


def test_a_dripping_message_is_not_waited_for(scene: Scene) -> None:
    theirs = socket.create_connection(scene.listener.getsockname())
    ours, _ = scene.listener.accept()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs.send(b"x")
                time.sleep(0.02)

    threading.Thread(target=drip, daemon=True).start()
    with theirs, ours:
        assert Peer(ours).read(0.2) is None


def test_a_connection_without_the_key_is_no_follower(scene: Scene) -> None:
    leader = scene.lead()
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b'{"key": "other", "index": 1, "num_ranks": 1}\n', b""):
        with socket.create_connection(scene.listener.getsockname()) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    assert leader.empty()
    scene.follower.start()
    scene.wait_for_ranks(0)
    for rank in (0, 1):
        scene.end(rank, 0, 0)
    assert leader.get(timeout=LIMIT_S) == 0


def test_nodes_with_other_numbers_of_gpus_are_refused(scene: Scene) -> None:
    leader = scene.lead()
    other = Nodes(2, 4, scene.nodes.command, scene.nodes.log_folder)
    threading.Thread(target=follow, args=(other, 1, lambda: address(scene.listener), KEY), daemon=True).start()
    assert "counts 1 GPUs on the first node of the trainer and 4 on node 1" in str(leader.get(timeout=LIMIT_S))


def test_the_interface_of_an_address_is_known() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert interface_of("::1") is None


@pytest.mark.parametrize(("mesh", "num_nodes"), [({}, 2), ({"replicate": 2, "shard": 2}, 3)])
def test_ranks_that_nodes_cannot_share_are_refused(tmp_path: Path, mesh: dict[str, int], num_nodes: int) -> None:
    cluster = {"launcher": "ray", "ray": {"trainer_nodes": num_nodes}}
    values = make_config(make_model(tmp_path), train={"machine": {"mesh": mesh}})
    fields = values.model_dump(mode="json", exclude_unset=True, exclude_none=True) | {"cluster": cluster}
    fields["agent"]["kind"] = values.agent.kind
    with pytest.raises(ValueError, match=rf"cluster.ray.trainer_nodes: {num_nodes} nodes cannot have as many"):
        build(RLConfig, fields, origin="test")
