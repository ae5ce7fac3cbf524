"""What a run sets for the whole process ends with it."""

import time

import pytest
import torch

from m2forge.config import build
from m2forge.errors import ConfigError
from m2forge.model.preset import preset
from m2forge.train.config import MachineConfig, MeshConfig
from m2forge.train.machine import machine_ranks, machine_settings, peak_flops


def settings() -> tuple[int, int, bool]:
    memory = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.get_num_threads(), torch.get_deterministic_debug_mode(), memory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_end_with_the_run(device: str) -> None:
    before = settings()
    with (
        pytest.raises(KeyboardInterrupt),
        machine_settings(MachineConfig(num_threads=before[0] + 1), torch.device(device)),
    ):
        assert torch.get_num_threads() == before[0] + 1
        assert torch.are_deterministic_algorithms_enabled() == (device == "cpu")
        raise KeyboardInterrupt
    assert settings() == before


def test_a_run_on_cuda_does_not_inherit_cpu_settings() -> None:
    with (
        machine_settings(MachineConfig(), torch.device("cpu")),
        machine_settings(MachineConfig(), torch.device("cuda")),
    ):
        assert not torch.are_deterministic_algorithms_enabled()


def test_without_determinism_none_is_asked_for() -> None:
    with machine_settings(MachineConfig(deterministic=False), torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_the_machine_takes_seconds_at_most(dtype: torch.dtype) -> None:
    started_s = time.thread_time()
    assert peak_flops(torch.device("cpu"), dtype) > 1e6
    # Where the processor lacks bfloat16, a product of 1024 rows alone takes twenty seconds.
    assert time.thread_time() - started_s < 15


@pytest.mark.parametrize(
    ("mesh", "num_ranks", "problem"),
    [
        ({"shard": "auto", "expert": 4}, 6, "expert 4 does not divide shard 6; set shard to a multiple of it"),
        ({"replicate": 2, "expert": 2}, 2, "expert 2 does not divide shard 1"),
        ({"context": 2, "expert": 4}, 2, "expert 4 does not divide shard 1 × context 2"),
        ({"replicate": "auto", "context": 3}, 4, "shard 1 × context 3 is a mesh of 3 ranks, and 4 were started"),
        ({"replicate": 2, "shard": 2}, 2, "replicate 2 × shard 2 is a mesh of 4 ranks, and 2 were started"),
        ({"replicate": "auto", "shard": 3}, 4, "shard 3 is a mesh of 3 ranks, and 4 were started"),
        ({}, 2, "replicate 1 × shard 1 is a mesh of 1 ranks, and 2 were started; start torchrun with --nproc"),
    ],
)
def test_a_mesh_of_other_ranks_than_were_started_is_refused(
    mesh: dict[str, object], num_ranks: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    with pytest.raises(ConfigError, match=problem):
        machine_ranks(MachineConfig(mesh=MeshConfig.model_validate(mesh))).__enter__()


def test_auto_is_the_number_of_ranks_left() -> None:
    assert MeshConfig(replicate="auto", shard=2).of_ranks(8).shape == (4, 2)
    assert MeshConfig(replicate=2, shard="auto").of_ranks(8).shape == (2, 4)
    assert MeshConfig(shard="auto").of_ranks(1).shape == (1, 1)


def test_two_axes_cannot_both_be_auto() -> None:
    with pytest.raises(ConfigError, match="only one of replicate and shard"):
        build(MachineConfig, {"mesh": {"replicate": "auto", "shard": "auto"}})


@pytest.mark.parametrize(
    ("name", "problem"), [("m2-tiny", "the 64 experts"), ("dense", "the 0 experts .*leave it out")]
)
def test_experts_that_cannot_be_divided_are_refused(name: str, problem: str) -> None:
    network = preset("m2-tiny")
    network = network.model_copy(update={"moe": None}) if name == "dense" else network
    with pytest.raises(ConfigError, match=f"expert 3 does not divide {problem}"):
        MeshConfig(shard=3, expert=3).refuse_misfit(network)
    MeshConfig(shard=3).refuse_misfit(network)


@pytest.mark.parametrize("context", [5, 3, 8])
def test_heads_that_cannot_be_divided_are_refused(context: int) -> None:
    problem = f"context {context} does not divide the 12 query heads and 2 key/value heads of this network"
    with pytest.raises(ConfigError, match=problem):
        MeshConfig(context=context).refuse_misfit(preset("m2-tiny"))


@pytest.mark.parametrize("context", [1, 2, 4, 6, 12])
def test_heads_are_divided_up_to_one_for_each_rank(context: int) -> None:
    MeshConfig(context=context).refuse_misfit(preset("m2-tiny"))


def test_ranks_that_share_a_segment_need_a_token_each() -> None:
    with pytest.raises(ConfigError, match="segment_tokens 4 is less than"):
        build(MachineConfig, {"mesh": {"context": 8}, "recompute": "walk", "walk": {"segment_tokens": 4}})
