"""The configuration of `m2forge eval`: an evaluation's, with trials of an agent at tasks.

model = "runs/rl/model"
output = "runs/rl/eval"

[trials]
tasks = ["tasks.jsonl"]
num_trials = 4

[trials.agent]
kind = "command"
command = ["my-agent", "{instruction}"]
timeout_s = 300                             # the wall limit

[trials.agent.sandbox]
max_cpus = 1.0
max_memory_bytes = 2147483648
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from m2forge.agents.preset import with_preset
from m2forge.config import Config, TomlValue
from m2forge.evaluate.config import EvalConfig
from m2forge.gateway.config import GatewayConfig
from m2forge.rl.config import AgentConfig, EngineConfig
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.source import SourceKind, parse_source
from m2forge.tasks.task_set import Split

Count = Annotated[int, Field(gt=0)]


class Price(Config):
    """Price of the policy's tokens, per million, in any currency."""

    prompt: Annotated[float, Field(ge=0)] = 0.0
    """Price of prompt tokens; those of every call count."""
    completion: Annotated[float, Field(ge=0)] = 0.0
    """Price of sampled tokens."""


class TrialsConfig(Config):
    """Attempts of an agent at tasks. `agent.sandbox.max_cpus`, `agent.sandbox.max_memory_bytes` and the agent's timeout
    limit each."""

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Sources of tasks, as in `curriculum`: names of families, JSONL files, `folders:PATH`, FILE.py:NAME."""
    split: Split = "held_out"
    num_tasks: Count = 100
    """Number of tasks, spread evenly over the sources; a source with fewer gives all of its tasks."""
    num_trials: Count = 4
    """Trials of each task."""
    seed: Annotated[int, Field(ge=0)] = 1
    """Chooses the tasks."""
    max_tries: Count = 3
    """Attempts at a trial that failed for reasons other than the policy; then it counts as infra, apart from the
    mean."""
    compare: Path | None = Field(default=None, exclude=True)
    """Output folder of another policy's trials at the same tasks; the report shows the difference, task by task."""
    price: Price = Field(default=Price(), exclude=True)
    context: Count | None = None
    """Maximum tokens of prompt plus completion; None: the model's limit."""
    agent: AgentConfig
    verify: VerifyConfig = VerifyConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig(port=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        folders = [source for source in self.tasks if parse_source(source).kind is SourceKind.FOLDERS]
        if folders and self.agent.sandbox.backend == "process":
            raise ValueError(f'agent.sandbox.backend: {folders[0]} brings files of its own; set "namespace" or "auto"')
        return self


class TrialEvalConfig(EvalConfig):
    trials: TrialsConfig | None = None
    """Trials of an agent at tasks, through the gateway."""

    @property
    def is_empty(self) -> bool:
        return self.trials is None and super().is_empty

    @classmethod
    def complete(cls, data: Mapping[str, TomlValue]) -> dict[str, TomlValue]:
        """Merge the agent's preset."""
        trials = data.get("trials")
        if not isinstance(trials, dict) or not isinstance(agent := trials.get("agent"), dict):
            return dict(data)
        return {**data, "trials": {**trials, "agent": {"kind": "worker", **with_preset(agent)}}}
