"""One step by a walk against the same step over whole packs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import assume, currently_in_test_context
from torch import Tensor

from m2forge.model.transformer import Transformer
from m2forge.train.config import OptimizerConfig, PolicyConfig, WalkConfig
from m2forge.train.engine import PendingMetrics, TrainEngine
from m2forge.train.walk import Walk
from tests.model.draw_tree import MIN_MARGIN, watched
from tests.train.naive import watch_gradients
from tests.train.tree_step import CONFIG, assert_same_gradients

Step = Callable[[TrainEngine], PendingMetrics]


@dataclass
class Done:
    gradients: dict[str, Tensor]
    values: dict[str, float]
    biases: list[Tensor]
    engine: TrainEngine


def run(
    model: Transformer,
    step: Step,
    walk: WalkConfig | None,
    policy: PolicyConfig | None = None,
    optimizer: OptimizerConfig = CONFIG,
) -> Done:
    model = copy.deepcopy(model)
    model.recompute = "none" if walk is None else walk.recompute
    engine = TrainEngine(model, optimizer, policy=policy, router_bias="balanced", walk=walk)
    gradients = watch_gradients(engine)
    values = step(engine).read()
    return Done(gradients, values, [router.bias for router in model.routers() if router.bias is not None], engine)


def assert_walk_equals(model: Transformer, step: Step, walk: WalkConfig, policy: PolicyConfig | None = None) -> None:
    """Gradients within 1e-9 of each tensor's largest element, loads as integers, biases bit by bit. A case in
    which rounding may choose other experts is discarded, where Hypothesis draws it."""
    with watched(model) as watch:
        expected = run(model, step, None, policy)
    if currently_in_test_context():
        assume(watch.margin >= MIN_MARGIN)
    found = run(model, step, walk, policy)
    assert_same_gradients(found.gradients, expected.gradients)
    assert found.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        if name.startswith(("expert_load", "max_vio/")):
            assert found.values[name] == value, name
        elif not name.startswith("draft_agreement"):
            assert abs(found.values[name] - value) <= 1e-9 * max(1.0, abs(value)), name
    for ours, theirs in zip(found.biases, expected.biases, strict=True):
        assert torch.equal(ours, theirs)


@dataclass
class Walks:
    num_walks: int = 0
    num_segments: int = 0


@contextmanager
def walks_counted() -> Iterator[Walks]:
    """Counts the walks that steps make."""
    counted, batches = Walks(), Walk.batches

    def count(walk: Walk[Any]) -> Iterator[Any]:
        counted.num_walks += 1
        counted.num_segments += walk.num_batches
        return batches(walk)

    with patch.object(Walk, "batches", count):
        yield counted
