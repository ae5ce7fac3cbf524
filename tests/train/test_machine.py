"""What a run sets for the whole process ends with it."""

import time

import pytest
import torch

from m2forge.train.config import MachineConfig
from m2forge.train.machine import machine_settings, peak_flops


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
    started_s = time.monotonic()
    assert peak_flops(torch.device("cpu"), dtype) > 1e6
    # Where the processor lacks bfloat16, a product of 1024 rows alone takes twenty seconds.
    assert time.monotonic() - started_s < 15
