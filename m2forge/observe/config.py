"""Configuration of a run's metrics: which programs receive them besides `metrics.jsonl`, which every run writes.

[train.metrics]
writers = ["tensorboard", "wandb"]
project = "my-project"
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config

WriterName = Literal["tensorboard", "wandb", "mlflow"]
DEFAULT_PROJECT = "m2forge"


class MetricsConfig(Config):
    writers: tuple[WriterName, ...] = ("tensorboard",)
    """tensorboard: event files in the run's folder. wandb: Weights & Biases. mlflow: an MLflow server or store.
    The last two need the extra of their name: pip install 'm2forge[wandb]'."""
    project: str = Field(default=DEFAULT_PROJECT, min_length=1)
    """Project in wandb, experiment in MLflow."""
    run_name: str | None = Field(default=None, min_length=1)
    """Display name of the run in wandb and MLflow; None: the name of the run's folder."""
    tracking_uri: str | None = Field(default=None, min_length=1)
    """mlflow: address of the tracking server or store; None: the environment's MLFLOW_TRACKING_URI, else MLflow's own
    default. Address and API key of wandb come from its environment variables or `wandb login`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.writers)) < len(self.writers):
            raise ValueError(f"writers: expected each name once, received {list(self.writers)}")
        if self.tracking_uri is not None and "mlflow" not in self.writers:
            raise ValueError('tracking_uri has no effect without "mlflow" among the writers; add it, or leave it out')
        if not {"wandb", "mlflow"} & set(self.writers):
            for name, is_default in (("project", self.project == DEFAULT_PROJECT), ("run_name", self.run_name is None)):
                if not is_default:
                    raise ValueError(
                        f'{name} has no effect without "wandb" or "mlflow" among the writers; leave it out'
                    )
        return self
