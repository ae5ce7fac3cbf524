"""The work of one rank's training step: FLOPs by kind of product, bytes through memory, blocks to launch.

Per token and block, with the widths of train/activation.py and c visible keys on average:

    dense        2 · weights of qkv, output, router, and dense FFN      forward; twice as much backward
    expert       2 · 3 · K · D · F                                      the same
    attention    4 · Q · c                                              forward; 2.5 times as much backward
    softmax      4 · heads · SOFTMAX_WIDTH · c, in units of attention   the same
    head         2 · D · vocabulary at each target                      the same as dense, per loss

A frozen weight (LoRA) needs no product for its own gradient: once as much backward. Activation checkpointing runs the
blocks forward once more, a walk runs all segments but the last of each path once more.

Seconds of a step on rates r:

    products = dense / r.dense + expert / r.expert + (attention + softmax) / r.attention + bytes / r.bandwidth
    step = micro-batches · max(products, blocks · r.block_s) + optimizer's bytes / r.bandwidth
"""

from dataclasses import dataclass

from m2forge.model.config import ModelConfig
from m2forge.plan.gpu import Rates
from m2forge.train.activation import FLOAT32, MicroBatch, block_bytes, outer_bytes
from m2forge.train.config import head_parts
from m2forge.train.memory import TrainingStep, Weight, weights

ATTENTION_BACKWARD = 2.5
"""Products of the backward pass of attention, in those of its forward pass: five instead of two."""
SOFTMAX_WIDTH = 86
"""Head width at which the products take as long as the softmax of the scores: on an H200 attention reaches 579 TFLOPS
with heads of 128 and 413 with heads of 64."""
SAVED_PASSES = 4
"""Number of memory passes of a block's saved tensors: written and read, and their gradients too."""
ROW_PASSES = 8
"""Number of memory passes of the rows sorted by expert: gathered, multiplied, added up, forward and backward."""


@dataclass(frozen=True)
class Work:
    """Work of one step of one rank."""

    dense: float
    expert: float
    attention: float
    softmax: float
    is_flex: bool
    """Whether attention is FlexAttention."""
    num_bytes: float
    """Through memory, forward and backward."""
    num_blocks: float
    """Blocks launched, forward and backward together counted once."""
    update_bytes: float
    """Through memory, in the optimizer's step and the sums of gradients."""

    @property
    def flops(self) -> float:
        return self.dense + self.expert + self.attention

    def seconds(self, rates: Rates) -> float:
        return max(self._device_s(rates), self.num_blocks * rates.block_s) + self.update_bytes / rates.bandwidth

    def parts(self, rates: Rates) -> dict[str, float]:
        """Seconds by component."""
        device_s, host_s = self._device_s(rates), self.num_blocks * rates.block_s
        return {
            "dense products": self.dense / rates.dense,
            "expert products": self.expert / rates.expert,
            "attention": self._attention_s(rates),
            "memory bandwidth": self.num_bytes / rates.bandwidth,
            "kernel launches": max(0.0, host_s - device_s),
            "optimizer": self.update_bytes / rates.bandwidth,
        }

    def _device_s(self, rates: Rates) -> float:
        return (
            self.dense / rates.dense
            + self.expert / rates.expert
            + self._attention_s(rates)
            + self.num_bytes / rates.bandwidth
        )

    def _attention_s(self, rates: Rates) -> float:
        return (self.attention + self.softmax) / (rates.flex_attention if self.is_flex else rates.attention)


def step_work(step: TrainingStep) -> Work:
    network, batch = step.network, step.batch
    are_queries_divided = head_parts(network.attention, step.context) < step.context
    again = _forward_passes(step)
    backward = 1.0 if step.lora is not None else 2.0
    dense = expert = attention = num_bytes = 0.0
    for layer in step.layers:
        work = block_flops(network, layer, batch)
        dense += work["dense"] * (1 + again + backward)
        if step.recompute == "block" and not network.is_sparse(layer):
            # Recomputing stops at the last tensor that the backward pass needs: before the product with W2.
            dense -= 2.0 * batch.num_tokens * network.hidden_size * (network.intermediate_size or 0)
        expert += work["expert"] * (1 + again + backward)
        attention += work["attention"] * (1 + again + ATTENTION_BACKWARD)
        saved = block_bytes(network, layer, batch.num_tokens, step.item_bytes, step.execution)
        num_bytes += (SAVED_PASSES + again) * saved + (ROW_PASSES + 4 * again) * row_bytes(step, layer)
    dense += (1 + again + backward) * batch.num_mtp * module_flops(network, batch)
    dense += (2 + (step.lora is None)) * (1 + batch.num_mtp) * head_flops(network, batch)
    num_bytes += SAVED_PASSES * outer_bytes(network, batch, step.item_bytes, step.execution)
    num_bytes += (1 + batch.num_mtp) * 4 * batch.num_targets * network.vocab_size * step.item_bytes
    num_bytes += weight_traffic(step, again)
    return Work(
        dense=step.num_batches * dense,
        expert=step.num_batches * expert,
        attention=step.num_batches * attention,
        softmax=step.num_batches * attention * SOFTMAX_WIDTH / network.attention.head_dim,
        is_flex=not batch.is_even or step.walk is not None or are_queries_divided,
        num_bytes=step.num_batches * num_bytes,
        num_blocks=step.num_batches * step.num_segments * len(step.layers) * (1 + again / 3),
        update_bytes=update_bytes(step),
    )


def _forward_passes(step: TrainingStep) -> float:
    """Forward passes in addition to the first."""
    again = 1.0 if step.recompute == "block" else 0.0
    if step.walk is not None and step.batch.context > step.walk.segment_tokens:
        num_segments = -(-step.batch.context // step.walk.segment_tokens)
        again += (num_segments - 1) / num_segments
    return again


# -- FLOPs of a forward pass -------------------------------------------------------------------------------------------


def block_flops(network: ModelConfig, layer: int, batch: MicroBatch) -> dict[str, float]:
    """FLOPs of a block's forward pass, by kind."""
    size, attention, moe = network.hidden_size, network.attention, network.moe
    q, kv = attention.q_width, attention.kv_width
    dense, expert = size * (q + 2 * kv) + q * size, 0
    if moe is not None and network.is_sparse(layer):
        dense += size * moe.num_experts
        expert = 3 * size * moe.intermediate_size * moe.top_k
    else:
        dense += 3 * size * (network.intermediate_size or 0)
    return {
        "dense": 2.0 * batch.num_tokens * dense,
        "expert": 2.0 * batch.num_tokens * expert,
        "attention": 4.0 * q * visible_pairs(network, layer, batch),
    }


def visible_pairs(network: ModelConfig, layer: int, batch: MicroBatch) -> float:
    """(query, key) pairs in which the query sees the key, with all paths as long as the longest."""
    window, c = network.attention.window, batch.context
    seen = c if window is None or not network.is_windowed(layer) else min(c, window.size + window.num_sinks)
    return batch.num_tokens / c * (seen * (seen + 1) / 2 + (c - seen) * seen)


def module_flops(network: ModelConfig, batch: MicroBatch) -> float:
    """The projection that joins an MTP module's inputs."""
    return 4.0 * batch.num_tokens * network.hidden_size**2


def head_flops(network: ModelConfig, batch: MicroBatch) -> float:
    return 2.0 * batch.num_targets * network.hidden_size * network.vocab_size


# -- bytes -------------------------------------------------------------------------------------------------------------


def row_bytes(step: TrainingStep, layer: int) -> float:
    """Rows of hidden states sorted by expert."""
    moe, network = step.network.moe, step.network
    if moe is None or not network.is_sparse(layer):
        return 0.0
    return float(step.batch.num_tokens * moe.top_k * network.hidden_size * step.item_bytes)


def weight_traffic(step: TrainingStep, again: float) -> float:
    """Weights read forward and backward, gradients written, in every piece of a micro-batch."""
    found = [weight for weight in weights(step.network, step.lora) if not weight.is_bias]
    read = (2 + again) * sum(_local(step, weight) for weight in found)
    written = sum(_local(step, weight) for weight in found if weight.is_trained)
    return step.num_segments * step.item_bytes * (read + written)


def update_bytes(step: TrainingStep) -> float:
    """AdamW reads and writes master weights and two moments, writes weights, and reads gradients twice; sums of
    gradients are read and written once per micro-batch."""
    trained = sum(weight.held(step.shard) for weight in weights(step.network, step.lora) if weight.is_trained)
    num_batches = step.num_batches * step.num_segments
    gradient = FLOAT32 if step.is_accumulated else step.item_bytes
    sums = num_batches * (step.item_bytes + 2 * FLOAT32) if step.is_accumulated else 0
    return float(trained * (6 * FLOAT32 + step.item_bytes + 2 * gradient + sums))


def _local(step: TrainingStep, weight: Weight) -> int:
    return weight.numel // (step.expert if weight.is_expert else 1)
