"""Configuration of a training run, shared by all stages: optimizer, phases, checkpoints, machine."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from m2forge.config import Config, TomlValue
from m2forge.errors import ConfigError
from m2forge.model.config import AttentionConfig, LoRAConfig, ModelConfig
from m2forge.observe.config import MetricsConfig
from m2forge.records import Sampling

Count = Annotated[int, Field(gt=0)]
TEMPERATURES = (0.01, 100.0)
"""Range of temperatures in which importance ratios of tempered logits are finite enough to train on."""


class OptimizerConfig(Config):
    kind: Literal["adamw", "muon"] = "adamw"
    """muon: hidden matrices use Muon; embedding, head, norms and biases use AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-15, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices, multiplied by the learning rate. Not applied to norms, biases, embedding."""
    max_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping: gradients with a larger global norm are scaled down to it."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    muon_iterations: Count = 5
    """Newton–Schulz iterations."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in 0 ≤ β < 1")
        return self


RouterBias: TypeAlias = Literal["frozen", "balanced"]
MTPLoss: TypeAlias = Literal["ce", "topk_kl", "topk_acceptance"]


class PolicyConfig(Config):
    """Configuration of a step over token trees. Values that the published system does not state are marked "ours"."""

    renamed_keys: ClassVar[Mapping[str, str]] = {"router_bias": "train.router_bias"}

    loss: Literal["cispo", "ppo_clip", "sft"] = "cispo"
    max_ratio: float = Field(default=5.0, gt=0)
    """cispo: the largest importance ratio, elsewhere called 1 + ε_high; ours, public values are 4 to 5."""
    ppo_low: float = Field(default=0.2, ge=0, lt=1)
    """ppo_clip: ratios are clipped to 1 − ppo_low … 1 + ppo_high."""
    ppo_high: float = Field(default=0.2, ge=0)
    mtp_loss: MTPLoss = "topk_kl"
    """Loss of the MTP modules at the same edges: ce learns the sampled tokens, topk_kl the policy's distribution,
    topk_acceptance maximizes the acceptance of their drafts by the policy."""
    mtp_weight: float = Field(default=0.1, ge=0)
    """Weight of the MTP loss, averaged over the modules; ours. 0: the modules do not learn."""
    mtp_gradient: Literal["modules", "all"] = "modules"
    """modules: the MTP loss trains only the modules; the policy's gradient is what it would be without them, except
    that the balance loss is a mean over their layers too, and one gradient norm clips both. all: it also reaches the
    policy, embedding and head, as in pre-training."""
    mtp_top_k: Count = 32
    """topk losses: number of the policy's likeliest tokens compared one by one; all others share one bucket. Ours."""
    truncated_sampling: Literal["refuse", "allow"] = "refuse"
    """What to do with samples drawn by top-p, top-k or min-p, whose recorded logprobs no softmax over the vocabulary
    can match. allow: train them as if nothing had been cut off. Greedy samples are refused either way; sft, which needs
    no logprobs, accepts all."""
    replay: Literal["none", "recorded"] = "none"
    """recorded: route tokens to the experts they used when they were sampled, where the routing was recorded."""
    pack_tokens: Count = 32768
    """Tokens per forward pass (micro-batch), and so the longest path."""
    bucket_tokens: Count = 2048
    """On CUDA, packs are padded to a multiple of this, so that few shapes occur; segments of a walk to a smaller one.
    Padding counts nowhere."""

    def sampling_problem(self, sampling: Sampling) -> str | None:
        """Why tokens sampled with these settings cannot be trained on; None if they can."""
        if self.loss == "sft":
            return None
        if sampling.temperature == 0:
            return "temperature: expected a number above 0, received 0: a greedy choice has no log-probability"
        if not TEMPERATURES[0] <= sampling.temperature <= TEMPERATURES[1]:
            bounds = f"{TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}"
            return f"temperature: expected {bounds}, received {sampling.temperature}"
        if sampling.is_truncated and self.truncated_sampling == "refuse":
            return f'expected none cut off, received {sampling}; policy.truncated_sampling = "allow" takes it'
        return None

    def refuse_misfit(self, network: ModelConfig) -> None:
        """Raise if a network cannot be trained so."""
        if self.replay == "recorded" and network.moe is None:
            raise ConfigError('policy.replay = "recorded": this network has no experts to replay; leave it out')


class Curve(Config):
    """A value that changes from `start` to `end` over a phase."""

    start: float = Field(ge=0)
    end: float | None = Field(default=None, ge=0)
    """Final value; None: constant."""
    shape: Literal["linear", "cosine"] = "cosine"


class PhaseConfig(Config):
    """A period of training with one context length and one set of schedules."""

    renamed_keys: ClassVar[Mapping[str, str]] = {"rate": "lr"}

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    steps: Count
    context: Count
    """Length of the longest document, in tokens."""
    pack_tokens: Count
    """Tokens per forward pass (micro-batch)."""
    packs_per_step: Count = 1
    """Gradient accumulation: packs (micro-batches) per optimizer step."""
    lr: Curve
    """Learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps over which the learning rate warms up from near 0."""
    mtp_weight: Curve = Curve(start=0.0)
    """Weight of the multi-token prediction (MTP) loss, averaged over the modules."""
    mtp_loss: MTPLoss = "ce"
    """Loss of the MTP modules: ce learns the text, topk_kl the main model's distribution, topk_acceptance maximizes the
    acceptance of their drafts by the main model."""
    mtp_top_k: Count = 32
    """topk losses: number of the main model's likeliest tokens compared singly; all others share one bucket. Ours."""
    num_mtp: Count | None = None
    """Extend the chain of MTP modules to this many before the phase."""
    mtp_source: Literal["main", "mtp1", "random"] = "main"
    """Initialization of added modules: the main model's last layer, module 1, or random weights."""
    trains: Literal["all", "mtp"] = "all"
    """mtp: the main model is frozen."""
    rope_theta: float | None = Field(default=None, gt=0)
    """RoPE base from this phase on; None: unchanged."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pack_tokens < self.context:
            raise ValueError(f"pack_tokens ({self.pack_tokens}) must hold one document of context ({self.context})")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) exceeds steps ({self.steps})")
        if self.trains == "mtp" and not (self.mtp_weight.start or self.mtp_weight.end):
            raise ValueError('trains = "mtp" learns nothing with mtp_weight 0')
        return self


class CheckpointConfig(Config):
    every_steps: Count = 500
    """Steps between checkpoints, and so the most that a crash loses. The end of a phase is always saved."""
    keep: int = Field(default=2, ge=0)
    """Checkpoints to retain; older ones are removed. 0: none is written, and a run that crashes starts over."""


class EvalConfig(Config):
    """Loss on held-out data during training. The stages say what is held out; it is never trained on."""

    every: Count
    """Steps between two evaluations. The last step of a phase is always evaluated."""
    num_tokens: Count = 1 << 20
    """Maximum number of held-out tokens to evaluate; they are the same each time."""
    export: Literal["last", "best"] = "last"
    """Weights that the run's `model` folder holds: those after the last step, or those with the lowest held-out loss of
    the last phase. The best checkpoint is stored either way, as long as checkpoints are."""


class MeshConfig(Config):
    """How the ranks, replicate × shard × context of them, share the work. torchrun starts them, in `m2forge rl` the
    loop. Each trains some of a step's packs, or a part of each; the step equals that of one process."""

    replicate: Count | Literal["auto"] = 1
    """Number of copies of the model (data parallelism). auto: one copy for every `shard` × `context` ranks."""
    shard: Count | Literal["auto"] = 1
    """Number of ranks that hold one copy together, a shard each (FSDP2). auto: all ranks that `replicate` leaves."""

    context: Count = 1
    """Number of ranks that train a pack together, some of its tokens each (context parallelism). They divide the heads;
    ranks beyond a divisor of the query and key/value heads divide the queries. These ranks hold a shard each too."""
    expert: Count = 1
    """Number of ranks that hold one copy of the experts together, whole ones each (expert parallelism). They are ranks
    of shard × context, which it divides: the others hold shards of the same experts."""

    @property
    def is_single(self) -> bool:
        return self.replicate == self.shard == self.context == self.expert == 1

    @property
    def is_sharded(self) -> bool:
        return self.shard != 1 or self.context != 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.replicate == self.shard == "auto":
            raise ValueError('only one of replicate and shard can be "auto"; give the number of the other')
        return self

    def of_ranks(self, num_ranks: int) -> Self:
        """The mesh of this number of ranks, without auto."""
        names = ("replicate", "shard", "context")
        sizes = {name: size for name in names if (size := getattr(self, name)) != "auto"}
        taken = math.prod(sizes.values())
        if num_ranks % taken or (len(sizes) == len(names) and taken != num_ranks):
            shown = {name: size for name, size in sizes.items() if name != "context" or size > 1}
            written = " × ".join(f"{name} {size}" for name, size in shown.items())
            remedy = f'start torchrun with --nproc-per-node {taken}, or set replicate or shard to "auto"'
            if len(sizes) < len(names):
                remedy = f"give numbers whose product divides {num_ranks}"
            raise ConfigError(
                f"train.machine.mesh: {written} is a mesh of {taken} ranks, and {num_ranks} were started; {remedy}"
            )
        rest = num_ranks // taken
        mesh = self.model_copy(update={name: sizes.get(name, rest) for name in ("replicate", "shard")})
        if mesh.shape[1] % self.expert:
            whole = f"shard {mesh.shard}" + (f" × context {mesh.context}" if mesh.context > 1 else "")
            raise ConfigError(
                f"train.machine.mesh: the ranks that divide the experts are ranks of shard, and expert {self.expert} "
                f"does not divide {whole}; set shard to a multiple of it"
            )
        return mesh

    def refuse_misfit(self, network: ModelConfig) -> None:
        """Raise if the experts of a network cannot be divided."""
        num_experts = 0 if network.moe is None else network.moe.num_experts
        if self.expert > 1 and (not num_experts or num_experts % self.expert):
            remedy = "use a divisor of it" if num_experts else "leave it out"
            raise ConfigError(
                f"train.machine.mesh: expert {self.expert} does not divide the {num_experts} experts of this network; "
                f"{remedy}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(copies of the model, ranks that shard one) of a mesh without auto."""
        assert self.replicate != "auto"
        assert self.shard != "auto"
        return self.replicate, self.shard * self.context


def head_parts(attention: AttentionConfig, context: int) -> int:
    """Number of parts into which `context` ranks divide the heads: as many as divide the query heads, and divide the
    key/value heads or are a multiple of them. The context / parts ranks of a part divide its queries."""
    num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
    divisors = (parts for parts in range(context, 0, -1) if context % parts == 0)
    return next(n for n in divisors if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0))


def key_copies(attention: AttentionConfig, context: int) -> int:
    """Number of the `context` ranks that receive a key/value head."""
    return context // min(head_parts(attention, context), attention.num_kv_heads)


class WalkConfig(Config):
    """`recompute = "walk"`: a pack is cut into segments, which run one at a time, depth-first. Memory for activations
    follows the segment, not the pack: for paths too long for `block`. All fields are ours."""

    segment_tokens: Count = 8192
    """Tokens of the longest segment. Small subtrees side by side share one."""
    recompute: Literal["none", "block"] = "none"
    """Activation checkpointing inside a segment."""
    stack: Literal["device", "host"] = "device"
    """Memory for the keys and values of the path above a segment, and for their gradients."""


class MachineConfig(Config):
    renamed_keys: ClassVar[Mapping[str, str]] = {"parallel": "mesh"}
    renamed_values: ClassVar[Mapping[str, Mapping[str, TomlValue]]] = {
        "parallel": {"none": {}, "data": {"replicate": "auto"}, "fsdp": {"shard": "auto"}}
    }

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of weights and activations; auto: bfloat16 on CUDA, float32 elsewhere. The optimizer keeps float32 master
    weights."""
    compile_blocks: Literal["auto", "always", "never"] = "auto"
    """Whether to torch.compile the blocks; auto: on CUDA."""
    recompute: Literal["none", "block", "walk"] = "none"
    """Activation checkpointing. block: recompute each block in the backward pass to save memory. walk: keep only keys
    and values, and recompute a long path or tree segment by segment."""
    walk: WalkConfig | None = None
    """How to walk; None: with the defaults."""
    mesh: MeshConfig = MeshConfig()
    offload: Literal["none", "host"] = "none"
    """host: keep the optimizer's master weights and moments in host memory, to save device memory."""
    num_threads: Count | None = None
    """CPU threads; results are bit-identical only at the same number."""
    deterministic: bool = True
    """On CPU, use only deterministic algorithms. (CUDA sums in no fixed order.)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.walk_config is not None and self.walk_config.segment_tokens < self.mesh.context:
            raise ValueError(
                f"walk.segment_tokens {self.walk_config.segment_tokens} is less than mesh.context {self.mesh.context}: "
                "the ranks that share a segment need a token each"
            )
        if self.walk is not None and self.recompute != "walk":
            raise ValueError(f'walk: recompute is "{self.recompute}"; set recompute = "walk" or leave [walk] out')
        return self

    @property
    def walk_config(self) -> WalkConfig | None:
        """How to walk; None: whole packs run at once."""
        return (self.walk or WalkConfig()) if self.recompute == "walk" else None


class TrainConfig(Config):
    optimizer: OptimizerConfig = OptimizerConfig()
    router_bias: RouterBias = "frozen"
    """Whether a step updates the routers' selection biases. balanced, the default of pre-training: it does, by the rule
    `moe.bias_update`. The sign rule moves a bias by a fixed amount, however small the learning rate, and routes tokens
    to experts that never saw them: a trained policy may lose its format for a whole family of prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    machine: MachineConfig = MachineConfig()
    metrics: MetricsConfig = MetricsConfig()
    agreement_every: Count = 20
    """Steps between measurements of draft agreement, which needs extra logits."""


class TuneConfig(TrainConfig):
    """`TrainConfig` of the stages that start from a trained model: SFT and RL."""

    lora: LoRAConfig | None = None
    """Train low-rank adapters of some layers in place of the weights. Models of the run are then adapters
    under PEFT's names, which `m2forge export` merges into their base model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lora is not None and self.router_bias == "balanced":
            raise ValueError('lora: routers are frozen with adapters; set router_bias = "frozen"')
        if self.lora is not None and self.optimizer.kind == "muon":
            raise ValueError('lora: adapters are trained by AdamW; set optimizer.kind = "adamw"')
        return self
