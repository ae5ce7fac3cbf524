"""Paths in the directory of a run.

runs/NAME/  config.toml  metrics.jsonl  tensorboard/  checkpoints/      the trainer's
            weights/            published policy versions
            pool.db             the data pool and the curriculum's state
            journal/            the gateway's journals
            checks.jsonl        evaluations on held-out tasks
            lineage.jsonl       trainer processes and the steps that they resumed from
            kept/               each evaluation's attempts at a few held-out tasks
            ratios/             importance ratio of each trained token, for the last steps
            log/                output of the processes
            failure.txt         the error that ended the run's last process
            gateway.json        URL and admin key of the gateway, while a run that admits deployed agents is running
            model/              the finished model
"""

from dataclasses import dataclass
from pathlib import Path

from m2forge.forge.config import ForgeConfig
from m2forge.pool.config import PoolConfig
from m2forge.weights.store import WeightStore

SQLITE = "sqlite:///"


@dataclass(frozen=True, slots=True)
class Layout:
    run_dir: Path

    @property
    def weights(self) -> Path:
        return self.run_dir / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.run_dir / "journal"

    @property
    def gateway(self) -> Path:
        return self.run_dir / "gateway.json"

    @property
    def log(self) -> Path:
        return self.run_dir / "log"

    @property
    def checks(self) -> Path:
        return self.run_dir / "checks.jsonl"

    @property
    def lineage(self) -> Path:
        return self.run_dir / "lineage.jsonl"

    @property
    def kept(self) -> Path:
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

    def weight_store(self, config: ForgeConfig, companions: tuple[Path, ...] = ()) -> WeightStore:
        return WeightStore(self.weights, config.name, keep=config.keep_versions, companions=companions)
