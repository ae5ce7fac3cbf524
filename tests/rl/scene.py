"""A small model folder, a configuration over it, and units of a pool that a trainer can learn from."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m2forge.config import build
from m2forge.model.build import build as build_model
from m2forge.model.checkpoint import save_model
from m2forge.model.preset import preset
from m2forge.pool.pool import Pool
from m2forge.pool.record import Append
from m2forge.pool.stored import Outcome
from m2forge.records import Call, FinishReason, FloatArray, Reward, Sampling, Task
from m2forge.rl.config import RLConfig
from m2forge.tasks.catalog import find_family
from m2forge.tasks.task_set import TaskSet
from m2forge.text.format import MINIMAX_M2_SPECIALS
from m2forge.text.tokenizer import train_tokenizer


def make_model(folder: Path) -> Path:
    family, rng = find_family("chain"), random.Random(0)
    texts = [
        f"{message.content} {message.thinking}"
        for seed in range(50)
        for message in family.demonstrate(family.draw(2, seed), rng)
    ]
    tokenizer = train_tokenizer(texts, 300, MINIMAX_M2_SPECIALS)
    tokenizer.save(folder / "tokenizer")
    config = preset("m2-nano").with_layers(1).model_copy(update={"vocab_size": tokenizer.vocab_size, "num_mtp": 0})
    torch.manual_seed(0)
    model = build_model(config, torch.device("cpu"), torch.float32)
    save_model(model, folder / "model", companions=tuple((folder / "tokenizer").iterdir()))
    return folder / "model"


def make_config(model: Path, **fields: object) -> RLConfig:
    data: dict[str, object] = {
        "name": "run",
        "model": str(model),
        "num_steps": 4,
        "group_size": 2,
        "lr": {"start": 1e-3},
        "curriculum": {
            "batch_groups": 2,
            "stages": [
                {
                    "name": "only",
                    "domains": {
                        "agent": {
                            "ratio": 1.0,
                            "context": 2048,
                            "families": [{"source": "chain", "difficulty": [1, 3]}],
                        }
                    },
                }
            ],
        },
        "agent": {"command": ["true"]},
        "pool": {"window": {"queue": 8}},
        "train": {"checkpoint": {"every_steps": 2}, "machine": {"num_threads": 1}},
    }
    data |= fields
    agent: dict[str, Any] = dict(data["agent"])  # type: ignore[call-overload]  # a table
    # Tests whose subject is not the sandbox run where there are no namespaces, too.
    data["agent"] = agent | {"sandbox": {"backend": "process", **agent.get("sandbox", {})}}
    return build(RLConfig, data, origin="test")  # type: ignore[arg-type]  # checked there


def make_call(rng: np.random.Generator, vocab_size: int, prompt: list[int] | None = None) -> Call:
    prompt_ids = rng.integers(0, vocab_size, 6) if prompt is None else np.array(prompt)
    response = rng.integers(0, vocab_size, int(rng.integers(1, 5)))
    return Call(
        prompt_ids=prompt_ids.astype(np.int32),
        response_ids=response.astype(np.int32),
        logprobs=np.full(response.size, -5.0, np.float32),
        versions=np.zeros(response.size, np.int32),
        finish_reason=FinishReason.STOP,
        started_s=0.0,
        finished_s=1.0,
        sampling=Sampling(),
    )


def fill_pool(
    pool: Pool, num_groups: int, group_size: int, logprobs: Callable[[Call], FloatArray] | None = None
) -> list[Task]:
    """Queue groups, and let all of their attempts end with different rewards. `logprobs`: what calls were sampled
    with."""
    tasks = TaskSet(find_family("chain"), "train", 0)
    drawn = [tasks.next(1, 3) for _ in range(num_groups)]
    pool.put([(task, group_size) for task in drawn], stage="only")
    rng = np.random.default_rng(0)
    for place, lease in enumerate(pool.lease("test", num_groups * group_size)):
        writer, num_calls = lease.writer(pool.vocab_size), 1 + place % 2
        for _ in range(num_calls):
            call = make_call(rng, pool.vocab_size)
            call = call if logprobs is None else replace(call, logprobs=logprobs(call))
            pool.append([Append(lease, writer.write(call))])
        perf = float(place % group_size == 0)
        reward = Reward(process=0.0, speed=0.0, perf=perf, total=perf)
        pool.finish(lease, Outcome(reward=reward, step_rewards=(*[0.0] * (num_calls - 1), perf)))
    return drawn
