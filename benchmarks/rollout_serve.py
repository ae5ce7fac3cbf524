"""Runs the engine in this process: prompts in, when their tokens came out; and engines for benchmarks of one size."""

from collections.abc import Sequence

import numpy as np
import torch
from rollout_watch import Timed, Watch

from m2forge.model.transformer import Transformer
from m2forge.protocols import Chunk, Prompt
from m2forge.records import IntArray, PolicyVersion
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.rollout.server.model_server import spare_collector

BLOCK_TOKENS = 16


def make_core(
    model: Transformer, num_requests: int, context: int, *, step_tokens: int = 16_384, speculation: int = 0
) -> Core:
    """With a cache in which all requests fit, each of `context` tokens, and drafts behind them; in a process that is
    made ready as a server's."""
    config = RolloutConfig(
        block_tokens=BLOCK_TOKENS,
        num_blocks=num_requests * -(-(context + speculation) // BLOCK_TOKENS),
        step_tokens=max(step_tokens, num_requests * (1 + speculation)),
        max_running=num_requests,
        speculation=speculation,
        seed=0,
    )
    core = Core(model, config, PolicyVersion("benchmark", 0))
    spare_collector()
    return core


def random_prompts(num_requests: int, num_prompt: int, vocab_size: int, seed: int) -> list[IntArray]:
    ids = np.random.default_rng(seed).integers(0, vocab_size, (num_requests, num_prompt))
    return list(ids.astype(np.int32))


def serve(core: Core, prompts: Sequence[Prompt]) -> Timed:
    """All prompts at once, until the last one's last token. Every step hands its tokens to the host, which waits for
    the device therefore."""
    watch = Watch(len(prompts), max(prompt.max_tokens for prompt in prompts))
    for place, prompt in enumerate(prompts):
        core.add(str(place), prompt)
    while not core.is_idle:
        for id, chunk in core.step():
            watch.ids[int(id)] += chunk.ids.tolist()
        watch.note_step()
    return watch.timed()


def last_chunks(core: Core, prompts: Sequence[Prompt]) -> list[Chunk]:
    """What each completion ended with, of requests that all run together."""
    for place, prompt in enumerate(prompts):
        core.add(str(place), prompt)
    last: dict[str, Chunk] = {}
    while not core.is_idle:
        last |= dict(core.step())
    return list(last.values())


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
