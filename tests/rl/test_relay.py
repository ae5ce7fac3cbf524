"""Runs that sample from another engine's server: one of a real network behind vLLM's routes, and what is refused."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from m2forge import cli
from m2forge.config import write_resolved
from m2forge.errors import ConfigError, EngineError
from m2forge.listener import listen
from m2forge.loop_thread import LoopThread
from m2forge.model.checkpoint import load_model
from m2forge.model.config import LoRAConfig
from m2forge.model.config_file import MERGED_FOLDER, read_config
from m2forge.model.lora import attach, is_adapter_folder
from m2forge.observe.metrics import read_metrics
from m2forge.protocols import Prompt
from m2forge.records import PolicyVersion, Sampling
from m2forge.reward.config import RewardConfig
from m2forge.rl import relay
from m2forge.rl.config import EngineConfig, RLConfig
from m2forge.rl.layout import Layout
from m2forge.rl.loop import train_rl
from m2forge.rollout.backends.remote import RemoteEngine
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.rollout.engine import NativeEngine
from m2forge.train.config import TuneConfig
from m2forge.weights.config import WeightsConfig
from tests.rl.ring import ROOT
from tests.rl.scene import make_config, make_model
from tests.rl.test_loop import make_run
from tests.rollout.backends.fake_sglang import FakeSGLang
from tests.rollout.backends.fake_vllm import FakeVLLM
from tests.rollout.engine_contract import CONTEXT, VOCAB_SIZE, complete, make_prompt
from tests.rollout.served import served

KEY = "relay-key"
VERSION = PolicyVersion("run", 3, "branch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scene"))


# -- a whole run ------------------------------------------------------------------------------------------------------


class NetworkVLLM(FakeVLLM):
    """Samples from a network; weights that it is sent replace the network's."""

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        super().__init__(config.vocab_size, config.max_context)
        self.engine = NativeEngine(Core(load_model(folder).eval(), RolloutConfig(), PolicyVersion("served", 0)))
        self.loaded: list[Path] = []

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        prompt = Prompt(
            np.array(body["prompt"], np.int32),
            body["max_tokens"],
            Sampling(temperature=body["temperature"], top_k=body["top_k"]),
            tuple(body["stop_token_ids"]),
            num_samples=body["n"],
        )
        async for chunk in self.engine.generate(prompt):
            for place, (id, logprob) in enumerate(zip(chunk.ids.tolist(), chunk.raw_logprobs.tolist(), strict=True)):
                is_last = place == chunk.ids.size - 1 and chunk.finish_reason is not None
                yield self.event(chunk.sample, id, logprob, str(chunk.finish_reason) if is_last else None)
        yield "data: [DONE]\n\n"

    async def administer(self, request: Request) -> Response:
        if request.url.path != "/collective_rpc":
            return await super().administer(request)
        folder = Path((await request.json())["kwargs"]["weights_path"])
        self.loaded.append(folder)
        await self.engine.load(folder, PolicyVersion("served", len(self.loaded)))
        return JSONResponse({"results": [None]})


@contextlib.contextmanager
def in_a_thread(fake: FakeVLLM | FakeSGLang) -> Iterator[str]:
    with LoopThread("vllm") as thread, contextlib.ExitStack() as stack:
        context = served(fake.app)
        url = thread.run(context.__aenter__())
        stack.callback(lambda: thread.run(context.__aexit__(None, None, None)))
        if isinstance(fake, NetworkVLLM):
            stack.callback(lambda: thread.run(fake.engine.close()))
        yield url


def test_a_run_samples_from_vllm(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, config = NetworkVLLM(model), make_run(model, num_steps=2)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with in_a_thread(fake) as url:
        server = {"server": {"kind": "vllm", "url": url}}
        engine = type(config.engine).model_validate(server)
        ring = config.model_copy(update={"engine": engine, "weights": WeightsConfig()})
        train_rl(ring, runs=tmp_path)
    layout = Layout(tmp_path / "run")
    steps = [row.values for row in read_metrics(layout.run_dir / "metrics.jsonl")]
    assert len(steps) == 2
    # Off by what the policy moved since: with wrong logprobs, or samples of other weights, it is far from 1.
    assert all(row["ratio_mean"] == pytest.approx(1, abs=0.05) for row in steps)
    assert steps[0]["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert not [thread for thread in threading.enumerate() if thread.name == "m2forge-rollout"]
    versions = [int(folder.name.split("-")[1]) for folder in fake.loaded]
    assert versions[0] == 0
    assert versions[-1] == 2


class MergedVLLM(NetworkVLLM):
    """Notes whether the weights that it is sent are those of the adapter, as m2forge's own sampler merges it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.base, self.is_merged, self.num_changed = load_model(folder).state_dict(), list[bool](), 0

    async def administer(self, request: Request) -> Response:
        response = await super().administer(request)
        if request.url.path == "/collective_rpc":
            served, merged = (load_model(path).state_dict() for path in (self.loaded[-1].parent, self.loaded[-1]))
            self.is_merged.append(all(torch.equal(served[name], merged[name]) for name in served))
            self.num_changed = sum(not torch.equal(served[name], self.base[name]) for name in served)
        return response


def test_a_run_with_adapters_samples_from_two_servers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes, config = [MergedVLLM(model), MergedVLLM(model)], make_run(model, num_steps=3)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # A random policy fails equally: other rewards than these would train nothing.
    (tmp_path / "drawn.py").write_text("import random\n\ndef reward(*_):\n    return random.random()\n")
    with in_a_thread(fakes[0]) as first, in_a_thread(fakes[1]) as second:
        changes = {
            "engine": EngineConfig.model_validate({"server": {"kind": "vllm", "url": (first, second)}}),
            "weights": WeightsConfig(),
            # Three steps take a moment; on a busy machine a server would lose the folder that it loads.
            "keep_versions": 4,
            "reward": RewardConfig(function=f"{tmp_path / 'drawn.py'}:reward", mode="replace"),
            "cluster": config.cluster.model_copy(update={"samplers": 2}),
            "train": config.train.model_copy(update={"lora": LoRAConfig(rank=2, targets=("v_proj",))}),
        }
        folder, _ = train_rl(config.model_copy(update=changes), runs=tmp_path)
    steps = [row.values for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert [row["ratio_mean"] for row in steps] == [pytest.approx(1, abs=0.05)] * 3
    for fake in fakes:
        assert [folder.name for folder in fake.loaded] == [MERGED_FOLDER] * len(fake.loaded)
        versions = [int(folder.parent.name.split("-")[1]) for folder in fake.loaded]
        assert (versions[0], versions[-1]) == (0, 3)
        assert all(fake.is_merged)
        assert fake.num_changed
        assert len(fake.bodies) > 10, "it sampled no attempt"
    assert is_adapter_folder(folder)
    assert not (folder / MERGED_FOLDER).exists()


# -- its parts --------------------------------------------------------------------------------------------------------


def config_for(model: Path, kind: str, url: str, **changes: object) -> RLConfig:
    return make_config(model, engine={"server": {"kind": kind, "url": url, **changes}})


@contextlib.contextmanager
def relayed(config: RLConfig, folder: Path) -> Iterator[tuple[str, list[BaseException]]]:
    """The address of a relay in a thread, and the error that ended it."""
    listener, errors, is_up = listen("127.0.0.1", 0), list[BaseException](), threading.Event()
    port = listener.getsockname()[1]

    def run() -> None:
        try:
            relay.serve_relay(config, folder, VERSION, KEY, lambda _: is_up.set(), listener)
        except BaseException as error:  # noqa: BLE001, a test reads it
            errors.append(error)
        is_up.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_up.wait(60)
    yield f"http://127.0.0.1:{port}", errors
    thread.join(60)
    assert not thread.is_alive()


async def ask(url: str) -> tuple[list[float], PolicyVersion]:
    engine = RemoteEngine(url, key=KEY)
    try:
        return await complete(engine, make_prompt()), (await engine.state()).version
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_relay_ends_with_its_server(model: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is started in its place holds other weights."""
    monkeypatch.setattr(relay, "POLL_S", 0.01)
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT) if kind == "vllm" else FakeSGLang(VOCAB_SIZE, CONTEXT)

    with contextlib.ExitStack() as server:
        url = server.enter_context(in_a_thread(fake))
        with relayed(config_for(model, kind, url), model) as (relay_url, errors):
            ids, version = asyncio.run(ask(relay_url))
            assert len(ids) == 8
            assert version == VERSION
            loaded = PolicyVersion(str(model), 0) if kind == "vllm" else PolicyVersion("fake", VERSION.step)
            assert fake.version == loaded, "it serves weights that it has not loaded"
            server.close()
    assert [type(error) for error in errors] == [EngineError]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_is_sent_the_merged_model_of_an_adapter(
    model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "POLL_S", 0.01)
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT) if kind == "vllm" else FakeSGLang(VOCAB_SIZE, CONTEXT)
    lora = LoRAConfig(rank=2, targets=("q_proj",))
    config = config_for(model, kind, "http://127.0.0.1:1").model_copy(update={"train": TuneConfig(lora=lora)})
    network = load_model(model)
    attach(network, lora, model)
    folder = Layout(tmp_path).weight_store(config).publish(network, 3)
    merged = folder / MERGED_FOLDER

    def sent() -> list[Path]:
        return fake.loaded if isinstance(fake, FakeSGLang) else [Path(fake.version.lineage)]

    with contextlib.ExitStack() as server:
        config = config_for(model, kind, server.enter_context(in_a_thread(fake)))
        with relayed(config, folder) as (relay_url, errors):
            assert asyncio.run(ask(relay_url))[1] == VERSION
            assert sent() == [merged]
            server.close()
    assert [type(error) for error in errors] == [EngineError]
    fake = type(fake)(VOCAB_SIZE, CONTEXT)
    (path,) = merged.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with in_a_thread(fake) as url, relayed(config_for(model, kind, url), folder) as (_, errors):
        pass
    assert str(path) in str(errors[0])
    assert merged not in sent()


def test_a_server_in_another_mode_is_refused(model: Path) -> None:
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT, mode="processed")
    with in_a_thread(fake) as url, relayed(config_for(model, "vllm", url), model) as (_, errors):
        pass
    assert "reports processed_logprobs, the configuration says raw" in str(errors[0])
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT)
    other = {"logprobs_mode": "processed"}
    with in_a_thread(fake) as url, relayed(config_for(model, "vllm", url, **other), model) as (_, errors):
        pass
    assert "reports raw_logprobs, the configuration says processed" in str(errors[0])
    assert not fake.admin_calls, "weights were sent"


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakeVLLM(VOCAB_SIZE, CONTEXT, is_dev=False), "reloads weights only if the environment has VLLM_SERVER_DEV_M"),
        (FakeSGLang(VOCAB_SIZE, CONTEXT, takes_weights=False), "has no /update_weights_from_disk"),
    ],
    ids=["vllm", "sglang"],
)
def test_a_server_that_takes_no_weights_is_refused(
    fake: FakeVLLM | FakeSGLang, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "vllm" if isinstance(fake, FakeVLLM) else "sglang"
    with in_a_thread(fake) as url:
        config = config_for(model, kind, url)
        write_resolved(config, tmp_path / "config.toml")
        assert cli.main(["rl", str(tmp_path / "config.toml"), "--runs", str(tmp_path / "runs")]) == 2
        assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
        assert message in capsys.readouterr().err
        with relayed(config, model) as (_, errors):
            pass
    # The run ends with it, where another error would have the relay start again.
    assert isinstance(errors[0], ConfigError)
    assert message in str(errors[0])
    assert not fake.bodies, "it was asked for tokens first"


def test_a_server_that_cannot_read_the_folder_ends_the_run(model: Path, tmp_path: Path) -> None:
    fake = FakeSGLang(VOCAB_SIZE, CONTEXT)
    with in_a_thread(fake) as url, relayed(config_for(model, "sglang", url), tmp_path) as (_, errors):
        pass
    assert isinstance(errors[0], ConfigError)
    assert "no config.json" in str(errors[0])
    assert f"it must see {tmp_path} under this path" in str(errors[0])


def test_a_server_that_refuses_the_key_for_weights_is_refused(model: Path) -> None:
    fake = FakeSGLang(VOCAB_SIZE, CONTEXT, takes_weights=False)
    fake.app.routes.append(Route("/update_weights_from_disk", lambda _: JSONResponse("admin key", 401)))
    with in_a_thread(fake) as url, relayed(config_for(model, "sglang", url), model) as (_, errors):
        pass
    assert isinstance(errors[0], ConfigError)
    assert "answered 401: admin key; give the server's API key (engine.server.key_env in a run)" in str(errors[0])


def test_a_server_that_never_comes_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "START_S", 0.0)
    monkeypatch.setattr(relay, "POLL_S", 0.01)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with relayed(config_for(model, "vllm", url), model) as (_, errors):
            pass
    assert isinstance(errors[0], ConfigError)
    assert url in str(errors[0])


def test_a_missing_key_and_other_sampling_are_refused(model: Path) -> None:
    config = config_for(model, "vllm", "http://127.0.0.1:1", key_env="M2FORGE_NO_SUCH_KEY")
    assert config.engine.server is not None
    with pytest.raises(ConfigError, match="M2FORGE_NO_SUCH_KEY is not set"):
        relay.make_engine(config.engine.server, VERSION)
    config = config_for(model, "vllm", "http://127.0.0.1:1")
    assert config.engine.server is not None
    engine = relay.make_engine(config.engine.server, VERSION)
    warm = config.agent.sampling.model_copy(update={"temperature": 0.7})
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"sampling": warm})})
    with pytest.raises(ConfigError, match=r"eval\.sampling: .*processed_logprobs"):
        relay.refuse_samplings(engine, config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": {"dtype": "float32"}}, r"engine\.dtype has no effect there"),
        ({"engine": {"rollout": {"max_running": 3}}}, r"engine\.rollout has no effect there"),
        ({"policy": {"replay": "recorded"}}, "does not report experts"),
        ({"weights": {"anchor_every": 2}}, "reads whole versions"),
        ({"weights": {"sync": "collective"}}, "reads versions from their folders"),
    ],
)
def test_what_a_server_cannot_do_is_refused(model: Path, fields: dict[str, Any], message: str) -> None:
    server = {"kind": "vllm", "url": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match=message):
        make_config(model, **{**fields, "engine": {"server": server, **fields.get("engine", {})}})
