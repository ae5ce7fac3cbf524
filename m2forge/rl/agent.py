"""The agent of a run, by its configured kind."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from m2forge.agents.attempt import AttemptAgent
from m2forge.agents.command import CommandAgent
from m2forge.agents.program import require_program
from m2forge.agents.worker_pool import WorkerPool
from m2forge.rl.config import AgentConfig, WorkerAgentConfig


def require_agent(config: AgentConfig) -> None:
    """Raise if the agent's program is not there."""
    env = {} if isinstance(config, WorkerAgentConfig) else config.env
    require_program(config.command, env, config.sandbox.inherits)


def open_agent(config: AgentConfig, folder: Path) -> AbstractAsyncContextManager[AttemptAgent]:
    """`folder`: parent of the folders of workers."""
    if isinstance(config, WorkerAgentConfig):
        return WorkerPool(config, folder)
    return CommandAgent(config)
