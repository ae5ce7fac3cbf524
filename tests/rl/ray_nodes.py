"""A Ray cluster of three nodes on this machine, each a raylet of its own."""

import contextlib
import importlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.rl.ring import ROOT

NUM_CPUS = 4
HEAD = "n0"
MEMORY_BYTES = 80 << 20


@dataclass
class Nodes:
    cluster: Any
    num_added: int = 0
    raylets: dict[str, Any] = field(default_factory=dict)
    """By the name of their node."""

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> str:
        name = f"n{self.num_added + 1}"
        self.num_added += 1
        self.raylets[name] = self.cluster.add_node(node_name=name, num_cpus=NUM_CPUS, object_store_memory=MEMORY_BYTES)
        return name

    def kill_raylet(self, name: str) -> None:
        """As if its machine failed: Ray ends the actors of the node when its raylet is gone."""
        self.raylets.pop(name).kill_raylet()


@contextlib.contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """The head, which has a GPU by name, and two nodes that may be killed."""
    with pytest.MonkeyPatch.context() as patch, kept_signals():
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        ray: Any = importlib.import_module("ray")
        cluster_utils: Any = importlib.import_module("ray.cluster_utils")

        folder = tempfile.mkdtemp(prefix="ray-")
        # Ray notes the address of the last cluster below it, for all that look for one.
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        head = {
            "node_name": HEAD,
            "num_cpus": 1,
            "num_gpus": 1,
            "resources": {"accelerator_type:A100": 1},
            "include_dashboard": False,
            "object_store_memory": MEMORY_BYTES,
            "temp_dir": folder,
        }
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = Nodes(cluster)
            nodes.add()
            nodes.add()
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
