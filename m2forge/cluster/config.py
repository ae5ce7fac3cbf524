"""Configuration of the processes of a run: which of them run attempts.

[cluster]
agent_hosts = 2
"""

from typing import Annotated

from pydantic import Field

from m2forge.config import Config


class ClusterConfig(Config):
    agent_hosts: Annotated[int, Field(ge=0)] = 0
    """Processes that run training attempts, each as many at a time as `agent` allows. 0: the loop runs them itself,
    which needs fewer processes; they then end with it. With hosts, attempts outlive a loop that is killed, and the loop
    runs only the attempts of evaluations."""
    outlive_s: Annotated[float, Field(gt=0)] = 600.0
    """How long agent hosts, gateway and sampler go on after the loop was killed, until a resumed loop finds them."""
