"""Predicted FLOPs equal those that torch counts in the real training step."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from m2forge.kernels import expert
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.plan.gpu import DATASHEETS, find_gpu
from m2forge.plan.measure import fit, measure_step, random_pack
from m2forge.plan.work import Work, block_flops, step_work
from m2forge.train.activation import MicroBatch
from m2forge.train.config import OptimizerConfig, WalkConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.memory import TrainingStep
from tests.model.draw import SMALL

DENSE = SMALL.model_copy(update={"family": "llama", "moe": None, "intermediate_size": 96, "num_mtp": 0})
NUM_TOKENS = 24


def make_step(network: ModelConfig, recompute: str = "none") -> TrainingStep:
    batch = MicroBatch(NUM_TOKENS, NUM_TOKENS, NUM_TOKENS, network.num_mtp)
    return TrainingStep(
        network,
        OptimizerConfig(),
        batch,
        item_bytes=8,
        device="cpu",
        is_compiled=False,
        recompute=recompute,
    )


class GroupedProducts:
    """Counts the experts' products, which torch's counter does not see inside their operator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flops = 0
        for name in ("grouped_rows", "grouped_weights"):
            monkeypatch.setattr(expert, name, self._counting(getattr(expert, name)))

    def _counting(self, product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        def run(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[-1]
            return product(a, b, ends)

        return run


Shape = tuple[int, int, int, int]


def two_products(q: Shape, k: Shape, *_: object, **__: object) -> int:
    return 2 * 2 * prod(q) * k[2]


def five_products(_: Shape, q: Shape, k: Shape, *__: object, **___: object) -> int:
    return 5 * 2 * prod(q) * k[2]


def counted(step: TrainingStep) -> int:
    model = build(step.network, dtype=torch.float64)
    model.recompute = "block" if step.recompute == "block" else "none"
    engine = TrainEngine(model, step.optimizer)
    # Torch's counter does not know the attention of a CPU.
    aten = torch.ops.aten
    known = {
        aten._scaled_dot_product_flash_attention_for_cpu: two_products,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: five_products,
    }
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        engine.step_rows([random_pack(step, 0)], lr=1e-3, mtp_weight=0.1)
    return int(counter.get_total_flops())


def unmasked(work: Work) -> float:
    """FLOPs of attention as torch counts them: for every pair of a query and a key, masked or not."""
    return work.attention * NUM_TOKENS**2 / (NUM_TOKENS * (NUM_TOKENS + 1) / 2)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("network", [SMALL, DENSE], ids=["experts", "dense"])
def test_flops_are_those_that_torch_counts(
    network: ModelConfig, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped, step = GroupedProducts(monkeypatch), make_step(network, recompute)
    total = counted(step)
    work = step_work(step)
    assert grouped.flops == work.expert
    assert total == work.dense + unmasked(work)


def test_a_walk_runs_all_but_the_last_segment_again() -> None:
    batch = MicroBatch(1024, 1024, 1024)
    whole = step_work(TrainingStep(DENSE, OptimizerConfig(), batch))
    walked = step_work(TrainingStep(DENSE, OptimizerConfig(), batch, walk=WalkConfig(segment_tokens=256)))
    assert walked.attention == pytest.approx(whole.attention * (3.5 + 0.75) / 3.5)


def test_a_fit_finds_the_rates_of_its_steps() -> None:
    start = find_gpu("H200").rates
    true = replace(start, dense=start.dense * 0.7, attention=start.attention * 1.4)
    steps = [
        TrainingStep(network, OptimizerConfig(), MicroBatch(tokens, context, tokens))
        for network, tokens, context in ((DENSE, 1 << 20, 64), (DENSE, 1 << 20, 1 << 19), (SMALL, 1 << 20, 64))
    ]
    records = [(step, step_work(step).seconds(true)) for step in steps]
    found = fit(records, start, "a test")
    for step, seconds in records:
        assert step_work(step).seconds(found) == pytest.approx(seconds, rel=0.02)


def test_a_step_is_measured_on_the_cpu() -> None:
    step = replace(make_step(DENSE), item_bytes=4)
    assert measure_step(step, torch.device("cpu"), num_steps=1).seconds > 0


@given(st.sampled_from(sorted(DATASHEETS)), st.integers(1, 1 << 20))
def test_more_tokens_never_take_less_time(name: str, num_tokens: int) -> None:
    rates = find_gpu(name).rates
    few, more = (
        step_work(TrainingStep(SMALL, OptimizerConfig(), MicroBatch(num, 1, num))).seconds(rates)
        for num in (num_tokens, num_tokens + 1)
    )
    assert few <= more


def test_parts_add_up_to_the_step() -> None:
    rates = find_gpu("H200").rates
    for network in (SMALL, DENSE):
        work = step_work(TrainingStep(network, OptimizerConfig(), MicroBatch(4096, 512, 4096)))
        assert sum(work.parts(rates).values()) == pytest.approx(work.seconds(rates))
    assert block_flops(SMALL, 0, MicroBatch(2, 2, 2))["expert"] > 0
