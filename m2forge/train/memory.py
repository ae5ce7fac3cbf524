"""The memory that training state takes, computed from the configs alone, without torch.

With w bytes per weight (4 for float32, 2 for bfloat16), n weights, m of them in the matrices that Muon updates, and b
selection biases that have no gradient and are stored in float32:

    weights      n · w + 4 · b
    gradients    n · 4                  float32, summed over the micro-batches of a step
    moments      n · 8                  AdamW: two; Muon: one for its matrices, n · 8 − m · 4
    masters      n · 4                  only below float32

With adapters (LoRA) only their weights are trained: n weights and n' more, gradients, moments and masters of n'.

The gradients of one micro-batch, activations, logits and the allocator's free blocks come on top.
"""

from dataclasses import dataclass

from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.model.count import adapter_parameters, block_parameters, count, qkv_biases
from m2forge.train.config import OptimizerConfig

FLOAT32 = 4


@dataclass(frozen=True)
class TrainingMemory:
    """Sizes in bytes, of the whole network."""

    weights: int
    gradients: int
    moments: int
    masters: int


def training_memory(
    network: ModelConfig, optimizer: OptimizerConfig, item_bytes: int, lora: LoRAConfig | None = None
) -> TrainingMemory:
    """What training `network` takes with `item_bytes` per weight."""
    if lora is not None:
        num = adapter_parameters(network, lora)
        masters = num * FLOAT32 if item_bytes < FLOAT32 else 0
        weights = weight_bytes(network, item_bytes) + num * item_bytes
        return TrainingMemory(weights, num * FLOAT32, 2 * num * FLOAT32, masters)
    sizes = {part.name: part.total for part in count(network).components}
    biases, vectors = _vectors(network)
    learned_biases = biases if network.moe is not None and network.moe.bias_update == "gradient" else 0
    learned = sum(sizes.values()) - biases
    num_trained = learned + learned_biases
    # Matrices outside embedding and head: all that are neither norms nor biases.
    muon = learned - vectors - sizes["embedding"] - sizes["head"] if optimizer.kind == "muon" else 0
    return TrainingMemory(
        weights=learned * item_bytes + biases * max(FLOAT32, item_bytes),
        gradients=num_trained * FLOAT32,
        moments=(2 * num_trained - muon) * FLOAT32,
        masters=learned * FLOAT32 if item_bytes < FLOAT32 else 0,
    )


def weight_bytes(network: ModelConfig, item_bytes: int) -> int:
    """The size of the network's weights alone."""
    return training_memory(network, OptimizerConfig(), item_bytes).weights


def _vectors(network: ModelConfig) -> tuple[int, int]:
    """(selection biases, norm weights and biases of projections) of all layers and MTP modules."""
    last, moe = network.num_layers - 1, network.moe
    layers = [*range(network.num_layers), *[last] * network.num_mtp]
    num_biases = moe.num_experts if moe is not None and moe.selection_bias else 0
    biases = sum(num_biases for layer in layers if network.is_sparse(layer))
    # Beside those of its block, the main model has a final norm and each module three.
    norms = network.hidden_size * (1 + 3 * network.num_mtp)
    of_blocks = sum(block_parameters(network, layer)["norms"] + qkv_biases(network) for layer in layers)
    return biases, norms + of_blocks
