"""What a training run asks for, whichever stage it belongs to: optimizer, phases, checkpoints, machine."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.records import Sampling

Count = Annotated[int, Field(gt=0)]
TEMPERATURES = (0.01, 100.0)
"""Within which importance ratios of tempered logits are numbers that can be trained on."""


class OptimizerConfig(Config):
    kind: Literal["adamw", "muon"] = "adamw"
    """muon: hidden matrices by Muon; embedding, head, norms and biases stay with AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-15, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Pull on matrices towards 0, times the rate. Norms, biases and the embedding are not pulled."""
    max_norm: float = Field(default=1.0, gt=0)
    """Gradients longer than this are scaled down to it."""
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
    """What a step over token trees computes. Where a value is not known of the published system, it is ours."""

    moved_keys: ClassVar[Mapping[str, str]] = {"router_bias": "train.router_bias"}

    loss: Literal["cispo", "ppo_clip", "sft"] = "cispo"
    max_ratio: float = Field(default=5.0, gt=0)
    """cispo: the largest importance ratio, elsewhere called 1 + ε_high; ours, public values are 4 to 5."""
    ppo_low: float = Field(default=0.2, ge=0, lt=1)
    """ppo_clip: ratios are clipped to 1 − ppo_low … 1 + ppo_high."""
    ppo_high: float = Field(default=0.2, ge=0)
    mtp_loss: MTPLoss = "topk_kl"
    """What the prediction modules learn at the same edges: ce the sampled tokens, topk_kl the policy's distribution,
    topk_acceptance to have drafts of it accepted."""
    mtp_weight: float = Field(default=0.1, ge=0)
    """Of that loss, averaged over the modules; ours. 0: they do not learn."""
    mtp_gradient: Literal["modules", "all"] = "modules"
    """modules: that loss trains the modules alone; the policy's gradient is what it would be without them, save that
    the balance loss is a mean over their layers too, and both are clipped by one norm. all: it reaches the policy,
    embedding and head, as in pre-training."""
    mtp_top_k: Count = 32
    """topk: how many of the policy's likeliest tokens stand alone; the others are one bucket. Ours."""
    truncated_sampling: Literal["refuse", "allow"] = "refuse"
    """What becomes of samples drawn by top-p, top-k or min-p, whose recorded log-probabilities no softmax over the
    vocabulary can match. allow: they train as if nothing had been cut off. Greedy samples are refused either way, and
    sft, which asks for no log-probability, takes all."""
    replay: Literal["none", "recorded"] = "none"
    """recorded: tokens go to the experts they went to when they were sampled, where that was recorded."""
    pack_tokens: Count = 32768
    """Tokens that go through the network at once, and so the longest path."""
    bucket_tokens: Count = 2048
    """On CUDA packs are padded to a multiple of this, so that few shapes occur. Padding counts nowhere."""

    def sampling_problem(self, sampling: Sampling) -> str | None:
        """Why nothing can be learnt from tokens that were drawn this way; None if it can."""
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


class Curve(Config):
    """A value that moves from `start` to `end` over a phase."""

    start: float = Field(ge=0)
    end: float | None = Field(default=None, ge=0)
    """None: constant."""
    shape: Literal["linear", "cosine"] = "cosine"


class PhaseConfig(Config):
    """A stretch of training with one context length and one set of curves."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    steps: Count
    context: Count
    """Longest document, in tokens."""
    pack_tokens: Count
    """Tokens that go through the network at once."""
    packs_per_step: Count = 1
    """Packs whose gradients one optimizer step adds up."""
    rate: Curve
    """Learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """The rate rises from near 0 over so many steps first."""
    mtp_weight: Curve = Curve(start=0.0)
    """Weight of the multi-token prediction loss, averaged over its modules."""
    mtp_loss: MTPLoss = "ce"
    """What the modules learn: ce the text, topk_kl the main model's distribution, topk_acceptance to have drafts of it
    accepted."""
    mtp_top_k: Count = 32
    """topk: how many of the main model's likeliest tokens stand alone; the others are one bucket. Ours."""
    num_mtp: Count | None = None
    """Lengthen the chain of prediction modules to this many before the phase."""
    mtp_source: Literal["main", "mtp1", "random"] = "main"
    """What added modules start from: the main model's last layer, module 1, or fresh random weights."""
    trains: Literal["all", "mtp"] = "all"
    """mtp: the main model is frozen."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Change the base of the rotary frequencies from here on."""

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
    """A run that dies loses at most so many steps. The end of a phase is always kept."""
    keep: int = Field(default=2, ge=0)
    """Checkpoints kept; older ones are removed. 0: none is written, and a run that dies starts over."""


class MachineConfig(Config):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto is bfloat16 on CUDA, float32 elsewhere. The optimizer keeps float32 masters."""
    compile_blocks: Literal["auto", "always", "never"] = "auto"
    """auto: on CUDA."""
    recompute: Literal["none", "block"] = "none"
    """block: activations are computed again in the backward pass, to save memory."""
    parallel: Literal["none", "data", "fsdp"] = "none"
    """Over the processes that torchrun started. data: each holds the network and takes some of a step's packs. fsdp:
    each holds a slice of the network besides. Blocks are not compiled then, and no phase may add modules."""
    offload: Literal["none", "host"] = "none"
    """host: the optimizer's masters and moments lie in host memory, to save the device's."""
    num_threads: Count | None = None
    """CPU threads; results are the same to the bit only at the same number."""
    deterministic: bool = True
    """On CPU only algorithms that give the same bits each time. (CUDA sums in no fixed order.)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.parallel == "fsdp" and self.compile_blocks == "always":
            raise ValueError('parallel = "fsdp" runs blocks uncompiled; set compile_blocks to "auto" or "never"')
        return self


class TrainConfig(Config):
    optimizer: OptimizerConfig = OptimizerConfig()
    router_bias: RouterBias = "frozen"
    """Whether a step moves the selection biases of the routers. balanced, the default of pre-training: it does, by
    the rule of `moe.bias_update`. The sign rule moves a bias by a fixed amount, however small the learning rate, and
    sends tokens to experts that never saw them: a trained policy may lose its format for a whole family of prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    machine: MachineConfig = MachineConfig()
    agreement_every: Count = 20
    """Steps between measurements of draft agreement, which needs extra logits."""
