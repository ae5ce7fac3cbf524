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

from m2forge.compiled import cache_folder
from tests.rl.ring import ROOT

NUM_CPUS = 4
HEAD = "n0"
MEMORY_BYTES = 80 << 20


@dataclass
class Nodes:
    cluster: Any
    cache: Path
    """`XDG_CACHE_HOME` of the nodes."""
    num_added: int = 0
    raylets: dict[str, Any] = field(default_factory=dict)
    """By the name of their node."""

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> str:
        name = f"n{self.num_added + 1}"
        self.num_added += 1
        with self.environment():
            self.raylets[name] = self.cluster.add_node(
                node_name=name, num_cpus=NUM_CPUS, object_store_memory=MEMORY_BYTES
            )
        return name

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(self.cache))
            yield

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
        # On other machines the images would be others. What this one has compiled is as good there.
        cache = Path(folder, "cache")
        shutil.copytree(cache_folder(), cache / cache_folder().name, ignore=_ignore_folders)
        head = {
            "node_name": HEAD,
            "num_cpus": 1,
            "num_gpus": 1,
            "resources": {"accelerator_type:A100": 1},
            "include_dashboard": False,
            "object_store_memory": MEMORY_BYTES,
            "temp_dir": folder,
        }
        cluster = cluster_utils.Cluster()
        try:
            nodes = Nodes(cluster, cache)
            with nodes.environment():
                cluster.add_node(**head)
            nodes.add()
            nodes.add()
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _ignore_folders(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_dir()]


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
