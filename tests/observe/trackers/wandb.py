"""A scripted double of wandb: what a client sends is appended to the file that WANDB_DOUBLE names.

The function that WANDB_FAILS names raises, as it does without a network.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path


def _note(kind: str, **fields: object) -> None:
    path = Path(os.environ["WANDB_DOUBLE"])
    if os.environ.get("WANDB_FAILS") == kind:
        raise ConnectionError("network is unreachable")
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, **fields}) + "\n")


class Settings:
    def __init__(self, *, console: str) -> None:
        self.console = console


class Run:
    def define_metric(self, name: str, *, step_metric: str | None = None, hidden: bool = False) -> None:
        _note("define", name=name, step_metric=step_metric)

    def log(self, values: Mapping[str, float]) -> None:
        _note("log", values=dict(values))

    def finish(self, exit_code: int) -> None:
        _note("finish", exit_code=exit_code)


def init(*, project: str, name: str, id: str, resume: str, dir: str, settings: Settings) -> Run:
    assert Path(dir).is_dir()
    _note("init", project=project, name=name, id=id, resume=resume, console=settings.console)
    return Run()
