"""Configuration of the processes of a run: on which machines they run, and which of them run attempts.

[cluster]
launcher = "ray"
agent_hosts = 2

[cluster.ray]
trainer_gpus = 8
sampler_gpus = 4
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config


class RayConfig(Config):
    """Resources that a run requests from a Ray cluster. A process is never split, but the ranks of a trainer may have
    several nodes."""

    address: str = Field(default="auto", pattern=r"^(auto|[^:/\s]+:\d+)$")
    """HOST:PORT of the cluster's head. auto: the value of `RAY_ADDRESS`, else the cluster that this machine belongs
    to."""
    cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs that each process reserves."""
    trainer_nodes: Annotated[int, Field(gt=0)] = 1
    """Nodes that the ranks of the trainer are divided between, each with as many."""
    trainer_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs that the trainer reserves on each of its nodes: as many as it has ranks there. 0: it trains on CPUs."""
    sampler_gpus: Annotated[int, Field(ge=0)] = 0
    """Those of each sampler. 0: it samples on a CPU."""
    gpu: str | None = Field(default=None, min_length=1)
    """The type of these GPUs as Ray names it, such as H200; None: any."""
    start_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that the run waits at its start for nodes to respond and for its reservation."""


class ClusterConfig(Config):
    launcher: Literal["local", "ray"] = "local"
    """local: all processes run on this machine. ray: on the nodes of a Ray cluster (`pip install m2forge[ray]`)."""
    agent_hosts: Annotated[int, Field(ge=0)] = 0
    """Processes that run training attempts, each as many at a time as `agent` allows. 0: the loop runs them itself,
    which needs fewer processes; they then end with it. With hosts, attempts outlive a loop that is killed, and the loop
    runs only the attempts of evaluations."""
    samplers: Annotated[int, Field(ge=1)] = 1
    """Sampler processes, each with the whole policy. All calls of an episode go to one of them, whose prefix cache
    holds the conversation."""
    gateways: Annotated[int, Field(ge=1)] = 1
    """Gateway processes, which share the attempts. An attempt makes all its calls at one of them; deployed agents use
    the first. With `gateway.port`, the others listen on the ports after it."""
    outlive_s: Annotated[float, Field(gt=0)] = 600.0
    """With agent hosts: seconds for which hosts, gateway and sampler keep running after the loop was killed, unless a
    resumed loop finds them."""
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.launcher == "local" and self.ray != RayConfig():
            raise ValueError('cluster.ray has no effect with launcher = "local"; set launcher = "ray" or leave it out')
        if not self.agent_hosts and self.outlive_s != type(self).model_fields["outlive_s"].default:
            raise ValueError(
                f"outlive_s ({self.outlive_s:g}): with agent_hosts = 0 no process outlives the loop; set agent_hosts "
                "to 1 or more, or leave it out"
            )
        if self.ray.gpu is not None and not self.ray.trainer_gpus + self.ray.sampler_gpus:
            raise ValueError("cluster.ray.gpu: the run requests no GPU; set trainer_gpus or sampler_gpus")
        return self
