"""Layouts of a run over GPUs: memory, step time and cost of each; those that fit come first, by speed.

A layout is a mesh (replicate × shard × context = GPUs; `expert` divides shard × context) and a kind of activation
checkpointing. Bytes that a rank receives in a step, with w bytes per element, b weights in blocks, t of them trained, D
hidden size, Q and V the widths of queries and of keys, R ranks of the axis:

    shard        (R − 1) / R · (passes · b · w + outer weights · w, gathered  + backward passes · t · 4, reduced)
    replicate    2 · (R − 1) / R · t / shard · 4, once per step
    expert       (R − 1) / R · passes · rows · D · w    a row for each token and rank that any of its experts lie on,
                                                        with the experts' numbers and weights beside it
    context      passes · tokens of the rank · ((P − 1) / P · 2 Q + (R − 1) / R · 2 C · V) · w    P parts of the heads,
                                                        C ranks that receive a key/value head;
                 and (R − 1) / R · 2 · tokens of the rank · R · D · w for each MTP module

R of `shard` is shard × context, and for the weights of experts that divided by `expert`. FSDP2 gathers the next block
while one runs, so shards cost time only where their link is slower than the compute, and sums over their replicas where
it is slower than the last backward pass; the exchange of tokens between experts, of heads between ranks that share a
pack, and the sum over unsharded replicas always do. These assumptions are the plan's: more than one GPU was never
measured.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import comb

from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.plan.gpu import GPU, NODE_GPUS
from m2forge.plan.work import step_work
from m2forge.train.activation import FLOAT32, INT64, MicroBatch
from m2forge.train.config import OptimizerConfig, WalkConfig, head_parts, key_copies
from m2forge.train.memory import RankMemory, TrainingStep, Weight, rank_memory, weights

RECOMPUTE = ("none", "block", "walk", "walk and block", "walk, stack on host", "walk and block, stack on host")
"""`train.machine.recompute`; of a walk also `walk.recompute` and `walk.stack`."""
FREE_SHARE = 0.06
"""Share of a GPU's memory that a layout must leave: the allocator's free blocks and other libraries'. Our choice."""
BACKWARD_SHARE = 2 / 3
"""The backward pass' share of a training step's compute."""
SLOW_LINK = 2.0
"""Ratio of gathering to compute from which pipeline parallelism would be better."""


@dataclass(frozen=True)
class Workload:
    """The training workload, independent of the layout."""

    name: str
    network: ModelConfig
    batch: MicroBatch
    packs_per_step: int | None = None
    """Packs of a step, over all ranks; None: one for each rank, or each group of ranks that share packs."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoRAConfig | None = None
    offload: str = "none"
    walk: WalkConfig = field(default_factory=WalkConfig)


@dataclass(frozen=True)
class ParallelLayout:
    replicate: int
    shard: int
    context: int
    expert: int
    recompute: str

    @property
    def num_gpus(self) -> int:
        return self.replicate * self.holders

    @property
    def holders(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.shard * self.context

    def __str__(self) -> str:
        axes = {"replicate": self.replicate, "shard": self.shard, "context": self.context, "expert": self.expert}
        mesh = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one GPU"
        return f"{mesh}, recompute {self.recompute}"


@dataclass(frozen=True)
class Plan:
    layout: ParallelLayout
    memory: RankMemory
    capacity: float
    """Bytes of a GPU's memory."""
    step_s: float
    tokens_per_s: float
    parts: dict[str, float]
    """Seconds of a step by component; of links that compute hides, only the exposed time."""
    link_bytes: dict[str, float]
    """Bytes that a rank receives per step, by axis."""
    gather_s: float
    """Seconds of gathering and reducing shards, hidden or not."""
    compute_s: float
    dollars_per_million: float

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity * (1 - FREE_SHARE)

    @property
    def bottleneck(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def reason(self) -> str:
        """Why it does not fit."""
        largest = sorted(self.memory.components.items(), key=lambda item: -item[1])[:2]
        named = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in largest)
        have = self.capacity * (1 - FREE_SHARE) / 1e9
        return f"needs {self.memory.total / 1e9:.1f} of {have:.1f} GB ({named})"


def list_layouts(network: ModelConfig, num_gpus: int, offered: tuple[str, ...] = RECOMPUTE) -> Iterator[ParallelLayout]:
    num_experts = 1 if network.moe is None else network.moe.num_experts
    for holders in _divisors(num_gpus):
        for context in _divisors(holders):
            for expert in _divisors(holders):
                if num_experts % expert == 0:
                    for recompute in offered:
                        yield ParallelLayout(num_gpus // holders, holders // context, context, expert, recompute)


def make_plans(workload: Workload, gpu: GPU, num_gpus: int, price: float, network_rate: float) -> list[Plan]:
    """All layouts, best first: those that fit by tokens per second, then the others by memory."""
    # A path that fits into one segment is not walked.
    offered = RECOMPUTE if workload.batch.context > workload.walk.segment_tokens else RECOMPUTE[:2]
    plans = [
        make_plan(workload, layout, gpu, price, network_rate)
        for layout in list_layouts(workload.network, num_gpus, offered)
    ]
    return sorted(plans, key=lambda plan: (not plan.fits, -plan.tokens_per_s if plan.fits else plan.memory.total))


def rank_step(workload: Workload, layout: ParallelLayout) -> TrainingStep:
    """One rank's share of a training step."""
    num_batches = 1
    if workload.packs_per_step is not None:
        num_batches = -(-workload.packs_per_step * layout.context // layout.num_gpus)
    walk = None
    if layout.recompute.startswith("walk"):
        stack = "host" if layout.recompute.endswith("host") else "device"
        inside = "block" if "and block" in layout.recompute else "none"
        walk = workload.walk.model_copy(update={"stack": stack, "recompute": inside})
    return TrainingStep(
        workload.network,
        workload.optimizer,
        workload.batch.cut(-(-workload.batch.num_tokens // layout.context)),
        num_batches,
        recompute=layout.recompute if walk is None else walk.recompute,
        walk=walk,
        offload=workload.offload,
        lora=workload.lora,
        shard=layout.holders,
        expert=layout.expert,
        context=layout.context,
    )


def make_plan(workload: Workload, layout: ParallelLayout, gpu: GPU, price: float, network_rate: float) -> Plan:
    """`network_rate`: bytes per second of a GPU to other nodes."""
    step, num_gpus = rank_step(workload, layout), layout.num_gpus
    work = step_work(step)
    traffic = link_bytes(step, layout)

    def seconds(axis: str, last: int) -> float:
        """The time that an axis' bytes take between neighbours up to `last` ranks apart."""
        return traffic[axis] / (gpu.datasheet.nvlink if last <= NODE_GPUS else network_rate)

    gather_s, replicas_s = seconds("shard", layout.holders), seconds("replicate", num_gpus)
    parts = work.parts(gpu.rates)
    compute_s = sum(parts.values())
    last_s = BACKWARD_SHARE * compute_s / (step.num_batches * step.num_segments)
    parts["links between shards"] = max(0.0, gather_s - compute_s)
    parts["links between experts"] = seconds("expert", layout.expert)
    parts["links of shared packs"] = seconds("context", layout.context)
    parts["links between replicas"] = replicas_s if layout.holders == 1 else max(0.0, replicas_s - last_s)
    step_s = sum(parts.values())
    num_packs = num_gpus // layout.context if workload.packs_per_step is None else workload.packs_per_step
    tokens_per_s = num_packs * workload.batch.num_tokens / step_s
    return Plan(
        layout=layout,
        memory=rank_memory(step),
        capacity=gpu.datasheet.memory,
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        parts=parts,
        link_bytes=traffic,
        gather_s=gather_s,
        compute_s=compute_s,
        dollars_per_million=num_gpus * price / 3600 / tokens_per_s * 1e6,
    )


def link_bytes(step: TrainingStep, layout: ParallelLayout) -> dict[str, float]:
    """Bytes that a rank receives in a step, by axis, with every expert equally likely."""
    traffic = dict.fromkeys(("replicate", "shard", "expert", "context"), 0.0)
    num_backward = step.num_batches * step.num_segments
    num_forward = num_backward * (2 if step.walk is not None else 1)
    exact = max(FLOAT32, step.item_bytes)
    for weight, count in _alike(step.network, step.lora).items():
        numel = count * _local(weight.numel, weight.is_expert, step)
        num_gathers = 1 if weight.unit == "outer" else num_forward + num_backward
        size = num_gathers * numel * step.item_bytes
        size += num_backward * numel * exact if weight.is_trained else 0
        traffic["shard"] += size * _others(_local(layout.holders, weight.is_expert, step))
        if weight.is_trained:
            traffic["replicate"] += 2 * count * weight.held(layout.holders) * exact * _others(layout.replicate)
    # Rows are sent in the forward pass, their gradients in the backward pass.
    passes = 2 + (step.recompute == "block") + (step.walk is not None)
    num_tokens, size = step.num_batches * step.batch.num_tokens, step.network.hidden_size * step.item_bytes
    moe, attention = step.network.moe, step.network.attention
    if layout.expert > 1 and moe is not None:
        num_sparse = sum(step.network.is_sparse(layer) for layer in step.layers)
        elsewhere = comb(moe.num_experts * (layout.expert - 1) // layout.expert, moe.top_k)
        rows = num_tokens * layout.expert * (1 - elsewhere / comb(moe.num_experts, moe.top_k)) * num_sparse
        choice = moe.top_k * ((passes - 1) * INT64 + passes * FLOAT32)
        traffic["expert"] = rows * (2 * passes * size + choice) * _others(layout.expert)
    if layout.context > 1:
        queries = 2 * attention.q_width * _others(head_parts(attention, layout.context))
        keys = 2 * key_copies(attention, layout.context) * attention.kv_width * _others(layout.context)
        parents = step.batch.num_mtp * layout.context * num_tokens * size * _others(layout.context)
        exchanged = len(step.layers) * num_tokens * (queries + keys) * step.item_bytes
        traffic["context"] = passes * exchanged + 2 * parents
    return traffic


@lru_cache
def _alike(network: ModelConfig, lora: LoRAConfig | None) -> Counter[Weight]:
    """The weights that FSDP2 shards, those of different blocks counted as one."""
    found = (weight for weight in weights(network, lora) if not weight.is_bias)
    return Counter(weight if weight.unit == "outer" else replace(weight, unit="block") for weight in found)


def _others(num_ranks: int) -> float:
    """The share of a whole that a rank receives from the other ranks."""
    return (num_ranks - 1) / num_ranks


def needs_pipeline(plans: list[Plan]) -> str | None:
    """The case that pipeline parallelism would serve better, in words; None if there is none."""
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        smallest = min(plans, key=lambda plan: plan.memory.total)
        kept = smallest.memory.components.get("gathered weights", 0)
        if kept > smallest.capacity / 2:
            return (
                f"nothing fits, and the weights that a rank gathers at once take {kept / 1e9:.0f} GB: pipeline "
                "parallelism, which gathers none, would be needed"
            )
        return None
    best = fitting[0]
    if best.gather_s > SLOW_LINK * best.compute_s:
        return (
            f"gathering shards takes {best.gather_s / best.compute_s:.1f} times the compute: pipeline parallelism, "
            "which sends activations instead of weights, would be faster; m2forge has none"
        )
    return None


def _local(numel: int, is_expert: bool, step: TrainingStep) -> int:
    return numel // (step.expert if is_expert else 1)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
