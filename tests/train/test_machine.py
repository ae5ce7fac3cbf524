"""What a run sets for the whole process ends with it."""

import time
from pathlib import Path

import pytest
import torch

from m2forge.config import build
from m2forge.errors import ConfigError
from m2forge.model.config import AttentionConfig
from m2forge.model.preset import preset
from m2forge.train.config import Curve, MachineConfig, MeshConfig, PhaseConfig, TrainConfig, head_parts, key_copies
from m2forge.train.machine import machine_ranks, machine_settings, peak_flops, refuse_unfit_phases
from m2forge.train.parallel import SINGLE_RANK


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
    mesh: dict[str, object], num_ranks: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    with pytest.raises(ConfigError, match=problem):
        machine = MachineConfig(mesh=MeshConfig.model_validate(mesh))
        machine_ranks(machine, tmp_path, machine).__enter__()


def test_every_phase_is_refused_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    network = preset("m2-mini").model_copy(update={"num_mtp": 1})
    main = PhaseConfig(
        name="main", steps=1, context=1024, pack_tokens=1024, lr=Curve(start=1e-3), mtp_weight=Curve(start=0.3)
    )
    modules = main.model_copy(update={"name": "modules", "num_mtp": 3, "trains": "mtp", "pack_tokens": 262_144})
    monkeypatch.setattr("m2forge.train.machine.rank_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (40 * 10**9, 0))
    refuse_unfit_phases(TrainConfig(), network, [main], SINGLE_RANK)
    refuse_unfit_phases(TrainConfig(), network, [main, modules.model_copy(update={"pack_tokens": 8192})], SINGLE_RANK)
    with pytest.raises(ConfigError, match=r"phase modules: a rank needs .* 40\.0 GB are free; set train\.machine\."):
        refuse_unfit_phases(TrainConfig(), network, [main, modules], SINGLE_RANK)


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


@pytest.mark.parametrize(
    ("heads", "context", "parts", "copies"),
    [
        *[((12, 2), context, context, max(1, context // 2)) for context in (1, 2, 4, 6, 12)],
        *[((12, 2), context, parts, context // 2) for context, parts in ((8, 4), (24, 12), (10, 2))],
        ((12, 2), 5, 1, 5),
        *[((9, 3), context, parts, copies) for context, parts, copies in ((2, 1, 2), (3, 3, 1), (6, 3, 2), (8, 1, 8))],
        ((9, 3), 9, 9, 3),
        ((9, 3), 18, 9, 6),
    ],
)
def test_ranks_divide_the_heads_and_then_the_queries(
    heads: tuple[int, int], context: int, parts: int, copies: int
) -> None:
    attention = AttentionConfig(num_heads=heads[0], num_kv_heads=heads[1], head_dim=8, rotary_dim=8)
    assert (head_parts(attention, context), key_copies(attention, context)) == (parts, copies)


def test_ranks_that_share_a_segment_need_a_token_each() -> None:
    with pytest.raises(ConfigError, match="segment_tokens 4 is less than"):
        build(MachineConfig, {"mesh": {"context": 8}, "recompute": "walk", "walk": {"segment_tokens": 4}})
