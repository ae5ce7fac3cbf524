"""Checkpoints: what is kept, what is removed, and what a torn one means."""

import json
from pathlib import Path

import pytest
import torch

from m2forge.errors import CheckpointError
from m2forge.train.checkpoint import CheckpointStore, load_start, restore
from m2forge.train.config import CheckpointConfig, OptimizerConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.position import POSITION_FILE, Best, Position, begun_phase, read_position
from tests.train.draw import draw_pack, small_model

CPU = torch.device("cpu")


def make_engine(dtype: torch.dtype = torch.float32) -> TrainEngine:
    return TrainEngine(small_model(dtype), OptimizerConfig(), router_bias="balanced")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_with_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    engine = make_engine(dtype)
    engine.model.token_ids = {"eos_token_id": 7}
    packs = [draw_pack(seed, [9, 5]) for seed in range(6)]
    for pack in packs[:3]:
        engine.step_rows([pack], lr=1e-2)
    position = Position(phase=1, step_in_phase=2, step=3, num_tokens=42, source={"epoch": 1, "waiting": [3, 4]})
    store = CheckpointStore(tmp_path, CheckpointConfig())
    store.save(engine, position)
    folder = store.newest()
    assert folder is not None
    again = TrainEngine(load_start(folder).build(CPU, dtype), OptimizerConfig(), router_bias="balanced")
    restore(again, folder)
    assert read_position(folder) == position
    assert again.model.token_ids == {"eos_token_id": 7}
    for pack in packs[3:]:
        engine.step_rows([pack], lr=1e-2)
        again.step_rows([pack], lr=1e-2)
    theirs = again.model.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in engine.model.state_dict().items())


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (0, [])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    store, engine = CheckpointStore(tmp_path, CheckpointConfig(keep=keep)), make_engine()
    for step in range(1, 5):
        store.save(engine, Position(step=step))
    assert sorted(path.name for path in tmp_path.glob("*")) == [f"step-{step:08d}" for step in left]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    store, engine = CheckpointStore(tmp_path, CheckpointConfig(keep=1)), make_engine()
    best = {1: None, 2: Best(2, 0.5), 3: Best(2, 0.5), 4: Best(2, 0.5), 5: Best(5, 0.1 + 0.2)}
    left = {}
    for step in best:
        position = Position(step=step, best=best[step])
        store.save(engine, position)
        newest = store.newest()
        assert newest is not None
        assert read_position(newest) == position
        left[step] = [int(path.name[-8:]) for path in sorted(tmp_path.iterdir())]
    assert left == {1: [1], 2: [2], 3: [2, 3], 4: [2, 4], 5: [5]}


def test_a_run_without_evaluation_writes_no_best(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, CheckpointConfig()).save(make_engine(), Position(step=1))
    content = json.loads((tmp_path / "step-00000001" / POSITION_FILE).read_text())
    assert list(content["position"]) == ["phase", "step_in_phase", "step", "num_tokens", "source"]


def test_the_rest_of_a_killed_save_is_no_checkpoint(tmp_path: Path) -> None:
    store, engine = CheckpointStore(tmp_path, CheckpointConfig(keep=3)), make_engine()
    assert begun_phase(tmp_path) is None
    store.save(engine, Position(step=1, phase=2))
    store.save(engine, Position(step=2, phase=2, step_in_phase=1))
    assert begun_phase(tmp_path) == 2
    (tmp_path / "step-00000002" / POSITION_FILE).unlink()
    (tmp_path / ".step-00000009.abcd.partial").mkdir()
    assert begun_phase(tmp_path) == 1
    store.save(engine, Position(step=3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_the_state_of_another_network_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig())
    store.save(make_engine(), Position(step=1))
    folder = store.newest()
    assert folder is not None
    for engine in (
        TrainEngine(small_model(num_mtp=1), OptimizerConfig()),
        TrainEngine(small_model(), OptimizerConfig(kind="muon")),
    ):
        with pytest.raises(CheckpointError, match="does not fit this network or optimizer"):
            restore(engine, folder)


def test_torn_files_are_named(tmp_path: Path) -> None:
    store, engine = CheckpointStore(tmp_path, CheckpointConfig()), make_engine()
    store.save(engine, Position(step=1))
    folder = tmp_path / "step-00000001"
    optimizer = folder / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: cannot be read"):
        restore(engine, folder)
    (folder / POSITION_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"position\.json: cannot be read"):
        read_position(folder)
