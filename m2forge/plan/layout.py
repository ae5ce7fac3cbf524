"""Layouts of a run over GPUs: what each needs, how long a step takes, what it costs; those that fit come first, the
fastest of them at the top.

A layout is a mesh (replicate × shard = GPUs; `expert` divides shard) and a kind of activation checkpointing. Bytes that
a rank exchanges in a step, with n weights of w bytes, b of them in blocks and t trained:

    shard        passes · b · w + outer weights · w, gathered     + backward passes · t · 4, reduced
    replicate    t · 4 once per step if unsharded; else t / shard · 4 after every backward pass
    expert       4 · tokens · ranks that a token's experts lie on · D · w

FSDP2 gathers the next block while one runs, so shards cost time only where their link is slower than the computing; the
exchange of tokens between experts, and the sum over unsharded replicas, always do. A ring of k ranks moves (k − 1) / k
of the bytes, twice for a sum. These assumptions are the plan's: more than one GPU was never measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.plan.gpu import GPU, NODE_GPUS
from m2forge.plan.work import step_work
from m2forge.train.activation import FLOAT32, MicroBatch
from m2forge.train.config import OptimizerConfig, WalkConfig
from m2forge.train.memory import RankMemory, TrainingStep, rank_memory, weights

RECOMPUTE = ("none", "block", "walk", "walk and block", "walk, stack on host", "walk and block, stack on host")
"""`train.machine.recompute`; of a walk also `walk.recompute` and `walk.stack`."""
FREE_SHARE = 0.06
"""Share of a GPU's memory that a layout must leave: the allocator's free blocks and other libraries'. Our choice."""
SLOW_LINK = 2.0
"""Gathering that takes this many times the computing is the case for pipeline parallelism."""


@dataclass(frozen=True)
class Workload:
    """What is trained, however it is laid out."""

    name: str
    network: ModelConfig
    batch: MicroBatch
    packs_per_step: int | None = None
    """Micro-batches of a step, over all ranks; None: one per rank."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoRAConfig | None = None
    offload: str = "none"
    walk: WalkConfig = field(default_factory=WalkConfig)


@dataclass(frozen=True)
class Layout:
    replicate: int
    shard: int
    expert: int
    recompute: str

    def __str__(self) -> str:
        axes = {"replicate": self.replicate, "shard": self.shard, "expert": self.expert}
        mesh = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one GPU"
        return f"{mesh}, recompute {self.recompute}"


@dataclass(frozen=True)
class Plan:
    layout: Layout
    memory: RankMemory
    capacity: float
    """Bytes of a GPU's memory."""
    step_s: float
    tokens_per_s: float
    parts: dict[str, float]
    """Seconds of a step by what they are spent on; links that the computing hides count only what sticks out."""
    link_bytes: dict[str, float]
    """Bytes that a rank exchanges per step, by axis."""
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


def list_layouts(network: ModelConfig, num_gpus: int, offered: tuple[str, ...] = RECOMPUTE) -> Iterator[Layout]:
    for shard in _divisors(num_gpus):
        num_experts = 1 if network.moe is None else network.moe.num_experts
        for expert in _divisors(shard):
            if num_experts % expert == 0:
                for recompute in offered:
                    yield Layout(num_gpus // shard, shard, expert, recompute)


def make_plans(workload: Workload, gpu: GPU, num_gpus: int, price: float, network_rate: float) -> list[Plan]:
    """All layouts, best first: those that fit by tokens per second, then the others by memory."""
    # A path that fits into one segment is not walked.
    offered = RECOMPUTE if workload.batch.context > workload.walk.segment_tokens else RECOMPUTE[:2]
    plans = [
        make_plan(workload, layout, gpu, price, network_rate)
        for layout in list_layouts(workload.network, num_gpus, offered)
    ]
    return sorted(plans, key=lambda plan: (not plan.fits, -plan.tokens_per_s if plan.fits else plan.memory.total))


def rank_step(workload: Workload, layout: Layout) -> TrainingStep:
    """What one rank trains."""
    num_gpus = layout.replicate * layout.shard
    num_batches = 1 if workload.packs_per_step is None else -(-workload.packs_per_step // num_gpus)
    walk = None
    if layout.recompute.startswith("walk"):
        stack = "host" if layout.recompute.endswith("host") else "device"
        inside = "block" if "and block" in layout.recompute else "none"
        walk = workload.walk.model_copy(update={"stack": stack, "recompute": inside})
    return TrainingStep(
        workload.network,
        workload.optimizer,
        workload.batch,
        num_batches,
        is_compiled=layout.shard == 1,
        recompute=layout.recompute if walk is None else walk.recompute,
        walk=walk,
        offload=workload.offload,
        lora=workload.lora,
        shard=layout.shard,
        expert=layout.expert,
    )


def make_plan(workload: Workload, layout: Layout, gpu: GPU, price: float, network_rate: float) -> Plan:
    """`network_rate`: bytes per second of a GPU to other nodes."""
    step, num_gpus = rank_step(workload, layout), layout.replicate * layout.shard
    work = step_work(step)
    traffic = link_bytes(step, layout)

    def rate(last: int) -> float:
        """Bandwidth of a link between neighbours up to `last` ranks apart."""
        return gpu.datasheet.nvlink if last <= NODE_GPUS else network_rate

    shard_rate, replica_rate = rate(layout.shard), rate(num_gpus)
    ring = {axis: (size - 1) / size for axis, size in vars(layout).items() if isinstance(size, int)}
    gather_s = traffic["shard"] * ring["shard"] / shard_rate
    replicas_s = 2 * traffic["replicate"] * ring["replicate"] / replica_rate
    experts_s = traffic["expert"] / rate(layout.expert)
    parts = work.parts(gpu.rates)
    compute_s = sum(parts.values())
    hidden_s = gather_s + (replicas_s if layout.shard > 1 else 0.0)
    parts["links between shards"] = max(0.0, hidden_s - compute_s)
    parts["links between experts"] = experts_s
    parts["links between replicas"] = replicas_s if layout.shard == 1 else 0.0
    step_s = sum(parts.values())
    num_packs = num_gpus if workload.packs_per_step is None else workload.packs_per_step
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


def link_bytes(step: TrainingStep, layout: Layout) -> dict[str, float]:
    """Bytes that a rank exchanges in a step, by axis: the whole size of what a collective gathers or sums."""
    found = [weight for weight in weights(step.network, step.lora) if not weight.is_bias]
    blocks = sum(_local(weight.numel, weight.is_expert, step) for weight in found if weight.unit != "outer")
    outer = sum(weight.numel for weight in found if weight.unit == "outer")
    trained = sum(_local(weight.numel, weight.is_expert, step) for weight in found if weight.is_trained)
    num_backward = step.num_batches * step.batch.segments(step.walk)
    num_forward = num_backward * (2 if step.walk is not None else 1)
    exact = max(FLOAT32, step.item_bytes)
    traffic = dict.fromkeys(("replicate", "shard", "expert"), 0.0)
    if layout.shard > 1:
        gathered = (num_forward + num_backward) * blocks + outer
        traffic["shard"] = float(gathered * step.item_bytes + num_backward * trained * exact)
    if layout.replicate > 1:
        sharded = sum(weight.held(layout.shard) for weight in found if weight.is_trained)
        traffic["replicate"] = float(sharded * exact * (num_backward if layout.shard > 1 else 1))
    if layout.expert > 1 and step.network.moe is not None:
        num_sparse = sum(step.network.is_sparse(layer) for layer in step.layers)
        there = layout.expert * (1 - (1 - 1 / layout.expert) ** step.network.moe.top_k)
        passes = 4 + 2 * (step.recompute == "block") + 2 * (step.walk is not None)
        rows = step.num_batches * step.batch.num_tokens * there * num_sparse
        traffic["expert"] = rows * passes * step.network.hidden_size * step.item_bytes
    return traffic


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
            f"gathering shards takes {best.gather_s / best.compute_s:.1f} times the computing: pipeline parallelism, "
            "which sends activations in place of weights, would be faster; m2forge has none"
        )
    return None


def _local(numel: int, is_expert: bool, step: TrainingStep) -> int:
    return numel // (step.expert if is_expert else 1)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
