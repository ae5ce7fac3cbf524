"""The H200's rates explain the measured steps that docs/results.md lists."""

from dataclasses import replace

import pytest

from m2forge.model.config import ModelConfig
from m2forge.model.preset import preset
from m2forge.plan.gpu import DATASHEETS, MEASURED, find_gpu
from m2forge.plan.work import SAVED_PASSES, Work, head_flops, step_work
from m2forge.train.activation import MicroBatch, outer_bytes
from m2forge.train.config import OptimizerConfig
from m2forge.train.memory import TrainingStep, rank_memory, weights

NUM_TOKENS = 32_768
MINI, LAYERS_OF_M2 = preset("m2-mini"), preset("m2").with_layers(4)


def whole(context: int, network: ModelConfig = MINI) -> Work:
    return step_work(TrainingStep(network, OptimizerConfig(), MicroBatch(NUM_TOKENS, context, NUM_TOKENS)))


def head() -> Work:
    """The head of M2 alone: its three products, four passes over the logits, its weight read twice and written once."""
    batch, vocab = MicroBatch(NUM_TOKENS, NUM_TOKENS, NUM_TOKENS), LAYERS_OF_M2.vocab_size
    num_bytes = 4 * NUM_TOKENS * vocab * 2 + 3 * vocab * LAYERS_OF_M2.hidden_size * 2
    return Work(3 * head_flops(LAYERS_OF_M2, batch), 0.0, 0.0, num_bytes, 0.0, 0.0)


def layers(context: int) -> Work:
    """Four layers of M2 alone, without the head and what lies around the layers."""
    found, batch = whole(context, LAYERS_OF_M2), MicroBatch(NUM_TOKENS, context, NUM_TOKENS)
    around = 4 * NUM_TOKENS * LAYERS_OF_M2.vocab_size * 2 + SAVED_PASSES * outer_bytes(
        LAYERS_OF_M2, batch, 2, "compiled"
    )
    around += 3 * 2 * sum(weight.numel for weight in weights(LAYERS_OF_M2) if weight.unit == "outer")
    dense = found.dense - head().dense
    return replace(found, dense=dense, num_bytes=found.num_bytes - around, update_bytes=0.0)


MEASURED_STEPS = {
    "m2-mini, forward and backward": (replace(whole(4096), update_bytes=0.0), NUM_TOKENS / 237_744),
    "m2-mini, the training step": (whole(4096), NUM_TOKENS / 219_030),
    "layers of M2, 4 x 8192": (layers(8192), 0.3376),
    "layers of M2, 1 x 32768": (layers(32_768), 0.5922),
    "head of M2": (head(), 0.2132),
}
"""Work and seconds, from docs/results.md."""


@pytest.mark.parametrize("name", MEASURED_STEPS)
def test_rates_explain_the_measured_steps(name: str) -> None:
    work, seconds = MEASURED_STEPS[name]
    assert work.seconds(MEASURED["H200"]) == pytest.approx(seconds, rel=0.034)


def test_memory_is_near_the_measured_step_of_m2_mini() -> None:
    """31.7 GiB were measured on the H200, in the training step of docs/results.md."""
    step = TrainingStep(MINI, OptimizerConfig(), MicroBatch(NUM_TOKENS, 4096, NUM_TOKENS))
    assert rank_memory(step).total == pytest.approx(31.7 * 2**30, rel=0.03)


def test_other_gpus_say_that_they_are_estimated() -> None:
    for name in DATASHEETS.keys() - MEASURED.keys():
        assert find_gpu(name).rates.origin.startswith("estimated")
