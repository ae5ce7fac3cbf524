"""Chooses the dtype in which a CPU decodes a network fastest: that of the stored weights, or float32.

Few CPUs run bfloat16 as fast as float32 in every part of a network: matrix products may have a kernel and experts none.
So a probe decodes a few tokens in both dtypes with one layer of the same shape and few of its experts, which takes a
fraction of a second. Weights that would not fit into memory as float32 keep their stored dtype.
"""

import logging
import os
import time
from pathlib import Path

import numpy as np
import torch

from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.transformer import Transformer
from m2forge.protocols import Prompt
from m2forge.records import PolicyVersion, Sampling
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core

VOCAB_SIZE = 512
"""Vocabulary of the probe, whatever the network's: embedding and LM head are ordinary products."""
NUM_REQUESTS, NUM_PROMPT, NUM_NEW = 8, 16, 8
REPEATS = 3
MEMORY_SHARE = 0.5
"""Share of the available memory that the weights may take as float32: the KV cache and the cast need some too."""

_log = logging.getLogger(__name__)


def fastest_dtype(model: Transformer) -> torch.dtype:
    """Float32 where one layer of the network's shape decodes faster in it than in the dtype of its weights."""
    stored = model.embedding.weight.dtype
    if stored not in (torch.bfloat16, torch.float16):
        return stored
    num_bytes = sum(weight.numel() for weight in model.parameters()) * torch.float32.itemsize
    if num_bytes > MEMORY_SHARE * available_bytes():
        return stored
    config = probe_config(model.config)
    stored_s, float_s = decode_s(config, stored), decode_s(config, torch.float32)
    if stored_s <= float_s:
        return stored
    _log.warning(
        "this CPU decodes %.1f times as fast in float32 as in %s, so weights and KV cache are held in float32, in "
        'twice the memory; dtype = "stored" keeps %s',
        stored_s / float_s,
        str(stored).removeprefix("torch."),
        str(stored).removeprefix("torch."),
    )
    return torch.float32


def probe_config(config: ModelConfig) -> ModelConfig:
    """One layer with experts, if there is one, and few of them."""
    probe = config.with_layers(1).model_copy(update={"vocab_size": VOCAB_SIZE, "num_mtp": 0})
    if config.moe is None:
        return probe
    num_experts = min(config.moe.num_experts, NUM_REQUESTS * config.moe.top_k)
    return probe.model_copy(
        update={"moe": config.moe.model_copy(update={"num_experts": num_experts, "dense_layers": ()})}
    )


def available_bytes() -> int:
    """Available memory in bytes; the total where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def decode_s(config: ModelConfig, dtype: torch.dtype) -> float:
    """Seconds for a batch of short completions, the fastest of `REPEATS`."""
    num_blocks = NUM_REQUESTS * (1 + (NUM_PROMPT + NUM_NEW) // 16)
    rollout = RolloutConfig(num_blocks=num_blocks, max_running=NUM_REQUESTS, step_tokens=NUM_REQUESTS * NUM_PROMPT)
    core = Core(build(config, dtype=dtype).eval(), rollout, PolicyVersion("probe", 0))
    rng, times_s = np.random.default_rng(0), []
    for repeat in range(1 + REPEATS):
        started_s = time.perf_counter()
        for request in range(NUM_REQUESTS):
            ids = rng.integers(0, VOCAB_SIZE, NUM_PROMPT).astype(np.int32)
            core.add(f"{repeat}-{request}", Prompt(ids, NUM_NEW, Sampling(temperature=0.0)))
        while not core.is_idle:
            core.step()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s[1:])
