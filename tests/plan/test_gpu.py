"""The H200's rates explain the measured steps that docs/results.md lists."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from m2forge.model.config import ModelConfig
from m2forge.model.preset import preset
from m2forge.plan.gpu import DATASHEETS, ERRORS, MEASURED, find_gpu
from m2forge.plan.work import SAVED_PASSES, Work, head_flops, step_work
from m2forge.train.activation import MicroBatch, outer_bytes
from m2forge.train.config import OptimizerConfig, WalkConfig
from m2forge.train.memory import TrainingStep, rank_memory, weights

NUM_TOKENS = 32_768
MINI, M2 = preset("m2-mini").model_copy(update={"max_context": 1 << 18}), preset("m2")


def work(network: ModelConfig, num_tokens: int, context: int, walk: WalkConfig | None = None) -> Work:
    batch = MicroBatch(num_tokens, context, num_tokens, network.num_mtp, is_even=num_tokens % context == 0)
    return step_work(TrainingStep(network, OptimizerConfig(), batch, walk=walk))


def layers_of_m2(context: int) -> Work:
    """Four layers alone, forward and backward, without the head and what lies around the layers."""
    network = M2.with_layers(4).model_copy(update={"num_mtp": 0})
    found, batch = work(network, NUM_TOKENS, context), MicroBatch(NUM_TOKENS, context, NUM_TOKENS)
    around = 4 * NUM_TOKENS * network.vocab_size * 2 + SAVED_PASSES * outer_bytes(network, batch, 2, "compiled")
    around += 3 * 2 * sum(weight.numel for weight in weights(network) if weight.unit == "outer")
    dense = found.dense - 3 * head_flops(network, batch)
    return replace(found, dense=dense, num_bytes=found.num_bytes - around, update_bytes=0.0)


MEASURED_STEPS = {
    "m2-mini, 8 x 4096": (work(MINI, NUM_TOKENS, 4096), 0.1475),
    "m2-mini, documents of 6000": (work(MINI, NUM_TOKENS, 6000), 0.1785),
    "m2-mini x 6 layers, 1 x 32768": (work(MINI.with_layers(6), NUM_TOKENS, NUM_TOKENS), 0.1786),
    "m2-mini x 6 layers, 64K, walk": (work(MINI.with_layers(6), 65_536, 65_536, WalkConfig()), 0.9542),
    "M2 x 1 layer, 2 x 8192": (work(M2.with_layers(1), 16_384, 8192), 0.194),
    "layers of M2, 4 x 8192": (layers_of_m2(8192), 0.3376),
    "layers of M2, 1 x 32768": (layers_of_m2(32_768), 0.5922),
}
"""Work and seconds, from docs/results.md."""


@pytest.mark.parametrize("name", MEASURED_STEPS)
def test_rates_explain_the_measured_steps(name: str) -> None:
    done, seconds = MEASURED_STEPS[name]
    assert done.seconds(MEASURED["H200"]) == pytest.approx(seconds, rel=0.034)


def test_memory_is_near_the_measured_step_of_m2_mini() -> None:
    """31.7 GiB were measured on the H200, in the training step of docs/results.md."""
    step = TrainingStep(MINI, OptimizerConfig(), MicroBatch(NUM_TOKENS, 4096, NUM_TOKENS))
    assert rank_memory(step).total == pytest.approx(31.7 * 2**30, rel=0.03)


def test_the_errors_are_those_of_the_results() -> None:
    text = (Path(__file__).parents[2] / "docs/results.md").read_text(encoding="utf-8")
    _, _, section = text.partition("### Plan against the H200")
    table = section.partition("\n## ")[0]
    tried = re.findall(r"([+-][\d.]+)% \| [\d.]+ \| [\d.]+ \| ([+-][\d.]+)%", table)
    assert len(tried) == ERRORS.num_tried
    assert max(abs(float(time)) for time, _ in tried) == pytest.approx(100 * ERRORS.step_time)
    assert f"| largest error of memory, all seventeen | {ERRORS.memory:.1%} |" in table


def test_other_gpus_say_that_they_are_estimated() -> None:
    for name in DATASHEETS.keys() - MEASURED.keys():
        assert find_gpu(name).rates.origin.startswith("estimated")
