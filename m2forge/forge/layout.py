"""What lies where in the directory of a run.

runs/NAME/  config.toml  metrics.jsonl  tensorboard/  checkpoints/      the trainer's
            weights/            published versions
            pool.db             the data pool, and where the curriculum stands
            journal/            what the gateway writes down
            checks.jsonl        success on held-out tasks
            lineage.jsonl       trainer processes, and the steps that they went on from
            kept/               attempts at a few of them, of every check
            ratios/             of trained to sampled probability, token by token, of the last steps
            log/                what the processes print
            gateway.json        address and admin key of the gateway, while a run that admits deployed agents goes on
            model/              when the run is complete
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
        """With a relative path of SQLite's taken from the run's directory."""
        path = config.url.removeprefix(SQLITE)
        if path == config.url or path.startswith("/"):
            return config
        return config.model_copy(update={"url": f"{SQLITE}{(self.run_dir / path).absolute()}"})

    def weight_store(self, config: ForgeConfig, companions: tuple[Path, ...] = ()) -> WeightStore:
        return WeightStore(self.weights, config.name, keep=config.keep_versions, companions=companions)
