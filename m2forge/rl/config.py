"""Configuration of an RL run: the initial model, the tasks, agents, reward, trainer, engine, gateway and pool.

name = "demo"
model = "runs/sft/model"
num_steps = 60
group_size = 8

[curriculum]
batch_groups = 8
...

[agent]
kind = "worker"
command = ["python", "examples/task_agent.py"]

[pool.window]
queue = 64
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from m2forge.agents.config import CommandConfig, LoopConfig, WorkerConfig
from m2forge.agents.preset import with_preset
from m2forge.cluster.config import ClusterConfig
from m2forge.config import Config, TomlValue
from m2forge.gateway.config import Budget, GatewayConfig, SamplingConfig
from m2forge.pool.config import PoolConfig
from m2forge.reward.config import RewardConfig
from m2forge.rollout.config import RolloutConfig
from m2forge.tasks.config import CurriculumConfig, VerifyConfig
from m2forge.tasks.source import SourceKind, parse_source
from m2forge.train.config import Curve, PolicyConfig, TuneConfig
from m2forge.weights.config import WeightsConfig

Count = Annotated[int, Field(gt=0)]
MAX_PORT = 65535


class AttemptConfig(Config):
    """Settings of one attempt that hold for every kind of agent."""

    budget: Budget = Budget(max_calls=32)
    """Limits of one attempt in addition to its timeout."""
    sampling: SamplingConfig = SamplingConfig()
    """Overrides the sampling parameters of the agent's requests; a call's record holds both. A seed in a request has no
    effect, because it would make all attempts of a group the same."""


class WorkerAgentConfig(AttemptConfig, WorkerConfig):
    __doc__ = WorkerConfig.__doc__


class CommandAgentConfig(AttemptConfig, CommandConfig):
    __doc__ = CommandConfig.__doc__


class LoopAgentConfig(AttemptConfig, LoopConfig):
    __doc__ = LoopConfig.__doc__


AgentConfig: TypeAlias = Annotated[
    WorkerAgentConfig | CommandAgentConfig | LoopAgentConfig, Field(discriminator="kind")
]


class OtherEngineConfig(Config):
    url: str | tuple[str, ...]
    """Where it listens; it must see the run's folder under the same path. A list: of as many such servers as
    `cluster.samplers`, which share the episodes."""
    key_env: str | None = Field(default=None, min_length=1)
    """Environment variable with its API key; None: no key is sent."""

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ValueError(f"url: expected http://HOST:PORT, or a list of such URLs, received {self.url!r}")
        return self


class VLLMConfig(OtherEngineConfig):
    """A vLLM server that runs already, with VLLM_SERVER_DEV_MODE=1 and the run's model."""

    kind: Literal["vllm"]
    model: str | None = Field(default=None, min_length=1)
    """The served model's name; None: the server's own."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Its `--logprobs-mode`, checked at the start. raw allows temperature 1 without truncation and penalties alone."""


class SGLangConfig(OtherEngineConfig):
    """An SGLang server that runs already, with the run's model."""

    kind: Literal["sglang"]
    takes_seeds: bool = False
    """Whether it runs with --enable-deterministic-inference; otherwise requests with a seed are refused."""


class EngineConfig(Config):
    """Configuration of the sampler process."""

    server: Annotated[VLLMConfig | SGLangConfig, Field(discriminator="kind")] | None = None
    """A server of another engine that samples instead of m2forge's own. Then `rollout.max_context` is the only other
    field that applies."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "stored", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and KV cache. auto: as stored, except on a CPU where a probe at startup measures faster decode
    in float32, which then takes twice the memory."""
    rollout: RolloutConfig = RolloutConfig()
    num_threads: Count | None = None
    """CPU threads; None: torch's default."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = EngineConfig.model_construct(server=self.server)
        given = self.model_copy(update={"rollout": self.rollout.model_copy(update={"max_context": None})})
        ignored = [name for name in type(self).model_fields if getattr(given, name) != getattr(own, name)]
        if self.server is not None and ignored:
            raise ValueError(f"{self.server.kind} samples: engine.{ignored[0]} has no effect there; leave it out")
        return self


class RLEvalConfig(Config):
    """Periodic evaluation of the current policy on held-out tasks, which are never trained on."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    num_tasks: Annotated[int, Field(ge=0)] = 0
    """Held-out tasks per evaluation; 0: no evaluation."""
    seed: int = 1
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the agents' slots, at least one, that an evaluation takes beside training; before the first step and
    after the last it takes all."""
    pin: bool = False
    """Whether weight updates wait for the end of an evaluation, so that it samples from one policy version. Training
    rollouts meanwhile sample from that version too and lag behind the trainer by the steps it makes. If False, the
    evaluation reports the share of its tokens that each version sampled."""
    sampling: SamplingConfig | None = None
    """Sampling parameters of evaluations; None: `agent.sampling`. Temperature 0 is allowed here."""


class RLConfig(Config):
    renamed_keys: ClassVar[Mapping[str, str]] = {"rate": "lr", "check": "eval"}

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    model: str = Field(min_length=1)
    """A model folder with its tokenizer, or a hub id such as Qwen/Qwen3-0.6B."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a hub model; None: its main branch. A run's resolved config holds the commit."""
    num_steps: Count
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Attempts per task; an attempt's advantage is relative to the rest of its group."""
    batch_tokens: Count | None = None
    """Token limit of a batch; None: a batch is `curriculum.batch_groups` groups. With a limit, a batch is as many
    groups as fit, at least one and at most `curriculum.batch_groups`, with every domain at its ratio. A token counts
    once for each attempt that recorded it, so a step computes no more tokens than this, except for prefixes repeated
    across packs. `policy.pack_tokens` sets the micro-batch size."""
    lr: Curve = Curve(start=1e-5)
    """Learning rate over the run's steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    keep_versions: Annotated[int, Field(ge=2)] = 2
    """Published policy versions to keep; at least 2, because the sampler may still be loading the previous one."""
    keep_ratios: Annotated[int, Field(ge=0)] = 8
    """Number of last steps whose importance ratios are stored for the run page, at two bytes a token; 0: none."""
    curriculum: CurriculumConfig
    agent: AgentConfig
    verify: VerifyConfig = VerifyConfig()
    eval: RLEvalConfig = RLEvalConfig()
    reward: RewardConfig = RewardConfig()
    policy: PolicyConfig = PolicyConfig()
    train: TuneConfig = TuneConfig()
    weights: WeightsConfig = WeightsConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig(port=0)
    pool: PoolConfig = PoolConfig()
    """The data pool; a relative SQLite path is resolved against the run's directory."""
    cluster: ClusterConfig = ClusterConfig()

    @property
    def gateway_port(self) -> int:
        """The first gateway's port: the configured one, otherwise 0, which picks a free one: several runs may share a
        machine."""
        return self.gateway.port if "port" in self.gateway.model_fields_set else 0

    @property
    def units_per_group(self) -> int:
        return self.group_size if self.pool.window.unit == "episode" else 1

    @property
    def batch_units(self) -> int:
        """Number of units in a batch of `curriculum.batch_groups` groups."""
        return self.curriculum.batch_groups * self.units_per_group

    @classmethod
    def complete(cls, data: Mapping[str, TomlValue]) -> dict[str, TomlValue]:
        """Merge the agent's preset. An agent without a kind is a worker, as in configs that predate `kind`."""
        agent = data.get("agent")
        return {**data, "agent": {"kind": "worker", **with_preset(agent)}} if isinstance(agent, dict) else dict(data)

    @model_validator(mode="after")
    def _check(self) -> Self:
        queue, num_batches = self.pool.window.queue, 1 if self.batch_tokens is None else 2
        if queue < num_batches * self.batch_units:
            # A token-limited batch may leave part of a drawn batch in the queue, which must also hold the next one.
            raise ValueError(
                f"pool.window.queue ({queue}) must hold {num_batches * self.batch_units} units: {num_batches} x "
                f"curriculum.batch_groups ({self.curriculum.batch_groups}) groups"
            )
        folders = [key for key in self.curriculum.family_keys if parse_source(key).kind is SourceKind.FOLDERS]
        if folders and self.agent.sandbox.backend == "process":
            raise ValueError(f'agent.sandbox.backend: {folders[0]} brings files of its own; set "namespace" or "auto"')
        last_port = self.gateway_port and self.gateway_port + self.cluster.gateways - 1
        if last_port > MAX_PORT:
            raise ValueError(
                f"gateway.port: {self.cluster.gateways} gateways (cluster.gateways) listen on as many ports from "
                f"{self.gateway_port} on, and the last port is {MAX_PORT}; give a lower port, or 0 for free ones"
            )
        if self.gateway.journal:
            raise ValueError("gateway.journal is set by the run; leave it out")
        if self.gateway.records_experts:
            raise ValueError('gateway.records_experts is set by the run; set policy.replay = "recorded" instead')
        if self.pool.admit_deployed and self.reward.shuffled:
            raise ValueError(
                "reward.shuffled: deployed agents' rewards are taken as they are posted; leave pool.admit_deployed out"
            )
        self._check_trainer_nodes()
        if self.cluster.launcher == "ray":
            self._check_ray_gpus()
        if self.train.lora is not None and self.weights.anchor_every > 1:
            raise ValueError(
                "weights.anchor_every: with train.lora a version is an adapter, which is published whole; leave it out"
            )
        if self.engine.server is not None:
            self._check_server(self.engine.server)
        problem = self.policy.sampling_problem(self.agent.sampling.record())
        if problem is not None:
            raise ValueError(f"agent.sampling: nothing sampled this way can be trained: {problem}")
        return self

    def _check_trainer_nodes(self) -> None:
        mesh, num_nodes = self.train.machine.mesh, self.cluster.ray.trainer_nodes
        if "auto" not in (mesh.replicate, mesh.shard) and (num_ranks := math.prod(mesh.shape)) % num_nodes:
            raise ValueError(
                f"cluster.ray.trainer_nodes: {num_nodes} nodes cannot have as many of the {num_ranks} ranks of "
                f"train.machine.mesh each; use a divisor of {num_ranks}"
            )

    def _check_ray_gpus(self) -> None:
        """Refuse GPUs that a process would reserve and not use, or use and not reserve."""
        ray, mesh, server = self.cluster.ray, self.train.machine.mesh, self.engine.server
        is_auto = "auto" in (mesh.replicate, mesh.shard)
        num_ranks = None if is_auto else math.prod(mesh.shape) // ray.trainer_nodes
        if server is not None and ray.sampler_gpus:
            raise ValueError(f"cluster.ray.sampler_gpus: engine.server names a {server.kind} server; leave it out")
        if is_auto and not ray.trainer_gpus:
            raise ValueError(
                'cluster.ray.trainer_gpus: "auto" in train.machine.mesh counts GPUs, and the trainer requests none; '
                "set it, or give the mesh numbers"
            )
        for name, key, device, num_gpus, wanted in (
            ("trainer_gpus", "train.machine.device", self.train.machine.device, ray.trainer_gpus, num_ranks),
            ("sampler_gpus", "engine.device", self.engine.device, ray.sampler_gpus, None),
        ):
            if device == "cpu" and num_gpus:
                raise ValueError(f'cluster.ray.{name}: {key} is "cpu", which uses none of {num_gpus}; leave it out')
            if device == "cuda" and not num_gpus:
                number = wanted or 1
                raise ValueError(f'cluster.ray.{name}: {key} is "cuda", and no GPU is requested; set it to {number}')
            if num_gpus and wanted is not None and num_gpus != wanted:
                raise ValueError(
                    f"cluster.ray.{name}: train.machine.mesh has {wanted} ranks on each node, with a GPU each, and "
                    f"{num_gpus} are requested; set it to {wanted}"
                )

    def _check_server(self, server: VLLMConfig | SGLangConfig) -> None:
        """Refuse settings that a server of another engine does not support."""
        kind, urls = server.kind, server.urls
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError(f"engine.server.url: each of several {kind} servers has a URL of its own, received {urls}")
        if len(urls) != self.cluster.samplers:
            raise ValueError(
                f"cluster.samplers: engine.server.url names {len(urls)} {kind} servers, received "
                f"{self.cluster.samplers}; set {len(urls)}, or list as many URLs"
            )
        if self.policy.replay == "recorded":
            raise ValueError(f'policy.replay = "recorded": {kind} does not report experts; leave it out')
        if self.weights.anchor_every > 1:
            raise ValueError(f"weights.anchor_every: {kind} reads whole versions; leave it out")
        if self.weights.sync == "collective":
            raise ValueError(f'weights.sync = "collective": {kind} reads versions from their folders; leave it out')
