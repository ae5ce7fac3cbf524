"""The machine a run trains on: its device, precision, threads, and how fast it could be."""

import time

import torch

from m2forge.errors import ConfigError
from m2forge.model.transformer import Transformer
from m2forge.train.config import MachineConfig

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16, as the vendor states it."""


def choose_device(config: MachineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('machine.device is "cuda", but torch sees no GPU; use "cpu" or "auto"')
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def choose_dtype(config: MachineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def set_up_machine(config: MachineConfig, device: torch.device) -> None:
    """Process-wide settings; call before the first tensor of a run."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(config.deterministic)
        # It would write every new tensor twice; ours are never read before they are written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_up_model(model: Transformer, config: MachineConfig, device: torch.device) -> None:
    model.recompute = config.recompute
    if config.compile_blocks == "always" or (config.compile_blocks == "auto" and device.type == "cuda"):
        model.compile_blocks()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second the machine could do at best: the vendor's figure, or else a large product measured."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, flops in PEAK_FLOPS.items():
            if known in name:
                return flops
    size = 8192 if device.type == "cuda" else 1024
    x = torch.randn(size, size, device=device).to(dtype)
    seconds = []
    for _ in range(4):
        start_s = time.perf_counter()
        float((x @ x)[0, 0])
        seconds.append(time.perf_counter() - start_s)
    return 2 * size**3 / min(seconds)
