"""Sampler and gateway of a run, as the loop starts them: their keys are in no place that an agent can read."""

import asyncio
import io
import logging
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from m2forge.agents.attempt import Overrides
from m2forge.cluster.local import LocalLauncher
from m2forge.config import write_resolved
from m2forge.errors import CheckpointError
from m2forge.model.checkpoint import load_model
from m2forge.model.convert import find_companions
from m2forge.model.preset import preset
from m2forge.rl.child_main import run_gateway, run_sampler, visible_gpu
from m2forge.rl.config import RLConfig
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.rl.layout import Layout
from m2forge.rl.servers import Servers, make_servers, share_run_images
from m2forge.rollout.config import ServeConfig
from m2forge.sandbox.image import ImageStore
from m2forge.sandbox.shared_images import VARIABLE, SharedImages
from m2forge.tasks.agent import Chain
from m2forge.tasks.folders.task_image import read_dockerfile
from m2forge.text.format import ChatFormat
from m2forge.train.run_dir import CONFIG_FILE
from tests.rl.ring import ROOT, processes_of, running
from tests.rl.scene import make_config, make_model
from tests.text.own_template import R1, tokenizer_of

TIMEOUT_S = 60.0
GPUS = "CUDA_VISIBLE_DEVICES"


def test_keys_travel_by_pipe_and_every_server_asks_for_its_own(tmp_path: Path) -> None:
    model = make_model(tmp_path / "scene")
    config, layout = make_config(model), Layout(tmp_path / "run")
    layout.run_dir.mkdir()
    write_resolved(config, layout.run_dir / CONFIG_FILE)
    layout.weight_store(config, find_companions(model)).publish(load_model(model), 0)
    launcher = LocalLauncher(layout.log, layout.processes)
    servers = asyncio.run(make_servers(launcher, layout, config))
    (gateway,) = servers.gateways

    async def run() -> None:
        keeping = [asyncio.create_task(server.child.supervise()) for server in servers.all]
        try:
            async with GatewayAdmin(gateway.url, gateway.key) as admin:
                await admin.wait_until_up()
                await admin.open("episode", Chain().draw(1, 0), "group", Overrides())
            await check_doors(servers)
            await check_version(servers, layout, config)
            check_no_key_is_visible(servers, layout.run_dir)
        finally:
            await asyncio.gather(*(server.child.stop() for server in servers.all))
            await asyncio.gather(*keeping)
            await launcher.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    assert not processes_of(layout.run_dir)
    assert not keys_in(servers, *(path.read_bytes() for path in layout.run_dir.rglob("*") if path.is_file()))


def test_samplers_share_the_gpus_from_the_last_one_on() -> None:
    assert [visible_gpu(index, {}, 4) for index in range(5)] == [{GPUS: name} for name in "32103"]
    assert visible_gpu(1, {GPUS: "GPU-a, GPU-b,GPU-c"}, 3) == {GPUS: "GPU-b"}
    assert visible_gpu(1, {GPUS: "2"}, 1) == visible_gpu(1, {}, 0) == {}


def test_the_gateway_listens_where_the_run_says(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
    launcher = LocalLauncher(tmp_path)
    config = make_config(tmp_path, gateway={"host": "127.0.0.2", "port": port}, cluster={"gateways": 2})
    servers = asyncio.run(make_servers(launcher, Layout(tmp_path), config))
    assert [gateway.url for gateway in servers.gateways] == [f"http://127.0.0.2:{each}" for each in (port, port + 1)]
    assert servers.samplers[0].url.startswith("http://127.0.0.1:")
    asyncio.run(launcher.close())


async def check_doors(servers: Servers) -> None:
    sampler, gateway = servers.all
    async with httpx2.AsyncClient(base_url=sampler.url, timeout=20.0) as client:
        for key, status in ((sampler.key, 200), (gateway.key, 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}".strip()}
            assert (await client.get("/health", headers=headers)).status_code == status


async def check_version(servers: Servers, layout: Layout, config: RLConfig) -> None:
    """A sampler that starts serves the newest published version, by its branch too."""
    newest = layout.weight_store(config).newest()
    assert newest is not None
    assert newest[0].branch
    (sampler,) = servers.samplers
    headers = {"Authorization": f"Bearer {sampler.key}"}
    async with httpx2.AsyncClient(base_url=sampler.url, timeout=20.0, headers=headers) as client:
        assert (await client.get("/health")).json()["version"] == newest[0].to_dict()


def check_no_key_is_visible(servers: Servers, run_dir: Path) -> None:
    pids = [pid for pid, words in running() if str(run_dir) in words]
    assert len(pids) == 2
    for pid in pids:
        shown = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
        assert all(shown)
        assert not keys_in(servers, *shown)


def keys_in(servers: Servers, *texts: bytes) -> list[str]:
    keys = [server.key for server in servers.all]
    return [key for key in keys if any(key.encode() in text for text in texts)]


def test_the_gateway_of_a_run_repeats_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop warns of a template that rewrites its prefix; the gateway, which may start many times, does not."""
    served: list[ChatFormat] = []

    def serve(format: ChatFormat, *given: object, listener: socket.socket, **options: object) -> None:
        listener.close()
        served.append(format)

    tokenizer_of(R1).save(tmp_path / "model")
    write_resolved(make_config(tmp_path / "model"), tmp_path / CONFIG_FILE)
    monkeypatch.setattr("m2forge.gateway.server.serve_gateway", serve)
    monkeypatch.setattr("m2forge.model.config_file.read_config", lambda folder: preset("m2-nano"))
    monkeypatch.setattr("sys.stdin", io.StringIO("admin sampler"))
    with caplog.at_level(logging.WARNING):
        run_gateway(tmp_path, str(socket.create_server(("127.0.0.1", 0)).detach()))
    assert [format.name for format in served] == ["template"]
    assert not caplog.records


def test_a_sampler_whose_version_is_removed_reads_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that starts over removes versions; another error of the sampler, or a later one, ends it."""
    model = make_model(tmp_path / "scene")
    config, layout, served = make_config(model), Layout(tmp_path), list[tuple[int, Path]]()
    write_resolved(config, tmp_path / CONFIG_FILE)
    network, store = load_model(model), layout.weight_store(config)
    store.publish(network, 1)

    def serve(
        folder: Path, serving: ServeConfig, key: str, announce: Callable[[str], None], listener: socket.socket
    ) -> None:
        served.append((serving.step, folder))
        with listener:
            if len(served) == 1:
                store.discard_after(0)
                store.publish(network, 0)
            elif len(served) == 2:
                announce("http://127.0.0.1")
                store.discard_after(-1)
                store.publish(network, 2)
            raise CheckpointError(f"{folder} is torn")

    monkeypatch.setattr("m2forge.rollout.server.model_server.serve_model", serve)
    monkeypatch.setattr("sys.stdin", io.StringIO("key"))
    with caplog.at_level(logging.INFO), pytest.raises(CheckpointError, match="step-00000000"):
        run_sampler(tmp_path, str(socket.create_server(("127.0.0.1", 0)).detach()))
    assert [step for step, _ in served] == [1, 0]
    assert caplog.text.count("was removed while it was read") == 1


def test_all_nodes_have_the_images_that_attempts_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = tmp_path / "tasks"
    shutil.copytree(ROOT / "examples" / "folders" / "merge-spans", folders / "merge-spans")
    base = read_dockerfile(folders / "merge-spans" / "environment" / "Dockerfile").base.partition("@")[0]
    domain = {"ratio": 1.0, "context": 2048, "families": [{"source": f"folders:{folders}"}]}
    curriculum = {"batch_groups": 2, "stages": [{"name": "only", "domains": {"coding": domain}}]}
    agent = {"kind": "command", "command": ["agent"], "sandbox": {"backend": "namespace", "image": "tools"}}
    cluster = {"launcher": "ray", "agent_hosts": 1}
    config = make_config(tmp_path / "model", curriculum=curriculum, agent=agent, cluster=cluster)
    layout = Layout(tmp_path / "run")
    # So that it is undone.
    monkeypatch.setenv(VARIABLE, "")
    for machine, text in (("here", "one"), ("there", "two")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        for name in ("tools", base, "unused"):
            files = tmp_path / machine / name.replace(":", "-")
            files.mkdir(parents=True)
            (files / "word").write_text(f"{name} {text}")
            ImageStore().build(name, [str(files)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    monkeypatch.delenv(VARIABLE)
    share_run_images(config, layout)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    words = {name: (ImageStore().resolve(name).layers[0] / "word").read_text() for name in ("tools", base)}
    assert words == {"tools": "tools one", base: f"{base} one"}
    assert SharedImages(layout.images).names == sorted(["tools", base])
