"""Checkpoints of each mesh, loaded by each other: the same bits, and the same training from there."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m2forge.model.checkpoint import copy_model, load_model, open_source, save_model
from m2forge.model.config import LoRAConfig
from m2forge.model.convert import export_model
from m2forge.model.lora import is_adapter
from m2forge.model.start import Start, resume_from, start_from
from m2forge.model.tensor_source import refuse_misfits
from m2forge.model.transformer import Transformer
from m2forge.train.checkpoint import CheckpointStore, load_start, restore
from m2forge.train.config import CheckpointConfig, MachineConfig, MeshConfig, OptimizerConfig
from m2forge.train.machine import load_network
from m2forge.train.parallel import SINGLE_RANK, ProcessRanks, Ranks, context_group
from m2forge.train.position import Position
from tests.conftest import LONG
from tests.train.draw import small_model
from tests.train.processes import run_ranks
from tests.train.rank_case import Case, RecordingEngine, train, unsharded_model, whole_state

MESHES = {
    "one": MeshConfig(),
    "replicate": MeshConfig(replicate=2),
    "shard": MeshConfig(shard=2),
    "expert": MeshConfig(shard=2, expert=2),
    "context": MeshConfig(context=2),
    "replicate shard": MeshConfig(replicate=2, shard=2),
    "shard expert": MeshConfig(shard=4, expert=2),
}
SIZES = {"one": 1, "replicate shard": 4, "shard expert": 4}
"""Ranks of a mesh, where they are not two."""
TRIED = [mesh for mesh in MESHES if LONG or mesh in SIZES]
MOE = {"num_experts": 6, "top_k": 2, "intermediate_size": 6}
CASES = {
    "float64": Case(dtype=torch.float64),
    "muon": Case(dtype=torch.bfloat16, kind="muon"),
    "lora": Case(dtype=torch.bfloat16, lora=LoRAConfig(rank=3, targets=("v_proj", r"experts\.\d+\.w1"))),
}
"""No size of the network is a multiple of four, so that ranks hold shards of different sizes, and some none."""
CONTINUED = "float64"
NUM_BEFORE, NUM_AFTER = 2, 5


def machine(mesh: str) -> MachineConfig:
    return MachineConfig(device="cpu", mesh=MESHES[mesh])


def engine_of(model: Transformer, case: Case, mesh: str, ranks: Ranks) -> RecordingEngine:
    context = context_group(MESHES[mesh], ranks, model.config) if isinstance(ranks, ProcessRanks) else None
    optimizer = OptimizerConfig(kind=case.kind)
    return RecordingEngine(model, optimizer, ranks=ranks, router_bias="balanced", context=context)


def load(folder: Path, case: Case, mesh: str, ranks: Ranks) -> RecordingEngine:
    model = load_network(load_start(folder), machine(mesh), case.dtype, ranks, str(folder))
    engine = engine_of(model, case, mesh, ranks)
    restore(engine, folder)
    return engine


def content(engine: RecordingEngine) -> dict[str, Any]:
    """All that a checkpoint must hold; of weights on rank 0 alone."""
    model = unsharded_model(engine.model, engine.ranks)
    return {
        "weights": {} if model is None else model.state_dict(),
        "state": whole_state(engine.optimizer),
        "num_steps": engine.optimizer.num_steps,
    }


def checkpoint_of(folder: Path, case: str, mesh: str) -> Path:
    return folder / case / mesh / f"step-{NUM_BEFORE:08d}"


def save_all(ranks: Ranks, folder: Path, meshes: Sequence[str]) -> None:
    """Under each mesh and for each case: train, save beside the next steps, and note what there was."""
    for mesh in meshes:
        for name, case in CASES.items():
            start = start_from(folder / "base", case.lora)
            engine = engine_of(load_network(start, machine(mesh), case.dtype, ranks, "base"), case, mesh, ranks)
            train(engine, range(NUM_BEFORE))
            noted = copy.deepcopy(content(engine))
            store = CheckpointStore(folder / name / mesh, CheckpointConfig())
            store.begin(engine, Position(step=NUM_BEFORE))
            if name == CONTINUED:
                noted["after"] = train(engine, range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER))
            store.wait()
            if ranks.rank == 0:
                torch.save(noted, folder / f"{name} {mesh}.pt")


def is_tried(case: str, saved: str, mesh: str) -> bool:
    """All by default take too long: each pair of meshes with one case, the same mesh with the one that goes on."""
    index = TRIED.index(saved) - TRIED.index(mesh)
    return LONG or list(CASES)[index % len(CASES)] == case


def load_all(ranks: Ranks, folder: Path, meshes: Sequence[str]) -> list[str]:
    """Load every checkpoint under each mesh; returns what differs, on rank 0."""
    problems = []
    for mesh in meshes:
        for saved in TRIED:
            for name, case in CASES.items():
                if not is_tried(name, saved, mesh):
                    continue
                engine = load(checkpoint_of(folder, name, saved), case, mesh, ranks)
                expected, found = torch.load(folder / f"{name} {saved}.pt", weights_only=False), content(engine)
                if ranks.rank == 0:
                    problems += [f"{name}: {saved} → {mesh}: {x}" for x in differences(found, expected)]
                if name == CONTINUED:
                    after = train(engine, range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER))
                    if ranks.rank == 0:
                        far = distances(after, expected["after"], 0.0 if saved == mesh else 1e-12)
                        problems += [f"after {saved} → {mesh}: {x}" for x in far]
    return problems


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    wrong = ["num_steps"] * (found["num_steps"] != expected["num_steps"])
    for key in ("weights", "state"):
        ours, theirs = found[key], expected[key]
        wrong += sorted(ours.keys() ^ theirs.keys())
        wrong += [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
    return wrong


def distances(found: Mapping[str, Any], expected: Mapping[str, Any], bound: float) -> list[str]:
    pairs = [(key, name) for key in ("weights", "state") for name in expected[key]]
    return [
        f"{name} by {gap:.1e}"
        for key, name in pairs
        if not (gap := float((found[key][name] - expected[key][name]).abs().max())) <= bound
    ]


def save_and_load(ranks: ProcessRanks, folder: Path, saves: Sequence[str], loads: Sequence[str]) -> list[str]:
    save_all(ranks, folder, saves)
    ranks.max_int(0)
    return load_all(ranks, folder, loads)


def meshes_of(num_ranks: int) -> list[str]:
    return [mesh for mesh in TRIED if SIZES.get(mesh, 2) == num_ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the checkpoints of all meshes of two ranks, and of one process."""
    folder = tmp_path_factory.mktemp("resharding")
    save_model(small_model(torch.float64, moe=MOE, vocab_size=33), folder / "base")
    save_all(SINGLE_RANK, folder, ["one"])
    if two := meshes_of(2):
        run_ranks(partial(save_and_load, folder=folder, saves=two, loads=()), folder / "two", 2)
    return folder


@pytest.fixture(scope="module")
def problems(folder: Path) -> list[str]:
    two, four = meshes_of(2), meshes_of(4)
    found: Any = run_ranks(partial(save_and_load, folder=folder, saves=four, loads=four), folder / "four", 4)
    if two:
        found += run_ranks(partial(save_and_load, folder=folder, saves=(), loads=two), folder / "two again", 2)
    found.append(load_all(SINGLE_RANK, folder, ["one"]))
    return [problem for part in found for problem in part]


def test_each_mesh_loads_what_each_other_saved(problems: list[str]) -> None:
    assert problems == []


def test_what_ranks_saved_is_exported_as_a_public_folder(folder: Path, problems: list[str], tmp_path: Path) -> None:
    saved = checkpoint_of(folder, "float64", "shard expert") / "model"
    weights = torch.load(folder / "float64 shard expert.pt", weights_only=False)["weights"]
    export_model(saved, tmp_path / "exported", max_shard_bytes=2_000)
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > 3
    model = load_model(tmp_path / "exported")
    ours = model.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], weights[name])] == []


def test_an_adapter_that_ranks_saved_stays_one(folder: Path, problems: list[str], tmp_path: Path) -> None:
    saved = checkpoint_of(folder, "lora", "replicate shard") / "model"
    weights = torch.load(folder / "lora replicate shard.pt", weights_only=False)["weights"]
    copy_model(saved, tmp_path / "copied")
    ours = resume_from(tmp_path / "copied").build("cpu", torch.bfloat16).state_dict()
    assert any(is_adapter(name) for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], weights[name])] == []
    merged, again = open_source(saved), open_source(tmp_path / "copied")
    refuse_misfits(merged)
    for name in merged.headers:
        assert torch.equal(merged.read(name, torch.bfloat16), again.read(name, torch.bfloat16))


def test_ranks_draw_the_weights_that_one_process_draws(tmp_path: Path) -> None:
    model, generator = small_model(torch.float32, moe=MOE, vocab_size=33), torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, model.config.init_std, generator=generator)
    expected, start = model.state_dict(), Start(model.config, seed=3)
    (found, _) = run_ranks(partial(draw, start=start), tmp_path, 2)
    assert isinstance(found, dict)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def draw(ranks: ProcessRanks, start: Start) -> dict[str, Tensor]:
    model = load_network(start, machine("expert"), torch.float32, ranks, "seed")
    found = unsharded_model(model, ranks)
    return {} if found is None else dict(found.state_dict())
