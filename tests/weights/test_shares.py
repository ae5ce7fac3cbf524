"""Versions that the ranks of a trainer publish together hold each tensor once, whatever the mesh."""

import json
from functools import partial
from pathlib import Path

import torch

from m2forge.model.checkpoint import copy_model, load_model, save_model
from m2forge.model.config import LoRAConfig
from m2forge.model.config_file import MERGED_FOLDER
from m2forge.model.delta import is_delta_folder
from m2forge.model.start import Start
from m2forge.train.config import MachineConfig, MeshConfig
from m2forge.train.machine import load_network
from m2forge.train.parallel import ProcessRanks, exchange, local, public_share
from m2forge.weights.store import Share, WeightStore
from tests.train.draw import small_model
from tests.train.processes import run_ranks
from tests.train.rank_case import unsharded_model

MESHES = (MeshConfig(replicate=2), MeshConfig(shard=2), MeshConfig(shard=2, expert=2))
MOE = {"num_experts": 6, "top_k": 2, "intermediate_size": 6}


def publish(ranks: ProcessRanks, folder: Path) -> list[str]:
    """Publish a whole version and two of changes under each mesh; returns what is wrong, on rank 0."""
    problems = []
    for index, mesh in enumerate(MESHES):
        start = Start(small_model(torch.bfloat16, moe=MOE, vocab_size=33).config)
        machine = MachineConfig(device="cpu", mesh=mesh)
        model = load_network(start, machine, torch.bfloat16, ranks, "seed")
        store = WeightStore(folder / str(index), "run", keep=9, anchor_every=3)
        for step in range(3):
            with torch.no_grad():
                for weight in model.parameters():
                    local(weight).view(-1)[step::50] += 1.0
            share = Share(ranks.rank, public_share(model, ranks), exchange)
            path = store.publish(model, step, share)
            sizes = exchange(sum(tensor.nbytes for tensor in share.tensors.values()))
            whole = unsharded_model(model, ranks)
            if ranks.rank or whole is None:
                continue
            found, expected = load_model(path).state_dict(), whole.state_dict()
            problems += [f"{mesh} {step}: {name}" for name in expected if not torch.equal(found[name], expected[name])]
            problems += [f"{mesh} {step}: shares of {sizes} bytes"] * (max(sizes) > 0.6 * sum(sizes))
            problems += [f"{mesh} {step}: whole or changes"] * (is_delta_folder(path) != (step > 0))
            files = json.loads((path / "manifest.json").read_text())["files"]
            problems += [f"{mesh} {step}: {files.keys()}"] * (len(files) != 2)
    return problems


def test_ranks_publish_what_they_hold_as_one_version(tmp_path: Path) -> None:
    problems, _ = run_ranks(partial(publish, folder=tmp_path / "weights"), tmp_path / "ranks")
    assert problems == []


def publish_adapter(ranks: ProcessRanks, folder: Path, base: Path) -> bool:
    start = Start(small_model(torch.float32).config, base, lora=LoRAConfig(rank=3, targets=("v_proj",)))
    model = load_network(start, MachineConfig(device="cpu", mesh=MESHES[1]), torch.float32, ranks, "seed")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".b"):
                local(weight).fill_(0.5)
    store = WeightStore(folder, "run", has_merged=True)
    path = store.publish(model, 1, Share(ranks.rank, public_share(model, ranks), exchange))
    served, merged = (load_model(each).state_dict() for each in (path, path / MERGED_FOLDER))
    before = load_model(base).state_dict()
    is_changed = any(not torch.equal(served[name], before[name]) for name in served)
    is_same = served.keys() == merged.keys() and all(torch.equal(served[name], merged[name]) for name in served)
    return (
        is_same
        and is_changed
        and load_model(path).config == model.config
        and (path / "adapter_model.safetensors").is_file()
    )


def test_ranks_publish_one_adapter(tmp_path: Path) -> None:
    save_model(small_model(torch.float32), tmp_path / "base")
    scenario = partial(publish_adapter, folder=tmp_path / "weights", base=tmp_path / "base")
    assert run_ranks(scenario, tmp_path / "ranks") == [True, True]
    (version,) = (tmp_path / "weights").iterdir()
    copy_model(version, tmp_path / "copy")
    assert {path.name for path in version.iterdir()} - {path.name for path in (tmp_path / "copy").iterdir()} == {
        MERGED_FOLDER
    }
