"""The memory that a training run takes, computed from the configs alone, without torch.

`training_memory` is the state of the whole network. With w bytes per weight (4 for float32, 2 for bfloat16), n weights,
m of them in the matrices that Muon updates, and b selection biases that have no gradient and are stored in float32:

    weights      n · w + 4 · b
    gradients    n · 4                  float32, summed over the micro-batches of a step
    moments      n · 8                  AdamW: two; Muon: one for its matrices, n · 8 − m · 4
    masters      n · 4                  only below float32

With adapters (LoRA) only their weights are trained: n weights and n' more, gradients, moments and masters of n'.

`rank_memory` is the peak of one rank, at the moment of a step that needs most:

    loss        state, all saved activations, a chunk of logits
    backward    state, the activations of the blocks not yet done, the gradients of those done, one block's temporaries
    optimizer   state, all gradients, what the update needs

A sharded rank holds, of every weight, ⌈rows / shard⌉ rows; FSDP2 gathers a block's weights while it runs, and those
outside the blocks from the first forward pass of a step to its end. Free blocks of the allocator come on top.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from m2forge.errors import ConfigError
from m2forge.model.architecture import adapted_layers
from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.train.activation import (
    FLOAT32,
    Execution,
    MicroBatch,
    block_bytes,
    block_workspace,
    head_gradients,
    index_bytes,
    loss_workspace,
    module_bytes,
    outer_bytes,
    path_workspace,
    shared_bytes,
    stack_bytes,
)
from m2forge.train.config import MachineConfig, OptimizerConfig, PolicyConfig, TuneConfig, WalkConfig, key_copies

OFFLOAD_BYTES = 6 * FLOAT32 << 24
"""Chunks of optimizer state that pass through the device: three tensors of 2²⁴ elements on each of two streams."""

ERROR = 0.08
"""Bound of the prediction's error that a refusal leaves."""
SHARDS = (2, 4, 8, 16, 32, 64, 128, 256)


# -- the weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A tensor of the network."""

    unit: str
    """The FSDP unit that gathers it: `outer`, or a block such as `block 3`."""
    shape: tuple[int, ...]
    is_matrix: bool = True
    """Whether Muon updates it."""
    is_bias: bool = False
    """Whether it is a selection bias, stored in at least float32 and not sharded."""
    is_expert: bool = False
    is_trained: bool = True
    is_module: bool = False
    """Whether it is of an MTP module: in a phase that freezes the main model these alone get a gradient."""

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    def held(self, shard: int) -> int:
        """Elements that the rank with the most of them holds."""
        if self.is_bias:
            return self.numel
        rows, *rest = self.shape
        return -(-rows // shard) * prod(rest)


@lru_cache
def weights(network: ModelConfig, lora: LoRAConfig | None = None) -> tuple[Weight, ...]:
    """All tensors of the network, and of its adapters, which alone are trained where there are any."""
    return tuple(_weights(network, lora))


def _weights(network: ModelConfig, lora: LoRAConfig | None) -> Iterator[Weight]:
    size, trained = network.hidden_size, lora is None

    def outer(*shape: int, is_matrix: bool = False) -> Weight:
        return Weight("outer", shape, is_matrix=is_matrix, is_trained=trained)

    yield outer(network.vocab_size, size)
    if not network.tied_head:
        yield outer(network.vocab_size, size)
    yield outer(size)
    for _ in range(network.num_mtp):
        module = (outer(size), outer(size), outer(size), outer(size, 2 * size, is_matrix=True))
        yield from (replace(weight, is_module=True) for weight in module)
    layers = [*range(network.num_layers), *[network.num_layers - 1] * network.num_mtp]
    for index, layer in enumerate(layers):
        block = _block_weights(network, layer, f"block {index}", trained)
        yield from (replace(weight, is_module=index >= network.num_layers) for weight in block)
    if lora is not None:
        yield from _adapters(network, lora)


def _block_weights(network: ModelConfig, layer: int, unit: str, trained: bool) -> Iterator[Weight]:
    size, attention, moe = network.hidden_size, network.attention, network.moe
    q, kv = attention.q_width, attention.kv_width

    def vector(width: int) -> Weight:
        return Weight(unit, (width,), is_matrix=False, is_trained=trained)

    def matrix(*shape: int, is_expert: bool = False) -> Weight:
        return Weight(unit, shape, is_expert=is_expert, is_trained=trained)

    yield from (vector(size), vector(size), matrix(q + 2 * kv, size), matrix(size, q))
    if attention.qkv_bias:
        yield vector(q + 2 * kv)
    if attention.qk_norm != "none":
        flat = attention.qk_norm == "flat"
        yield from (vector(q if flat else attention.head_dim), vector(kv if flat else attention.head_dim))
    if moe is None or not network.is_sparse(layer):
        width = network.intermediate_size or 0
        yield from (matrix(2 * width, size), matrix(size, width))
        return
    num, width = moe.num_experts, moe.intermediate_size
    yield matrix(num, size)
    if moe.selection_bias:
        learns = trained and moe.bias_update == "gradient"
        yield Weight(unit, (num,), is_matrix=False, is_bias=True, is_trained=learns)
    yield from (matrix(num, 2 * width, size, is_expert=True), matrix(num, size, width, is_expert=True))


def _adapters(network: ModelConfig, lora: LoRAConfig) -> Iterator[Weight]:
    """A and B of every adapted range of rows; those of experts are stacked."""
    attention, size = network.attention, network.hidden_size
    widths = {"q_proj": attention.q_width, "k_proj": attention.kv_width, "v_proj": attention.kv_width}
    seen: set[tuple[str, str]] = set()
    for layer, part in adapted_layers(network, lora).items():
        short = layer.rpartition(".")[2]
        if (part.name, short) in seen:
            continue
        seen.add((part.name, short))
        stacked = () if part.expert is None or network.moe is None else (network.moe.num_experts,)
        dense = network.intermediate_size or 0
        wide = dense if not stacked or network.moe is None else network.moe.intermediate_size
        rows, columns = widths.get(short, wide), size
        if short == "o_proj":
            rows, columns = size, attention.q_width
        elif short in ("down_proj", "w2"):
            rows, columns = size, wide
        for shape in ((lora.rank, columns), (rows, lora.rank)):
            yield Weight("adapters", (*stacked, *shape), is_matrix=False, is_expert=bool(stacked))


# -- the state ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingMemory:
    """Sizes in bytes: of the whole network, or of one rank's share."""

    weights: int
    gradients: int
    moments: int
    masters: int


@lru_cache
def training_memory(
    network: ModelConfig,
    optimizer: OptimizerConfig,
    item_bytes: int,
    lora: LoRAConfig | None = None,
    shard: int = 1,
    freezes_main: bool = False,
) -> TrainingMemory:
    """What training `network` takes with `item_bytes` per weight, on the rank that holds most of `shard` ranks.
    `freezes_main`: frozen weights have no gradient, and keep their moments."""
    size = dict.fromkeys(("weights", "gradients", "moments", "masters"), 0)
    for weight in weights(network, lora):
        num, exact = weight.held(shard), max(FLOAT32, item_bytes)
        own = exact if weight.is_bias else item_bytes
        size["weights"] += num * own
        if weight.is_trained:
            size["gradients"] += num * exact if weight.is_module or not freezes_main else 0
            size["moments"] += num * exact * (1 if optimizer.kind == "muon" and weight.is_matrix else 2)
            size["masters"] += num * exact if own < exact else 0
    return TrainingMemory(**size)


def weight_bytes(network: ModelConfig, item_bytes: int) -> int:
    """The size of the network's weights alone."""
    return training_memory(network, OptimizerConfig(), item_bytes).weights


# -- the peak of a rank ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """The moment of a step that needs most, and bytes by component at that moment."""

    moment: str
    components: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class TrainingStep:
    """What one rank trains in a step, and how."""

    network: ModelConfig
    optimizer: OptimizerConfig
    batch: MicroBatch
    """This rank's part; its paths are those of the whole pack where `context` ranks share one."""
    num_batches: int = 1
    """Micro-batches per step of this rank (gradient accumulation)."""
    item_bytes: int = 2
    device: str = "cuda"
    is_compiled: bool = True
    recompute: str = "none"
    walk: WalkConfig | None = None
    offload: str = "none"
    lora: LoRAConfig | None = None
    shard: int = 1
    """Ranks that hold one copy of the model together: `shard` × `context` of the mesh."""
    expert: int = 1
    context: int = 1

    @property
    def execution(self) -> Execution:
        if self.device == "cpu" and self.item_bytes == FLOAT32:
            return "native"
        return "compiled" if self.is_compiled else "plain"

    @property
    def piece(self) -> MicroBatch:
        """What runs at once: the micro-batch, or one segment of a walk."""
        return self.batch if self.walk is None else self.batch.cut(-(-self.walk.segment_tokens // self.context))

    @property
    def num_segments(self) -> int:
        """Segments of a micro-batch that run one after another: of rows, pieces of documents up to `segment_tokens`."""
        return 1 if self.walk is None else -(-self.batch.num_tokens * self.context // self.walk.segment_tokens)

    @property
    def is_accumulated(self) -> bool:
        return self.num_batches * self.num_segments > 1

    @property
    def layers(self) -> list[int]:
        """The layer whose shape each block has: the main model's, then those of the modules that run."""
        network = self.network
        return [*range(network.num_layers), *[network.num_layers - 1] * self.batch.num_mtp]


def machine_step(
    machine: MachineConfig,
    device: str,
    network: ModelConfig,
    optimizer: OptimizerConfig,
    batch: MicroBatch,
    num_batches: int = 1,
    lora: LoRAConfig | None = None,
    num_ranks: int = 1,
) -> TrainingStep:
    """What one of `num_ranks` trains on `device`, as the machine's configuration says."""
    walk, mesh = machine.walk_config, machine.mesh.of_ranks(num_ranks)
    # Ranks of `context` train a part of each pack.
    batch = batch.cut(-(-batch.num_tokens // mesh.context))
    num_batches = -(-num_batches * mesh.context // num_ranks)
    dtype = {"cuda": "bfloat16"}.get(device, "float32") if machine.dtype == "auto" else machine.dtype
    return TrainingStep(
        network,
        optimizer,
        batch,
        num_batches,
        item_bytes=2 if dtype == "bfloat16" else FLOAT32,
        device=device,
        is_compiled=machine.compile_blocks == "always" or (machine.compile_blocks == "auto" and device == "cuda"),
        recompute="block" if "block" in (machine.recompute, walk and walk.recompute) else "none",
        walk=walk,
        offload=machine.offload,
        lora=lora,
        shard=mesh.shape[1],
        expert=mesh.expert,
        context=mesh.context,
    )


def policy_step(config: TuneConfig, network: ModelConfig, policy: PolicyConfig, num_ranks: int = 1) -> TrainingStep:
    """The least that one of `num_ranks` trains on CUDA in a step over trees: packs are no larger than the attempts are,
    so this is one short pack."""
    tokens = min(policy.bucket_tokens, policy.pack_tokens)
    batch = MicroBatch(tokens, tokens, tokens, network.num_mtp if policy.mtp_weight else 0, config.lora is None)
    machine, optimizer = config.machine, config.optimizer
    return machine_step(machine, "cuda", network, optimizer, batch, lora=config.lora, num_ranks=num_ranks)


def refuse_unfit(step: TrainingStep, free_bytes: float, name: str) -> None:
    """Raise if a rank needs clearly more than `free_bytes`; the message names a setting that fits, if there is one."""
    memory = rank_memory(step)
    if memory.total * (1 - ERROR) <= free_bytes:
        return
    largest = sorted(memory.components.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{part} {size / 1e9:.1f} GB" for part, size in largest)
    fitting = next((words for words, other in _alternatives(step) if rank_memory(other).total <= free_bytes), None)
    remedy = "use more or larger GPUs; m2forge plan lists layouts" if fitting is None else f"set {fitting}"
    raise ConfigError(
        f"{name}: a rank needs {memory.total / 1e9:.1f} GB of GPU memory ({memory.moment}: {parts}), and "
        f"{free_bytes / 1e9:.1f} GB are free; {remedy}"
    )


def _alternatives(step: TrainingStep) -> Iterator[tuple[str, TrainingStep]]:
    """Settings that need less memory, those that cost least time first."""
    prefix = "train.machine."
    yield f'{prefix}recompute = "block"', replace(step, recompute="block", walk=None)
    for stack in ("device", "host"):
        for inside in ("none", "block"):
            walk = WalkConfig.model_validate({"stack": stack, "recompute": inside})
            words = f'{prefix}recompute = "walk", walk.recompute = "{inside}", walk.stack = "{stack}"'
            walked = replace(step, recompute=inside, walk=walk)
            yield words, walked
            yield f'{words} and {prefix}offload = "host"', replace(walked, offload="host")
    for shard in SHARDS:
        if shard > step.shard:
            sharded = replace(step, shard=shard, recompute="block", walk=None)
            yield f'{prefix}mesh.shard = {shard} and {prefix}recompute = "block"', sharded


def rank_memory(step: TrainingStep) -> RankMemory:
    """The peak of the rank that holds most."""
    moments = _moments(step)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return RankMemory(moment, {name: size for name, size in moments[moment].items() if size})


def _moments(step: TrainingStep) -> dict[str, dict[str, int]]:
    network, batch, w = step.network, step.piece, step.item_bytes
    frozen = batch.freezes_main
    state = training_memory(network, step.optimizer, w, step.lora, step.shard, frozen)
    on_device = step.offload == "none"
    kv_ranks = step.context // key_copies(network.attention, step.context)
    always = {
        "weights": state.weights,
        "master weights": state.masters if on_device else 0,
        "moments": state.moments if on_device else 0,
    }
    if step.walk is not None and step.walk.stack == "device":
        always["KV of the walk"] = stack_bytes(network, step.batch, step.walk, w) // kv_ranks
    path = 0 if step.walk is None else path_workspace(network, step.batch, step.walk, w) // kv_ranks
    units = _Units(step)
    # Below float32 a micro-batch's gradients are added to float32 sums; otherwise the sums are the gradients.
    sums = state.gradients if step.is_accumulated else 0
    outer = outer_bytes(network, batch, w, step.execution) + batch.num_tokens * network.hidden_size * w
    outer += index_bytes(network, batch, step.context) if step.context > 1 else 0
    adapted = units.adapted
    saved = [_saved(step, index, layer) for index, layer in enumerate(step.layers)]
    gathered = units.outer_gathered
    moments = {
        "loss": always
        | {
            "gradients": sums,
            "activations": sum(saved) + outer + adapted - head_gradients(network, batch, w),
            "logits and loss": head_gradients(network, batch, w) + loss_workspace(network, batch, w, step.device),
            "gathered weights": gathered + units.gathered(len(saved) - 1),
        }
    }
    done = units.gradients("outer")
    for index in reversed(range(network.num_layers if frozen else 0, len(saved))):
        layer = step.layers[index]
        whole = block_bytes(network, layer, batch.num_tokens, w, step.execution) if step.recompute == "block" else 0
        moments[f"backward of block {index}"] = always | {
            "gradients": sums + done + units.gradients(f"block {index}"),
            "activations": sum(saved[: index + 1]) + outer + adapted - head_gradients(network, batch, w),
            "block workspace": whole
            + path
            + block_workspace(network, layer, batch.num_tokens, w)
            + units.reduced(index),
            "gathered weights": gathered + units.gathered(index) + units.gathered(index - 1),
        }
        done += units.held_gradients(f"block {index}")
    moments["optimizer"] = always | {
        "gradients": sums or done,
        "optimizer workspace": _update_workspace(step, units),
    }
    return moments


def _saved(step: TrainingStep, index: int, layer: int) -> int:
    """Bytes that the forward pass of a block leaves behind."""
    network, batch, w = step.network, step.piece, step.item_bytes
    module = index >= network.num_layers
    if batch.freezes_main and not module:
        return 0
    if step.recompute == "block":
        return batch.num_tokens * network.hidden_size * w
    extra = module_bytes(network, batch.num_tokens, w, step.execution) if module else 0
    if step.context > 1:
        extra += shared_bytes(network, batch.num_tokens, w, step.context)
    return block_bytes(network, layer, batch.num_tokens, w, step.execution) + extra


class _Units:
    """Bytes of gradients and gathered weights by FSDP unit."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._weights: dict[str, list[Weight]] = {}
        for weight in weights(step.network, step.lora):
            self._weights.setdefault(weight.unit, []).append(weight)
        self._frozen = step.batch.freezes_main
        self.adapted = self._adapted()

    @property
    def outer_gathered(self) -> int:
        return self._gathered("outer")

    def gathered(self, index: int) -> int:
        return self._gathered(f"block {index}")

    def _gathered(self, unit: str) -> int:
        if self._step.shard == 1:
            return 0
        return sum(
            weight.numel // (self._step.expert if weight.is_expert else 1) * self._step.item_bytes
            for weight in self._weights.get(unit, ())
            if not weight.is_bias
        )

    def gradients(self, unit: str) -> int:
        """Whole gradients of a unit, as the backward pass writes them."""
        return sum(
            weight.numel // (self._step.expert if weight.is_expert else 1) * self._step.item_bytes
            for weight in self._weights.get(unit, ())
            if self._gets_gradient(weight)
        )

    def held_gradients(self, unit: str) -> int:
        """What stays of them until the optimizer's step, or until they are added to the sums."""
        return sum(
            weight.held(self._step.shard) * self._step.item_bytes
            for weight in self._weights.get(unit, ())
            if self._gets_gradient(weight)
        )

    def reduced(self, index: int) -> int:
        """A block's gradients in float32 on their way through the reduce-scatter."""
        if self._step.shard == 1:
            return 0
        return self.gradients(f"block {index}") // self._step.item_bytes * FLOAT32

    def largest(self) -> int:
        return max(weight.numel for found in self._weights.values() for weight in found if self._gets_gradient(weight))

    def _gets_gradient(self, weight: Weight) -> bool:
        return weight.is_trained and (weight.is_module or not self._frozen)

    def _adapted(self) -> int:
        """Merged weights W', which every adapted layer saves."""
        step = self._step
        if step.lora is None:
            return 0
        total, network = 0, step.network
        for layer, part in adapted_layers(network, step.lora).items():
            short = layer.rpartition(".")[2]
            attention, size = network.attention, network.hidden_size
            widths = {"q_proj": attention.q_width, "k_proj": attention.kv_width, "v_proj": attention.kv_width}
            wide = network.intermediate_size or 0
            if part.expert is not None and network.moe is not None:
                wide = network.moe.intermediate_size
            total += size * (attention.q_width if short == "o_proj" else widths.get(short, wide)) * step.item_bytes
        return total


def _update_workspace(step: TrainingStep, units: _Units) -> int:
    """AdamW on CUDA updates in place. Muon orthogonalizes one weight at a time: three float32 copies and three of its
    products. A CPU's AdamW scales a float32 copy of the gradients."""
    if step.optimizer.kind == "muon":
        return units.largest() * 6 * FLOAT32
    if step.offload == "host":
        return OFFLOAD_BYTES
    if step.device == "cpu":
        frozen = step.batch.freezes_main
        return training_memory(step.network, step.optimizer, step.item_bytes, step.lora, step.shard, frozen).gradients
    return 0
