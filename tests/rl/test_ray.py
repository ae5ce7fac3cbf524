"""`m2forge rl` on a Ray cluster of three nodes: what nodes and processes do when they are killed, and bad input."""

import asyncio
import contextlib
import importlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from m2forge import cli
from m2forge.cluster.config import ClusterConfig, RayConfig
from m2forge.cluster.launcher import Role
from m2forge.cluster.process_record import RoleHistory, RoleUrl, read_histories
from m2forge.cluster.ray_launcher import Node, RayLauncher, RayPlan, connect, free_on_nodes
from m2forge.config import build
from m2forge.errors import ConfigError
from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.observe.metrics import read_metrics
from m2forge.pool.pool import Pool
from m2forge.rl import preflight
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import read_results
from m2forge.rl.layout import Layout, gateway_names, sampler_names
from m2forge.sandbox.image import ImageStore
from m2forge.sandbox.shared_images import SharedImages
from m2forge.weights.collective import Meeting
from tests.pool.postgres import Server, find_programs, fresh_database, restartable_server
from tests.pool.test_processes import check
from tests.rl.ray_nodes import HEAD, NUM_CPUS, Nodes, ray_nodes
from tests.rl.ring import command_of, processes_of, started
from tests.rl.scene import make_config, make_model
from tests.rl.test_faults import NO_POSTGRES, judge
from tests.rl.test_hosts import HOSTS, LIMIT_S, Scene, check_rewards, make_scene, pids_of
from tests.rl.test_loop import make_run, trained_steps
from tests.sandbox.places import require

RESUME_S = 60.0
"""Within this time after a fault training takes another step, in half of the cases at least."""
KINDS = ("raylet", "trainer", "sampler-0", "sampler-1", "gateway-0", "gateway-1", *HOSTS, "loop", "database")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as started_nodes:
        yield started_nodes


def on_ray(scene: Scene, nodes: Nodes, **fields: object) -> None:
    """Have the scene's run start on the cluster."""
    cluster = scene.config.cluster.model_dump() | {"launcher": "ray", "ray": {"address": nodes.address, "cpus": 0.5}}
    values = scene.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    values["agent"]["kind"] = scene.config.agent.kind
    values["train"]["machine"] = values["engine"] = {"device": "cpu"}
    scene.config = build(RLConfig, values | {"cluster": cluster} | fields, origin="test")
    scene.command = command_of(scene.config, scene.layout.run_dir.parent, "tests.rl.hosts_run")


def wait_for_attempts(scene: Scene, loop: subprocess.Popen[bytes]) -> None:
    def is_so() -> bool:
        assert loop.poll() is None, f"the run has ended: {scene.log.read_text()[-2000:]}"
        return {*scene.in_flight().values()} == {*HOSTS}

    scene.wait("attempts on both hosts", is_so)


def wait_for_starts(scene: Scene, before: dict[str, int]) -> None:
    """Wait until roles have been started more often than `before`."""
    scene.wait("lost roles start", lambda: all(scene.history(role).num_starts > num for role, num in before.items()))


def wait_until_gone(run_dir: Path) -> None:
    """Ray ends actors a moment after their driver."""
    until_s = time.monotonic() + LIMIT_S
    while left := processes_of(run_dir):
        assert time.monotonic() < until_s, f"a process outlived its run: {left}"
        time.sleep(0.1)


def test_roles_of_a_dead_node_move_and_nothing_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    scene = make_scene(tmp_path, gateways=2, samplers=2)
    on_ray(scene, nodes)
    scene.held.touch()
    with scene.pool:
        with started(scene.command, scene.log) as loop:
            wait_for_attempts(scene, loop)
            servers = [*sampler_names(scene.config.cluster), *gateway_names(scene.config.cluster)]
            roles = {role: scene.history(role).node for role in ("trainer", *servers, *HOSTS)}
            assert roles["host-0"] != roles["host-1"], "hosts are spread"
            (victim, *_) = (node for node in nodes.raylets if node in {roles["host-0"], roles["host-1"]})
            moved = [role for role, node in roles.items() if node == victim]
            starts = {role: scene.history(role).num_starts for role in roles}
            before = scene.in_flight()
            nodes.kill_raylet(victim)
            wait_for_starts(scene, {role: starts[role] for role in moved})
            assert victim not in {scene.history(role).node for role in roles}
            assert all(scene.history(role).deaths for role in moved)
            if not {*servers} & {*moved}:
                others = {name for name, host in before.items() if host not in moved}
                assert others <= scene.pool.running().keys(), "attempts of the living host were lost"
            wait_for_attempts(scene, loop)
            scene.held.unlink()
            assert loop.wait(LIMIT_S) == 0, scene.log.read_text()[-3000:]
        wait_until_gone(scene.layout.run_dir)
        judge(scene.pool, scene.config)
        check(scene.pool)
        check_rewards(scene, set())
    assert [result.step for result in read_results(scene.layout.evaluations)] == [0, scene.config.num_steps]
    assert not journal_ids(scene.layout.journal), "what is recorded elsewhere is deleted"
    nodes.add()


def test_a_trainer_has_ranks_on_two_nodes_and_outlives_one(nodes: Nodes, tmp_path: Path) -> None:
    cluster = {"launcher": "ray", "ray": {"address": nodes.address, "cpus": 0.5, "trainer_nodes": 2}}
    config = make_run(make_model(tmp_path / "scene"), num_steps=2)
    machine = {"num_threads": 1, "device": "cpu", "mesh": {"replicate": 2}}
    changes = {"cluster": cluster, "train": {"checkpoint": {"every_steps": 1}, "machine": machine}}
    changes |= {"engine": {"device": "cpu"}, "eval": {"num_tasks": 0}}
    values = config.model_dump(mode="json", exclude_unset=True, exclude_none=True) | changes
    values["agent"]["kind"] = config.agent.kind
    config, layout = build(RLConfig, values, origin="test"), Layout(tmp_path / "run")
    log = tmp_path / "log"

    def history(role: str) -> RoleHistory:
        return next(found for found in read_histories(layout.processes) if found.name == role)

    with started(command_of(config, tmp_path), log) as loop:
        until_s = time.monotonic() + LIMIT_S
        while (newest := layout.weight_store(config).newest()) is None or not newest[0].step:
            assert loop.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until_s, log.read_text()[-3000:]
            time.sleep(0.1)
        places = [history(role).node for role in ("trainer", "trainer-node-1")]
        assert len({*places}) == 2
        # The head stays: without it there is no cluster.
        (role, *_) = (role for role, place in zip(("trainer", "trainer-node-1"), places, strict=True) if place != HEAD)
        nodes.kill_raylet(history(role).node)
        assert loop.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    wait_until_gone(layout.run_dir)
    assert history("trainer").num_starts == 2
    assert trained_steps(config, layout.run_dir) == sorted([1, 2] * config.curriculum.batch_groups)
    assert [step.step for step in read_metrics(layout.run_dir / "metrics.jsonl")] == [1, 2]
    nodes.add()


@pytest.mark.slow
def test_a_broadcast_reaches_samplers_on_the_nodes(nodes: Nodes, tmp_path: Path) -> None:
    cluster = {"launcher": "ray", "samplers": 2, "ray": {"address": nodes.address, "cpus": 0.5}}
    config = make_run(make_model(tmp_path / "scene"), num_steps=4)
    values = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    values |= {"cluster": cluster, "weights": {"sync": "collective"}, "eval": {"num_tasks": 0}}
    values["train"]["machine"] = values["engine"] = {"device": "cpu"}
    values["agent"]["kind"] = config.agent.kind
    config, layout = build(RLConfig, values, origin="test"), Layout(tmp_path / "run")
    log = tmp_path / "log"
    with started(command_of(config, tmp_path), log) as loop:
        until_s = time.monotonic() + LIMIT_S
        while not layout.broadcast.exists():
            assert loop.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until_s, log.read_text()[-3000:]
            time.sleep(0.05)
        meeting = Meeting.read(layout.broadcast)
        assert loop.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    wait_until_gone(layout.run_dir)
    places = {found.name: found.node for found in read_histories(layout.processes)}
    assert len({places[name] for name in ("trainer", "sampler-0", "sampler-1")}) > 1
    urls = [RoleUrl(layout.processes, name) for name in ("sampler-0", "sampler-1")]
    # All nodes of this cluster have the one address of this machine.
    assert {urlsplit(url()).hostname for url in urls} == {meeting.host}
    said = " ".join((layout.log / "trainer.log").read_text().split())
    assert re.search(r"broadcast version [1-4] to [12] samplers", said), said[-3000:]
    assert trained_steps(config, layout.run_dir) == sorted([1, 2, 3, 4] * config.curriculum.batch_groups)


def test_hosts_fetch_images_from_the_folder_of_the_run(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("namespace")
    files = tmp_path / "files" / "opt" / "agent"
    files.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("shell_agent.py"), files / "agent.py")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ImageStore().build("tools", [str(tmp_path / "files")])
    scene = make_scene(tmp_path, agent_hosts=1, num_steps=1)
    agent = scene.config.agent.model_dump(mode="json", exclude_unset=True, exclude_none=True) | {
        "kind": "command",
        "command": [sys.executable, "/opt/agent/agent.py", "{model}", "{instruction}"],
        "sandbox": {"backend": "namespace", "layers": ["tools"], "timeout_s": 600.0},
    }
    on_ray(scene, nodes, agent=agent)
    with scene.pool:
        with started(scene.command, scene.log) as loop:
            assert loop.wait(LIMIT_S) == 0, scene.log.read_text()[-3000:]
        wait_until_gone(scene.layout.run_dir)
        rows = [row for row in scene.rows() if row.reward is not None]
        assert len(rows) >= scene.config.curriculum.batch_groups * scene.config.group_size
    assert SharedImages(scene.layout.images).names == ["tools"]
    (layer,) = scene.layout.images.joinpath("layers").iterdir()
    assert (nodes.cache / "m2forge" / "images" / "layers" / layer.name / "opt" / "agent" / "agent.py").is_file()


@pytest.mark.long
def test_a_killed_keeper_is_replaced_and_sigterm_ends_all(nodes: Nodes, tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    on_ray(scene, nodes)
    scene.held.touch()
    with scene.pool, started(scene.command, scene.log) as loop:
        wait_for_attempts(scene, loop)
        starts = {role: scene.history(role).num_starts for role in HOSTS}
        os.kill(pids_of(scene.layout.run_dir)["keeper"], signal.SIGKILL)
        wait_for_starts(scene, starts)
        wait_for_attempts(scene, loop)
        loop.terminate()
        check_interrupted(scene, loop)


@pytest.mark.long
def test_ctrl_c_ends_what_runs_on_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    on_ray(scene, nodes)
    scene.held.touch()
    with scene.pool, started(scene.command, scene.log, group=0) as loop:
        wait_for_attempts(scene, loop)
        os.killpg(loop.pid, signal.SIGINT)
        check_interrupted(scene, loop)


def check_interrupted(scene: Scene, loop: subprocess.Popen[bytes]) -> None:
    """All of the run ends, and the same command goes on with it."""
    assert loop.wait(LIMIT_S) == 130, scene.log.read_text()[-3000:]
    wait_until_gone(scene.layout.run_dir)
    assert "m2forge: interrupted" in scene.log.read_text()
    assert "Traceback" not in scene.log.read_text()
    check(scene.pool)
    assert not [row for row in scene.rows() if row.reward is not None], "an attempt that was killed has a reward"
    scene.held.unlink()
    with started(scene.command, scene.log) as resumed:
        assert resumed.wait(LIMIT_S) == 0, scene.log.read_text()[-3000:]
    wait_until_gone(scene.layout.run_dir)
    judge(scene.pool, scene.config)
    check_rewards(scene, set())


def step_of(scene: Scene) -> int:
    newest = scene.layout.weight_store(scene.config).newest()
    return 0 if newest is None else newest[0].step


def strike(
    kind: str,
    run_dir: Path,
    nodes: Nodes,
    database: Server,
    pool: Pool,
    loop: subprocess.Popen[bytes],
    rng: random.Random,
) -> bool:
    """Kill a process of the run, a node or the database; returns whether it was there to be killed. `pool`: the test's,
    which then connects anew."""
    if kind == "raylet":
        nodes.kill_raylet(rng.choice([*nodes.raylets]))
        nodes.add()
    elif kind == "loop":
        loop.kill()
        loop.wait()
    elif kind == "database":
        database.stop(signal.SIGKILL)
        database.start_over()
        pool.database.close()
    else:
        with contextlib.suppress(KeyError, ProcessLookupError):  # it is starting
            os.kill(pids_of(run_dir)[kind], signal.SIGKILL)
            return True
        return False
    return True


def draw_kinds(num: int, rng: random.Random) -> list[str]:
    """As many of each as possible, in a random order."""
    decks = (rng.sample(KINDS, len(KINDS)) for _ in range(0, num, len(KINDS)))
    return [kind for deck in decks for kind in deck][:num]


@pytest.mark.parametrize("num_faults", [5, pytest.param(50, marks=pytest.mark.long)])
def test_random_deaths_lose_and_repeat_nothing(nodes: Nodes, tmp_path: Path, num_faults: int) -> None:
    if find_programs() is None:
        pytest.skip(NO_POSTGRES)
    rng = random.Random(num_faults)
    scene = make_scene(tmp_path, gateways=2, samplers=2)
    kinds, resumed_s = draw_kinds(num_faults, rng), list[float]()
    with restartable_server(syncs=False) as database, contextlib.ExitStack() as stack:
        url = stack.enter_context(fresh_database(database.url, "ring"))
        scene.pool.close()
        # Some take a step while they strike. The last look needs all that was trained.
        pool = {**scene.config.pool.model_dump(exclude_unset=True), "url": url, "retention": {"versions": 1 << 20}}
        on_ray(scene, nodes, num_steps=2 * num_faults, pool=pool)
        scene.pool = stack.enter_context(Pool(scene.config.pool, scene.pool.vocab_size))
        while kinds:
            with started(scene.command, scene.log) as loop:
                while kinds and loop.poll() is None:
                    step, began_s = step_of(scene), time.monotonic()
                    scene.wait("training takes a step", lambda step=step: step_of(scene) > step)  # type: ignore[misc]
                    resumed_s.append(time.monotonic() - began_s)
                    if strike(kinds[-1], scene.layout.run_dir, nodes, database, scene.pool, loop, rng):
                        kinds.pop()
                if not kinds and loop.poll() is None:
                    assert loop.wait(LIMIT_S) == 0, scene.log.read_text()[-3000:]
        with started(scene.command, scene.log) as loop:
            assert loop.wait(LIMIT_S) == 0, scene.log.read_text()[-3000:]
        wait_until_gone(scene.layout.run_dir)
        judge(scene.pool, scene.config)
        check_rewards(scene, set())
    print("training took its next step after (s):", " ".join(f"{each:.0f}" for each in sorted(resumed_s)))
    # On a busy machine a single one says little.
    assert statistics.median(resumed_s) < RESUME_S


# -- bad input ---------------------------------------------------------------------------------------------------------


def refuse(
    folder: Path,
    address: str,
    capsys: pytest.CaptureFixture[str],
    runs: Path | None = None,
    engine: object = None,
    **ray: object,
) -> str:
    """What the command says of a run that it refuses, which leaves nothing behind."""
    cluster = {"launcher": "ray", "agent_hosts": 1, "ray": {"address": address, **ray}}
    config = make_config(folder / "model", cluster=cluster, engine=engine or {})
    command_of(config, folder)
    before = {*folder.rglob("*")}
    assert cli.main(["rl", str(folder / "config.toml"), "--runs", str(runs or folder / "new" / "runs")]) == 2
    assert {*folder.rglob("*")} == before
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("m2forge: error: ")]
    return line


def test_no_ray_and_no_cluster_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no Ray cluster at 127.0.0.1:1 (" in (said := refuse(tmp_path, "127.0.0.1:1", capsys))
    assert "ray start --head" in said
    monkeypatch.setitem(sys.modules, "ray", None)
    assert 'pip install "m2forge[ray]"' in refuse(tmp_path, "auto", capsys)


def test_what_the_nodes_do_not_have_is_named(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refuse(tmp_path, nodes.address, capsys, cpus=NUM_CPUS + 1)
    assert f"trainer: {NUM_CPUS + 1} CPU" in said
    assert f"{HEAD}: 1 CPU" in said
    said = refuse(tmp_path, nodes.address, capsys, cpus=0.5, sampler_gpus=1, gpu="H200")
    assert "no room for sampler" in said
    assert "sampler: 0.5 CPU, 1 GPU, H200" in said
    assert "A100" in said
    descriptor = os.open(tmp_path, os.O_RDONLY)
    # Each process has other files under this path, as machines that share no file system have.
    said = refuse(tmp_path, nodes.address, capsys, Path(f"/proc/self/fd/{descriptor}/new"), cpus=0.5)
    os.close(descriptor)
    assert "put runs on a shared file system" in said
    assert "node n" in said
    said = refuse(tmp_path, nodes.address, capsys, cpus=0.5)
    assert f"the trainer would run on a CPU, and node {HEAD} of the Ray cluster has 1 GPU" in said
    monkeypatch.setenv("M2FORGE_KEY", "key")
    server = {"server": {"kind": "vllm", "url": "http://127.0.0.1:1", "key_env": "M2FORGE_KEY"}}
    said = refuse(tmp_path, nodes.address, capsys, engine=server, cpus=0.5)
    assert "node n" in said
    assert "engine.server.key_env: the environment variable M2FORGE_KEY is not set there; set it where" in said
    monkeypatch.setattr("m2forge.cluster.ray_launcher.code_digest", lambda: "other")
    said = refuse(tmp_path, nodes.address, capsys, cpus=0.5)
    assert "node n" in said
    assert "install the same version on all nodes" in said


def test_gpus_of_a_node_that_are_too_small_are_named(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path)
    node = f"node {HEAD} of the Ray cluster: "
    said = refuse(tmp_path, nodes.address, capsys, engine={"device": "cpu"}, cpus=0.5, trainer_gpus=1)
    assert f"{node}Ray gives the trainer 1 GPUs there, and torch sees 0" in said
    # It runs on the node, in a process to which Ray has given the GPU.
    monkeypatch.setattr(preflight, "free_gpu_bytes", lambda: [len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))])
    said = refuse(tmp_path, nodes.address, capsys, engine={"device": "cpu"}, cpus=0.5, trainer_gpus=1)
    assert f"{node}the policy: a rank needs " in said
    assert "and 0.0 GB are free; " in said


def test_gpus_of_a_node_are_asked_for_a_while(nodes: Nodes) -> None:
    def wait() -> list[int]:
        time.sleep(LIMIT_S)
        return []

    config = RayConfig(address=nodes.address, start_s=60.0)
    connect(config.address)
    (head,) = [node for node in map(Node.of, importlib.import_module("ray").nodes()) if node.name == HEAD]
    busy = RayConfig(address=nodes.address, start_s=2.0)
    began_s = time.monotonic()
    ((_, answer),) = free_on_nodes(busy, [head], 1, wait)
    assert time.monotonic() - began_s < 20
    assert answer == (
        "1 of its GPUs did not become free within cluster.ray.start_s, 2 s; end other jobs there, or use another node"
    )
    # The GPU is free again, and an error there is an answer.
    ((_, answer),) = free_on_nodes(config, [head], 1, break_gpu)
    assert answer == "the GPUs of this machine cannot be used"


def break_gpu() -> list[int]:
    raise ConfigError("the GPUs of this machine cannot be used")


def test_a_busy_cluster_is_named_after_a_while(nodes: Nodes, tmp_path: Path) -> None:
    config = RayConfig(address=nodes.address, cpus=NUM_CPUS - 0.5, start_s=60.0)
    first = RayLauncher(RayPlan.make(config, {"one": 0, "two": 0}, tmp_path), tmp_path, tmp_path)
    config = config.model_copy(update={"start_s": 1.0})
    second = RayLauncher(RayPlan.make(config, {"three": 0}, tmp_path), tmp_path, tmp_path)

    async def launch() -> None:
        await first.launch(Role("one", ("tests.cluster.fatal",)))
        try:
            await second.launch(Role("three", ("tests.cluster.fatal",)))
        finally:
            await first.close()

    with pytest.raises(ConfigError, match=r"no room for three.*requests three: 3.5 CPU.*Free within 1 s: "):
        asyncio.run(launch())


def test_a_table_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster\.ray has no effect"):
        build(ClusterConfig, {"ray": {"cpus": 2.0}}, origin="test")
    with pytest.raises(ValueError, match="requests no GPU"):
        build(ClusterConfig, {"launcher": "ray", "ray": {"gpu": "H200"}}, origin="test")
