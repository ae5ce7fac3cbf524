"""The agent of a run, by its configured kind."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from m2forge.agents.attempt import AttemptAgent
from m2forge.agents.command import CommandAgent
from m2forge.agents.loop_agent import LoopAgent
from m2forge.agents.program import require_program, require_version
from m2forge.agents.worker_pool import WorkerPool
from m2forge.rl.config import AgentConfig, LoopAgentConfig, WorkerAgentConfig
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


def open_agent(config: AgentConfig, folder: Path, format: ChatFormat) -> AbstractAsyncContextManager[AttemptAgent]:
    """`folder`: parent of the folders of workers. `format`: the policy's chat format."""
    if isinstance(config, LoopAgentConfig):
        return LoopAgent(config, format)
    if isinstance(config, WorkerAgentConfig):
        return WorkerPool(config, folder)
    return CommandAgent(config)
