"""The agent of a run, by its configured kind."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from m2forge.agents.attempt import Answer, AttemptAgent, Job, Recorded
from m2forge.agents.command import CommandAgent
from m2forge.agents.config import CommandConfig
from m2forge.agents.loop_agent import LoopAgent
from m2forge.agents.program import require_program, require_version
from m2forge.agents.worker_pool import WorkerPool
from m2forge.rl.config import AgentConfig, CommandAgentConfig, LoopAgentConfig, WorkerAgentConfig
from m2forge.tasks.verifiers_family import ROLLOUT_KEY
from m2forge.text.format import ChatFormat


def require_agent(config: AgentConfig) -> None:
    """Raise if the agent's program is not there, or has another version than configured."""
    if isinstance(config, LoopAgentConfig):
        return
    if isinstance(config, WorkerAgentConfig):
        require_program(config.command, {}, config.sandbox.inherits)
        return
    require_program(config.command, config.env, config.sandbox.inherits)
    if config.version is not None:
        require_version(config.version, config.env, config.sandbox.inherits, config.preset)


@asynccontextmanager
async def open_agent(config: AgentConfig, folder: Path, format: ChatFormat) -> AsyncGenerator[AttemptAgent, None]:
    """`folder`: parent of the folders of workers. `format`: the policy's chat format."""
    opened: WorkerPool | CommandAgent | LoopAgent
    if isinstance(config, LoopAgentConfig):
        opened = LoopAgent(config, format)
    elif isinstance(config, WorkerAgentConfig):
        opened = WorkerPool(config, folder)
    else:
        opened = CommandAgent(config)
    async with opened as agent:
        yield RoutedAgent(agent, config)


class RolloutAnswer(Answer):
    """The answer of a family's own rollout, whose log is not the agent's."""


class RoutedAgent:
    """The configured agent, except at tasks whose family drives its own rollout: there the command that the task's
    metadata names runs, within the agent's time limit, and for the kind `command` in its sandbox."""

    def __init__(self, agent: AttemptAgent, config: AgentConfig) -> None:
        self._agent, self._config = agent, config
        self.is_silent_allowed = agent.is_silent_allowed

    async def attempt(self, job: Job, *, is_exclusive: bool = False) -> Answer:
        command = job.task.metadata.get(ROLLOUT_KEY)
        if not isinstance(command, list | tuple):
            return await self._agent.attempt(job, is_exclusive=is_exclusive)
        own = CommandConfig(command=tuple(str(word) for word in command))
        if isinstance(self._config, CommandAgentConfig):
            limits = {"timeout_s": self._config.timeout_s, "sandbox": self._config.sandbox}
        elif isinstance(self._config, WorkerAgentConfig):
            limits = {"timeout_s": self._config.timeout_s}
        else:
            limits = {}
        answer = await CommandAgent(own.model_copy(update=limits)).attempt(job)
        return RolloutAnswer(answer.text, answer.transcript)

    async def watch(self) -> None:
        await self._agent.watch()

    async def inspect(self, answer: Answer, recorded: Recorded) -> bool | None:
        return None if isinstance(answer, RolloutAnswer) else await self._agent.inspect(answer, recorded)
