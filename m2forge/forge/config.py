"""A run of the loop: the model it starts from, the tasks, the agents, the trainer, and what lies between.

name = "demo"
model = "runs/sft/model"
num_steps = 60
group_size = 8

[curriculum]
batch_groups = 8
...

[agent]
command = ["python", "examples/demo_agent.py"]

[pool.window]
queue = 64
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.gateway.config import Budget, GatewayConfig, SamplingConfig
from m2forge.pool.config import PoolConfig
from m2forge.reward.config import RewardConfig
from m2forge.rollout.config import RolloutConfig
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.config import CurriculumConfig, VerifyConfig
from m2forge.train.config import Curve, PolicyConfig, TrainConfig

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class AgentConfig(Config):
    """The program that attempts tasks. It lives across attempts: jobs come as lines on its standard input, answers go
    as lines to its standard output (`forge/worker.py` states both). It runs in a folder of its own; words that are
    paths of files are taken from the folder that the loop was started in."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    num_workers: Count = 1
    """Processes of it."""
    jobs_per_worker: Count = 16
    """Attempts that each of them works on at once; 1 for a program that does one thing after another."""
    timeout_s: Seconds = 120.0
    """Of one attempt. The window stalls behind an attempt that never ends."""
    cancel_s: Seconds = 5.0
    """How long a worker may take to confirm that it cancelled a job; then it is restarted."""
    budget: Budget = Budget(max_calls=32)
    """Of one attempt, beside its time."""
    sampling: SamplingConfig = SamplingConfig()
    """Replaces what the agent's requests ask for; the record of a call tells both. A seed in a request has no effect:
    all attempts of a group would be the same."""
    sandbox: SandboxConfig = SandboxConfig(timeout_s=7 * 86400.0)
    """Of a worker: its time is that of its whole life."""

    @property
    def num_jobs(self) -> int:
        return self.num_workers * self.jobs_per_worker


class EngineConfig(Config):
    """Of the process that samples."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "stored", "float32", "bfloat16", "float16"] = "auto"
    """How the engine holds weights and KV cache. auto: as stored, but on a CPU that decodes faster in float32, which a
    probe at start measures, in float32, in twice the memory."""
    rollout: RolloutConfig = RolloutConfig()
    num_threads: Count | None = None
    """CPU threads; None leaves it to torch."""


class CheckConfig(Config):
    """Held-out tasks, attempted now and then by the policy of the moment; nothing is learnt from them."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """0: only before the first step and after the last."""
    num_tasks: Annotated[int, Field(ge=0)] = 0
    """0: never."""
    seed: int = 1
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the agents' slots that an evaluation takes while training uses the rest; at least one slot. Before
    the first step and after the last it takes all."""
    pin: bool = False
    """Whether weight updates wait for the end of an evaluation, so that one policy version is evaluated. Training
    rollouts sample from that version meanwhile, and lag behind the trainer by the steps that it makes. Otherwise the
    evaluation reports the share of its tokens that each version sampled."""
    sampling: SamplingConfig | None = None
    """None: `agent.sampling`. Temperature 0 is allowed here."""


class ForgeConfig(Config):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    model: str = Field(min_length=1)
    """A model folder with its tokenizer."""
    num_steps: Count
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Attempts at each task; what one attempt is worth is told by the others."""
    batch_tokens: Count | None = None
    """None: a batch is `curriculum.batch_groups` groups. Else it is as many groups as fit into so many tokens, at least
    one and at most `curriculum.batch_groups`, with every domain at its ratio. A token counts once for each attempt that
    recorded it, so that a step computes no more than this, what several packs repeat aside. How much of a step the
    network takes at a time is another matter: `policy.pack_tokens`."""
    rate: Curve = Curve(start=1e-5)
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    keep_versions: Annotated[int, Field(ge=2)] = 2
    """Published weights kept: somebody may be reading the one before."""
    keep_ratios: Annotated[int, Field(ge=0)] = 8
    """Steps of which the run page can show, token by token, how far the policy had moved since each was sampled: two
    bytes a token. 0: none."""
    curriculum: CurriculumConfig
    agent: AgentConfig
    verify: VerifyConfig = VerifyConfig()
    check: CheckConfig = CheckConfig()
    reward: RewardConfig = RewardConfig()
    policy: PolicyConfig = PolicyConfig()
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig(port=0)
    pool: PoolConfig = PoolConfig()
    """A relative SQLite path lies in the run's directory."""

    @property
    def gateway_port(self) -> int:
        """0, which takes a free one, unless it is given: several runs may share a machine."""
        return self.gateway.port if "port" in self.gateway.model_fields_set else 0

    @property
    def units_per_group(self) -> int:
        return self.group_size if self.pool.window.unit == "episode" else 1

    @property
    def batch_units(self) -> int:
        """Units of a batch of `curriculum.batch_groups` groups."""
        return self.curriculum.batch_groups * self.units_per_group

    @model_validator(mode="after")
    def _check(self) -> Self:
        queue, num_batches = self.pool.window.queue, 1 if self.batch_tokens is None else 2
        if queue < num_batches * self.batch_units:
            # A batch that tokens bound may leave part of a drawn one, beside which the next has to find room.
            raise ValueError(
                f"pool.window.queue ({queue}) must hold {num_batches * self.batch_units} units: {num_batches} x "
                f"curriculum.batch_groups ({self.curriculum.batch_groups}) groups"
            )
        if self.gateway.journal:
            raise ValueError("gateway.journal is set by the run; leave it out")
        if self.gateway.records_experts:
            raise ValueError('gateway.records_experts is set by the run; set policy.replay = "recorded" instead')
        if self.pool.admit_deployed and self.reward.shuffled:
            raise ValueError(
                "reward.shuffled: deployed agents' rewards are taken as they are posted; leave pool.admit_deployed out"
            )
        if self.train.machine.parallel != "none":
            received = self.train.machine.parallel
            raise ValueError(f'train.machine.parallel: RL trains in one process, received "{received}"; leave it out')
        problem = self.policy.sampling_problem(self.agent.sampling.record())
        if problem is not None:
            raise ValueError(f"agent.sampling: nothing sampled this way can be trained: {problem}")
        return self
