"""What `m2forge rl` refuses before it writes anything: one line that names the setting, exit status 2, nothing left."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m2forge import cli
from m2forge.cluster.config import RayConfig
from m2forge.cluster.ray_launcher import Node
from m2forge.config import write_resolved
from m2forge.errors import ConfigError
from m2forge.model.build import build as build_model
from m2forge.model.checkpoint import save_model
from m2forge.model.config_file import read_config
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool
from m2forge.rl import preflight, servers
from m2forge.rl.config import RLConfig
from tests.rl.scene import make_config, make_model
from tests.rl.test_relay import in_a_thread
from tests.rollout.backends.fake_vllm import FakeVLLM
from tests.rollout.engine_contract import CONTEXT, VOCAB_SIZE

CPU = {"num_threads": 1, "device": "cpu"}
CLOSED = "http://127.0.0.1:1"
UNREPORTED = {
    "engine": {"server": {"kind": "vllm", "url": CLOSED, "key_env": "PATH"}},
    "eval": {"sampling": {"temperature": 0.7}},
}
"""Logprobs at this temperature are not those that such a server reports."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` has 8 experts, `dense` none."""
    folder = tmp_path_factory.mktemp("models")
    network = read_config(make_model(folder)).model_copy(update={"moe": None, "intermediate_size": 64})
    dense = build_model(network, torch.device("cpu"), torch.float32)
    save_model(dense, folder / "dense", companions=tuple((folder / "tokenizer").iterdir()))
    return folder


def refuse(folder: Path, config: RLConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of a run that it refuses, which leaves nothing behind."""
    write_resolved(config, folder / "config.toml")
    before = {*folder.rglob("*")}
    assert cli.main(["rl", str(folder / "config.toml"), "--runs", str(folder / "new" / "runs")]) == 2
    assert {*folder.rglob("*")} == before
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("m2forge: error: ")] == lines[-1:]
    return lines[-1]


def on_machine(mesh: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"train": {"machine": {**CPU, **fields, "mesh": mesh or {}}}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": (on_machine({"shard": 3, "expert": 3}), "expert 3 does not divide the 8 experts of this network; use a"),
    "ranks": (on_machine({"shard": 2, "expert": 4}), "expert 4 does not divide shard 2; set shard to a multiple of it"),
    "number": (on_machine({"shard": "auto"}), '"auto" counts GPUs, and this run trains on a CPU; give a number'),
    "trainer": (
        on_machine(device="cuda"),
        'train.machine.device is "cuda", but torch sees no GPU; use "cpu" or',
    ),
    "sampler": ({"engine": {"device": "cuda"}}, 'engine.device is "cuda", but torch sees no GPU; use "cpu" or'),
    "replay": ({"policy": {"replay": "recorded"}}, 'policy.replay = "recorded": this network has no'),
    "adapters": ({"train": {"lora": {"rank": 2, "targets": ["conv"]}}}, "lora.targets: no layer ends with 'conv'"),
    "key": (
        {"engine": {"server": {"kind": "vllm", "url": CLOSED, "key_env": "M2FORGE_NO_SUCH_KEY"}}},
        "engine.server.key_env: the environment variable M2FORGE_NO_SUCH_KEY is not set",
    ),
    "sampling": (UNREPORTED, "eval.sampling: "),
    "database": (
        {"pool": {"url": "postgresql://nobody@127.0.0.1:1/none", "window": {"queue": 8}}},
        "start the database, or give the URL of one that runs",
    ),
    "path": ({"pool": {"url": "sqlite:////dev/null/pool.db", "window": {"queue": 8}}}, "pool.url: /dev/null/pool.db"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_start_leaves_nothing(
    name: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "free_gpu_bytes", list)
    fields, message = REFUSED[name]
    config = make_config(models / ("dense" if name == "replay" else "model"), **fields)
    assert message in refuse(tmp_path, config, capsys)


@pytest.mark.parametrize(
    ("free", "mesh", "message"),
    [
        ([10**4], {}, "the policy: a rank needs"),
        ([10**12, 10**4], {"replicate": 2}, "the policy: a rank needs"),
        ([10**12], {"replicate": 2}, "train.machine.mesh: 2 ranks on this machine, which has 1 GPUs"),
        ([10**12] * 4, {"replicate": "auto", "shard": 3}, "4 were started; give numbers whose product divides 4"),
    ],
)
def test_a_machine_that_is_too_small_is_refused(
    free: list[int],
    mesh: dict[str, Any],
    message: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "free_gpu_bytes", lambda: free)
    config = make_config(models / "model", **on_machine(mesh, device="auto"))
    assert message in refuse(tmp_path, config, capsys)


@pytest.mark.parametrize("before", [[], [CLOSED]], ids=["alone", "the second"])
def test_a_server_in_another_mode_leaves_nothing(
    before: list[str], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT, mode="processed")
    with in_a_thread(fake) as url:
        urls = [*before, url]
        server = {"kind": "vllm", "url": urls}
        config = make_config(models / "model", engine={"server": server}, cluster={"samplers": len(urls)})
        assert "reports processed_logprobs, the configuration says raw" in refuse(tmp_path, config, capsys)
    assert not fake.admin_calls


def test_a_pool_of_another_vocabulary_leaves_nothing(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/pool.db"
    with Pool(PoolConfig(url=url), 7):
        pass
    config = make_config(models / "model", pool={"url": url, "window": {"queue": 8}})
    assert "its vocab_size is 7" in refuse(tmp_path, config, capsys)


def test_a_resumed_run_is_not_asked_again(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds its GPUs or has its key may be its own processes."""
    server = {"kind": "vllm", "url": CLOSED, "key_env": "M2FORGE_NO_SUCH_KEY"}
    config = make_config(models / "model", engine={"server": server})
    run_dir = tmp_path / "runs" / config.name
    (run_dir / "model").mkdir(parents=True)
    write_resolved(config, run_dir / "config.toml")
    words = ["rl", str(run_dir / "config.toml"), "--runs", str(tmp_path / "runs")]
    assert cli.main(words) == 0
    (run_dir / "config.toml").rename(tmp_path / "config.toml")
    assert cli.main(["rl", str(tmp_path / "config.toml"), *words[2:]]) == 2


# -- on a Ray cluster --------------------------------------------------------------------------------------------------

A100 = Node("n0", "10.0.0.1", 8, 8, ("A100",))
H200 = Node("n1", "10.0.0.2", 8, 8, ("H200",))
NO_GPU = Node("n2", "10.0.0.1", 8, 0, ())
SMALL = Node("n3", "10.0.0.1", 8, 1, ("L4",))
TWO_NODES = {"trainer_nodes": 2, "trainer_gpus": 2, "sampler_gpus": 1}
POSTGRES = {"url": "postgresql://nobody@127.0.0.1:1/none", "window": {"queue": 8}}


def on_ray(ray: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"cluster": {"launcher": "ray", "ray": ray}, "pool": POSTGRES, **fields}


@pytest.mark.parametrize(
    ("nodes", "fields", "message"),
    [
        (
            [NO_GPU, A100],
            on_ray({}),
            "on a CPU, and node n0 of the Ray cluster has 8 GPU; set trainer_gpus = 1, or train.machine.device",
        ),
        (
            [A100],
            on_ray({"trainer_nodes": 2}, **on_machine({"shard": 8}, device="auto")),
            "set trainer_gpus = 4, or train.machine.device",
        ),
        ([A100], on_ray({"trainer_gpus": 1}), "cluster.ray.sampler_gpus is 0 and engine.device"),
        ([A100], on_ray({}, **on_machine(), engine={"device": "cpu"}), "start the database"),
        ([NO_GPU], on_ray({}), "start the database"),
        ([NO_GPU], on_ray({}, **UNREPORTED), "eval.sampling: "),
        (
            [A100, H200, NO_GPU],
            on_ray(TWO_NODES, **on_machine({"shard": 4}, device="auto")),
            "cluster.ray.gpu: nodes of the trainer could have different GPUs (n0: A100; n1: H200); set it to",
        ),
        (
            [A100, SMALL, NO_GPU],
            on_ray(TWO_NODES, **on_machine({"shard": 4}, device="auto")),
            "start the database",
        ),
        (
            [A100],
            on_ray(
                {"trainer_gpus": 4, "sampler_gpus": 1}, train={"machine": {"mesh": {"shard": "auto", "context": 3}}}
            ),
            "context 3 is a mesh of 3 ranks, and 4 were started; give numbers",
        ),
    ],
)
def test_gpus_of_a_cluster_that_do_not_suit_are_refused(
    nodes: list[Node],
    fields: dict[str, Any],
    message: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "require_nodes", lambda *_: nodes)
    monkeypatch.setattr(preflight, "free_on_nodes", answering({}))
    assert message in refuse(tmp_path, make_config(models / "model", **fields), capsys)


def answering(answers: dict[str, list[int] | str]) -> Callable[..., Iterator[tuple[Node, list[int] | str]]]:
    """A stand-in for the question to the nodes. `answers`: of nodes by name; the others have enough."""

    def ask(_: RayConfig, nodes: list[Node], num_gpus: int, __: object) -> Iterator[tuple[Node, list[int] | str]]:
        return ((node, answers.get(node.name, [10**12] * num_gpus)) for node in nodes)

    return ask


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"n0": [10**4] * 2, "n1": [10**4] * 2}, "node n0 of the Ray cluster: the policy: a rank needs"),
        (
            {"n0": [10**4] * 2, "n1": [10**4] * 2},
            "GB are free; use more or larger GPUs; m2forge plan lists layouts; 1 other",
        ),
        ({"n0": [10**12, 10**4], "n1": [10**12, 10**4]}, "node n0 of the Ray cluster: the policy: a rank needs"),
        ({"n0": [], "n1": []}, "node n0 of the Ray cluster: Ray gives the trainer 2 GPUs there, and torch sees 0"),
        ({"n0": "2 of its GPUs did not become free", "n1": []}, "node n0 of the Ray cluster: 2 of its GPUs did not"),
        # One node is enough, which both halves of the trainer fit on.
        ({"n0": [10**4] * 2}, "start the database"),
    ],
)
def test_nodes_whose_gpus_are_too_small_are_refused(
    answers: dict[str, list[int] | str],
    message: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = replace(A100, name="n1", address="10.0.0.2")
    monkeypatch.setattr(servers, "require_nodes", lambda *_: [A100, other, NO_GPU])
    monkeypatch.setattr(preflight, "free_on_nodes", answering(answers))
    config = make_config(models / "model", **on_ray(TWO_NODES, **on_machine({"shard": 4}, device="auto")))
    assert message in refuse(tmp_path, config, capsys)


def test_only_nodes_that_could_have_the_trainer_are_asked(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "require_nodes", lambda *_: [A100, H200, NO_GPU, SMALL])
    monkeypatch.setattr(preflight, "free_on_nodes", answering({"n0": [], "n3": []}))
    ray = {**TWO_NODES, "gpu": "H200"}
    config = make_config(models / "model", **on_ray(ray, **on_machine({"shard": 4}, device="auto")))
    assert "start the database" in refuse(tmp_path, config, capsys)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            on_ray({"trainer_gpus": 1}, **on_machine()),
            '.trainer_gpus: train.machine.device is "cpu", which uses none of 1',
        ),
        (on_ray({}, **on_machine({"shard": 2}, device="cuda")), "no GPU is requested; set it to 2"),
        (on_ray({}, engine={"device": "cuda"}), ".sampler_gpus: engine.device is .*set it to 1"),
        (
            on_ray({"sampler_gpus": 1}, engine={"device": "cpu"}),
            '.sampler_gpus: engine.device is "cpu", which uses none',
        ),
        (
            on_ray({"trainer_gpus": 4, "trainer_nodes": 2}, **on_machine({"shard": 4}, device="auto")),
            ".trainer_gpus: train.machine.mesh has 2 ranks on each node, with a GPU each, .*set it to 2",
        ),
        (
            on_ray({}, **on_machine({"shard": "auto"}, device="auto")),
            'trainer_gpus: "auto" in train.machine.mesh counts',
        ),
        (
            on_ray({"sampler_gpus": 1}, engine={"server": {"kind": "vllm", "url": CLOSED}}),
            ".sampler_gpus: engine.server names a vllm server; leave it out",
        ),
    ],
)
def test_gpus_that_are_requested_and_not_used_are_refused(fields: dict[str, Any], message: str, models: Path) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.ray.*{message}"):
        make_config(models / "model", **fields)
