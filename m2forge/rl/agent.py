"""The agent of a run, by its configured kind."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from m2forge.agents.attempt import AttemptAgent, RoutedAgent
from m2forge.agents.command import CommandAgent, RolloutAgent
from m2forge.agents.config import CommandConfig
from m2forge.agents.loop_agent import LoopAgent
from m2forge.agents.program import require_program, require_version
from m2forge.agents.worker_pool import WorkerPool
from m2forge.rl.config import AgentConfig, CommandAgentConfig, LoopAgentConfig, WorkerAgentConfig
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
        yield RoutedAgent(agent, RolloutAgent(_rollout_config(config)))


def _rollout_config(config: AgentConfig) -> CommandConfig:
    """Limits of a family's own rollouts: the agent's timeout, and for the kind `command` its sandbox."""
    limits = CommandConfig(command=("",))
    if isinstance(config, CommandAgentConfig):
        return limits.model_copy(update={"timeout_s": config.timeout_s, "sandbox": config.sandbox})
    if isinstance(config, WorkerAgentConfig):
        return limits.model_copy(update={"timeout_s": config.timeout_s})
    return limits
