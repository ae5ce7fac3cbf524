"""Checkpoints and finished models survive a kill at any moment of their writing."""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from m2forge.model.checkpoint import load_model
from m2forge.model.start import Start
from m2forge.records import JsonValue
from m2forge.train.checkpoint import CheckpointStore, load_start, restore
from m2forge.train.config import CheckpointConfig, OptimizerConfig, TrainConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.loop import PackSource, TrainLoop
from m2forge.train.position import Best, Position, read_position
from tests.train.draw import draw_pack, small_model

CONFIG = OptimizerConfig()
STRIDE = 1 if os.environ.get("M2FORGE_LONG") == "1" else 3
"""Between the moments tried."""
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}
SURVIVED = 0


def dies_at(number: int, action: Callable[[], object]) -> bool:
    """Do `action` in a process that is gone, without a chance to tidy up, at its `number`-th touch of a file."""
    process = os.fork()
    if not process:
        left = [number]

        def count_down(event: str, _: tuple[object, ...]) -> None:
            if event in FILE_EVENTS:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)

        sys.addaudithook(count_down)
        action()
        os._exit(SURVIVED)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != SURVIVED


def trained(num_steps: int) -> TrainEngine:
    engine = TrainEngine(small_model(torch.float32), CONFIG, router_bias="balanced")
    for step in range(num_steps):
        engine.step_rows([draw_pack(step, [8])], lr=1e-2)
    return engine


def make_store(folder: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointConfig(keep=keep))


def assert_whole(folder: Path, expected: TrainEngine) -> None:
    model = load_start(folder).build(torch.device("cpu"), torch.float32)
    engine = TrainEngine(model, CONFIG, router_bias="balanced")
    restore(engine, folder)
    assert all(torch.equal(x, expected.model.state_dict()[name]) for name, x in engine.model.state_dict().items())
    ours, theirs = engine.optimizer, expected.optimizer
    assert ours.num_steps == theirs.num_steps
    assert all(torch.equal(rows.tensor, theirs.held()[name].tensor) for name, rows in ours.held().items())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_newest_checkpoint_is_whole_whenever_its_writer_dies(tmp_path: Path) -> None:
    engines = {step: trained(step) for step in (1, 2, 3, 4)}
    base = make_store(tmp_path / "base")
    for step in (1, 2):
        base.save(engines[step], Position(step_in_phase=step, step=step))
    newest = set()
    for number in range(0, 1000, STRIDE):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "base", folder)
        store = make_store(folder)
        died = dies_at(number, partial(store.save, engines[3], Position(step_in_phase=3, step=3)))
        found = store.newest()
        assert found is not None
        step = read_position(found).step
        newest.add(step)
        assert_whole(found, engines[step])
        # The next run ends with what a run without the death would have left.
        store.save(engines[3], Position(step_in_phase=3, step=3))
        store.save(engines[4], Position(step_in_phase=4, step=4))
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]
        if not died:
            break
    assert newest == {2, 3}
    assert number > 20


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_best_checkpoint_is_whole_whenever_a_writer_dies(tmp_path: Path) -> None:
    """A save that replaces the best one: the newest checkpoint always names a best one that is whole."""
    engines = {step: trained(step) for step in (1, 2, 3)}
    base = make_store(tmp_path / "base", keep=1)
    base.save(engines[1], Position(step_in_phase=1, step=1, best=Best(1, 2.0)))
    base.save(engines[2], Position(step_in_phase=2, step=2, best=Best(1, 2.0)))
    named = set()
    for number in range(0, 1000, STRIDE):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "base", folder)
        store = make_store(folder, keep=1)
        died = dies_at(number, partial(store.save, engines[3], Position(step_in_phase=3, step=3, best=Best(3, 1.0))))
        newest = store.newest()
        assert newest is not None
        best = read_position(newest).best
        assert best is not None
        named.add(best.step)
        assert_whole(store.path(best.step), engines[best.step])
        if not died:
            break
    assert named == {1, 3}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_finished_model_is_complete_or_absent_after_a_kill(tmp_path: Path) -> None:
    def open_source(index: int, state: Mapping[str, JsonValue] | None) -> PackSource:
        raise AssertionError("no phase is left")

    loop = TrainLoop(tmp_path, TrainConfig(), (), lambda: Start(small_model().config), open_source)
    loop._write_model()
    for number in range(1000):
        died = dies_at(number, loop._write_model)
        if (tmp_path / "model").exists():
            load_model(tmp_path / "model")
        if not died:
            break
    assert number > 10
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_rest_of_a_removal_is_no_checkpoint(tmp_path: Path) -> None:
    store, engine = make_store(tmp_path), trained(1)
    (tmp_path / "step-00000001" / "model").mkdir(parents=True)
    assert store.newest() is None
    store.save(engine, Position(step_in_phase=1, step=1))
    assert_whole(tmp_path / "step-00000001", engine)


def test_none_is_written_where_none_is_kept(tmp_path: Path) -> None:
    make_store(tmp_path / "runs", keep=0).save(trained(1), Position(step_in_phase=1, step=1))
    assert not (tmp_path / "runs").exists()
