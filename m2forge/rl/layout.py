"""Paths in the directory of a run, and the lineage of its published versions.

    runs/NAME/  config.toml  metrics.jsonl  tensorboard/  checkpoints/      the trainer's
                weights/            published policy versions
                broadcast.json      where samplers find the trainer, if it broadcasts them
                pool.db             the data pool and the curriculum's state
                journal/            the gateway's journals; of several gateways, the first one's and a folder for each
                                    of the others
                checks.jsonl        evaluations on held-out tasks
                lineage.jsonl       trainer processes and the steps that they resumed from
                kept/               each evaluation's attempts at a few held-out tasks
                ratios/             importance ratio of each trained token, for the last steps
                agents/             folders of agent workers
                workspaces/         workspace and home of each attempt in flight, with agent hosts in a folder per host
                sandboxes.json      numbers of the attempts' sandboxes, about every second
                images/             on a Ray cluster: images of sandboxes, for all nodes (sandbox/shared_images.py)
                log/                output of the processes
                processes/          URL, starts and ends of each process, versions that samplers serve
                                    (cluster/process_record.py); counts of agent hosts
                keeper.sock         with agent hosts: connects the loop with the keeper of its processes
                failure.txt         the error that ended the run's last process
                gateway.json        URL and admin key of the gateway, while a run that admits deployed agents is running
                model/              the finished model

The lineage states which published versions the current weights descend from:

    runs/NAME/lineage.jsonl     {"branch": "9f86d081884c7d65", "step": 8}, a line for each trainer process

Each trainer process publishes under its own branch (`weights/store.py`) and resumes from the step of a checkpoint.
Later steps that earlier branches had published are lost. So the newest common ancestor of a version (step, branch) and
the current weights is at

    shared_step = min(step, steps at which later branches began)

and the version itself is an ancestor exactly if that is its own step. A branch that has no line, as in a run that began
before this file was written, counts as earlier than all that have one.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from m2forge.cluster.config import ClusterConfig
from m2forge.cluster.keeper import RECORD_FOLDER
from m2forge.errors import RecordError
from m2forge.files import append_line, sync_path, whole_lines
from m2forge.pool.config import PoolConfig
from m2forge.rl.config import RLConfig
from m2forge.train.position import CHECKPOINT_FOLDER
from m2forge.weights.store import WeightStore

SQLITE = "sqlite:///"
TRAINER, SAMPLER, GATEWAY = "trainer", "sampler", "gateway"
TRAINER_NODE = "trainer-node"
"""Kinds of a run's processes, beside agent hosts."""


def trainer_node_names(config: ClusterConfig) -> list[str]:
    """The processes that run the trainer's ranks on other nodes than the first."""
    return [f"{TRAINER_NODE}-{index}" for index in range(1, config.ray.trainer_nodes)]


def sampler_names(config: ClusterConfig) -> list[str]:
    return _replica_names(SAMPLER, config.samplers)


def gateway_names(config: ClusterConfig) -> list[str]:
    return _replica_names(GATEWAY, config.gateways)


def host_names(config: ClusterConfig) -> list[str]:
    return [f"host-{index}" for index in range(config.agent_hosts)]


def _replica_names(kind: str, num: int) -> list[str]:
    """A single process of its kind has no number."""
    return [kind] if num == 1 else [f"{kind}-{index}" for index in range(num)]


@dataclass(frozen=True, slots=True)
class Layout:
    run_dir: Path

    @property
    def weights(self) -> Path:
        return self.run_dir / "weights"

    @property
    def broadcast(self) -> Path:
        return self.run_dir / "broadcast.json"

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / CHECKPOINT_FOLDER

    @property
    def journal(self) -> Path:
        """That of the first gateway, which alone has deployed agents' episodes."""
        return self.run_dir / "journal"

    def journals(self, config: ClusterConfig) -> list[Path]:
        """One for each gateway. The first one's is the same for any number of gateways, so that a run may change it."""
        return [self.journal, *(self.journal / name for name in gateway_names(config)[1:])]

    def remove_other_journals(self, config: ClusterConfig) -> None:
        """Remove the journals of gateways that the run no longer has. They hold attempts, which restart."""
        for path in {*self.journal.glob(f"{GATEWAY}-*")} - {*self.journals(config)}:
            shutil.rmtree(path)

    @property
    def gateway(self) -> Path:
        return self.run_dir / "gateway.json"

    @property
    def agents(self) -> Path:
        return self.run_dir / "agents"

    @property
    def workspaces(self) -> Path:
        return self.run_dir / "workspaces"

    @property
    def sandboxes(self) -> Path:
        return self.run_dir / "sandboxes.json"

    @property
    def processes(self) -> Path:
        return self.run_dir / RECORD_FOLDER

    @property
    def images(self) -> Path:
        return self.run_dir / "images"

    @property
    def log(self) -> Path:
        return self.run_dir / "log"

    @property
    def evaluations(self) -> Path:
        return self.run_dir / "checks.jsonl"

    @property
    def lineage(self) -> Path:
        return self.run_dir / "lineage.jsonl"

    @property
    def eval_attempts(self) -> Path:
        """Named `kept` since the first runs, which must stay readable."""
        return self.run_dir / "kept"

    @property
    def ratios(self) -> Path:
        return self.run_dir / "ratios"

    @property
    def model(self) -> Path:
        return self.run_dir / "model"

    def pool(self, config: PoolConfig) -> PoolConfig:
        """The pool's configuration with a relative SQLite path resolved against the run's directory."""
        path = config.url.removeprefix(SQLITE)
        if path == config.url or path.startswith("/"):
            return config
        return config.model_copy(update={"url": f"{SQLITE}{(self.run_dir / path).absolute()}"})

    def weight_store(self, config: RLConfig, companions: tuple[Path, ...] = ()) -> WeightStore:
        return WeightStore(
            self.weights,
            config.name,
            keep=config.keep_versions,
            anchor_every=config.weights.anchor_every,
            has_merged=config.engine.server is not None,
            companions=companions,
        )


@dataclass(frozen=True, slots=True)
class Branch:
    id: str
    step: int
    """Step of the checkpoint that the branch resumed from."""


@dataclass(frozen=True, slots=True)
class Lineage:
    branches: tuple[Branch, ...] = ()
    """Branches in the order in which they began."""

    def shared_step(self, step: int, branch: str) -> int:
        """Step of the newest version that both this version and the current weights descend from."""
        indices = [index for index, known in enumerate(self.branches) if known.id == branch]
        later = self.branches[indices[-1] + 1 :] if indices else self.branches
        return min([step, *(other.step for other in later)])

    def holds(self, step: int, branch: str) -> bool:
        """Whether the current weights are this version or descend from it."""
        return self.shared_step(step, branch) == step


def begin_branch(path: Path, branch: str, step: int) -> None:
    """Record that a trainer resumes from `step`; call it before the trainer publishes anything."""
    append_line(path, json.dumps({"branch": branch, "step": step}))
    sync_path(path)


def read_lineage(path: Path) -> Lineage:
    """Skips a partial last line, left by a trainer that died while writing."""
    if not path.exists():
        return Lineage()
    branches = []
    for number, line in enumerate(whole_lines(path.read_bytes()), start=1):
        try:
            record = json.loads(line)
            branches.append(Branch(str(record["branch"]), int(record["step"])))
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: not a branch ({error}); remove the line") from error
    return Lineage(tuple(branches))
