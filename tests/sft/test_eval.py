"""Held-out loss during fine-tuning, through the command: what is held out, measured, kept and exported."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from m2forge import cli
from m2forge.config import TomlValue, build, write_resolved
from m2forge.errors import ConfigError
from m2forge.model.checkpoint import load_model
from m2forge.observe.metrics import read_metrics
from m2forge.records import Pack
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import HeldOutTrajectories, TrajectorySource, run_sft
from m2forge.sft.synthetic import write_jsonl
from m2forge.train.engine import TrainEngine
from m2forge.train.position import read_position
from tests.sft.start import write_start


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, trajectories a and b to train on, and c to evaluate; a holds copies of some of c."""
    folder = tmp_path_factory.mktemp("start")
    write_start(folder / "model")
    for seed, name in enumerate("abc"):
        write_jsonl(folder / f"{name}.jsonl", 8, seed, "train")
    with (folder / "a.jsonl").open("a") as file:
        file.write("".join((folder / "c.jsonl").read_text().splitlines(keepends=True)[:3]))
    return folder


def configure(start: Path, evaluation: dict[str, TomlValue], **changes: TomlValue) -> SFTConfig:
    data: dict[str, TomlValue] = {
        "name": "small",
        "model": str(start / "model"),
        "num_epochs": 2,
        "pack_tokens": 512,
        "lr": {"start": 1e-2},
        "data": {"context": 512, "sources": [{"path": str(start / name)} for name in ("a.jsonl", "b.jsonl")]},
        "train": {"checkpoint": {"every_steps": 3, "keep": 1}, "machine": {"device": "cpu", "num_threads": 1}},
        "eval": evaluation,
    }
    return build(SFTConfig, data | changes)


Documents = set[tuple[int, ...]]


def documents(pack: Pack) -> Documents:
    ends = pack.lengths.cumsum().tolist()
    return {
        tuple(pack.tokens[end - size : end].tolist()) for end, size in zip(ends, pack.lengths.tolist(), strict=True)
    }


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> tuple[Documents, Documents]:
    """The documents that a run trains on and those that it evaluates."""
    trained, evaluated = set[tuple[int, ...]](), set[tuple[int, ...]]()
    next_pack, packs = TrajectorySource.next_pack, HeldOutTrajectories.packs

    def note_trained(self: TrajectorySource) -> Pack:
        pack = next_pack(self)
        trained.update(documents(pack))
        return pack

    def note_evaluated(self: HeldOutTrajectories) -> Iterator[Pack]:
        for pack in packs(self):
            evaluated.update(documents(pack))
            yield pack

    monkeypatch.setattr(TrajectorySource, "next_pack", note_trained)
    monkeypatch.setattr(HeldOutTrajectories, "packs", note_evaluated)
    return trained, evaluated


def test_a_share_is_held_out_evaluated_and_never_trained_on(
    start: Path, tmp_path: Path, read: tuple[Documents, Documents]
) -> None:
    write_resolved(configure(start, {"every": 4, "share": 0.3, "export": "best"}), tmp_path / "small.toml")
    assert cli.main(["sft", str(tmp_path / "small.toml"), "--runs", str(tmp_path)]) == 0
    run_dir, (trained, evaluated) = tmp_path / "small", read
    assert 2 <= len(evaluated) <= 12
    assert len(trained) + len(evaluated) == 19
    assert not trained & evaluated
    losses = {
        step.step: step.values["eval/loss"]
        for step in read_metrics(run_dir / "metrics.jsonl")
        if "eval/loss" in step.values
    }
    last = max(losses)
    assert list(losses) == sorted({*range(4, last, 4), last})
    position = read_position(max((run_dir / "checkpoints").iterdir()))
    assert position.best is not None
    assert position.step == last
    assert position.best.loss == losses[position.best.step] == min(losses.values())
    exported = load_model(run_dir / "model")
    stored = load_model(run_dir / "checkpoints" / f"step-{position.best.step:08d}" / "model")
    assert all(torch.equal(weight, stored.state_dict()[name]) for name, weight in exported.state_dict().items())


def test_a_run_dies_and_goes_on_with_the_same_division(
    start: Path, tmp_path: Path, read: tuple[Documents, Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(start, {"every": 4, "share": 0.3}, num_epochs=1)
    whole = load_model(run_sft(config, tmp_path / "whole")).state_dict()
    step_rows, left = TrainEngine.step_rows, [5]

    def dying_step(self: TrainEngine, *args: object, **options: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return step_rows(self, *args, **options)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(TrainEngine, "step_rows", dying_step)
    with pytest.raises(KeyboardInterrupt):
        run_sft(config, tmp_path / "parts")
    parts = load_model(run_sft(config, tmp_path / "parts")).state_dict()
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    trained, evaluated = read
    assert not trained & evaluated


def test_sources_are_evaluated_and_their_copies_not_trained_on(
    start: Path, tmp_path: Path, read: tuple[Documents, Documents]
) -> None:
    config = configure(start, {"every": 100, "sources": [{"path": str(start / "c.jsonl")}]})
    run_sft(config, tmp_path)
    trained, evaluated = read
    assert (len(trained), len(evaluated)) == (16, 8)
    assert not trained & evaluated
    values = read_metrics(tmp_path / "small" / "metrics.jsonl")[-1].values
    assert values["eval/loss/c"] == values["eval/loss"]
    assert values["eval/num_tokens"] == sum(map(len, evaluated))


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"every": 2}, "set either share or sources"),
        ({"every": 2, "share": 0.1, "sources": [{"path": "c.jsonl"}]}, "set either share or sources"),
        ({"every": 2, "sources": [{"path": "c.jsonl", "weight": 2.0}]}, "leave weight out"),
        ({"share": 0.1}, "every"),
        ({"every": 2, "share": 1.0}, "share"),
    ],
)
def test_an_evaluation_that_says_nothing_or_too_much_is_refused(
    start: Path, evaluation: dict[str, TomlValue], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(start, evaluation)
