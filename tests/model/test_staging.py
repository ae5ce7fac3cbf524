"""Staged weights are the folder's, to the last bit, and their memory serves the next version."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from m2forge.errors import CheckpointError
from m2forge.model import staging
from m2forge.model.checkpoint import load_model, open_source
from m2forge.model.staging import Staged, StagingMemory
from m2forge.model.transformer import Transformer
from m2forge.weights.store import WeightStore
from tests.model.test_checkpoint import assert_same_weights, small_model


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightStore:
    monkeypatch.setattr("m2forge.model.checkpoint.VERSION_SHARD_BYTES", 20_000)  # several files
    return WeightStore(tmp_path, "run", keep=9)


def filled(model: Transformer, folder: Path) -> None:
    Staged(model, open_source(folder), None).fill(model, None)


@pytest.mark.parametrize("at_once", [0, 30_000, 1 << 20], ids=["mapped", "one file", "several files"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_staged_is_what_the_folder_holds(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, at_once: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(staging, "MOST_BUFFER_BYTES", at_once)
    folder = store.publish(small_model(dtype=dtype, seed=1), 1)
    assert len(list(folder.glob("*.safetensors"))) > 1
    for served in (torch.float32, torch.bfloat16):
        model = load_model(folder, dtype=served)
        expected = load_model(folder, dtype=served)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        filled(model, folder)
        assert_same_weights(model, expected)


def test_memory_serves_the_next_version_once_it_is_free() -> None:
    model = small_model()
    first, second = StagingMemory(model), StagingMemory(model)
    names = {name: tensor.data_ptr() for name, tensor in first.tensors.items()}
    assert all(second.tensors[name].data_ptr() != address for name, address in names.items())
    first.put({name: torch.ones(1) for name in list(first.parts)[:1]})
    del first
    third = StagingMemory(model)
    assert {name: tensor.data_ptr() for name, tensor in third.tensors.items()} == names
    assert not third.filled
    assert StagingMemory(small_model()).tensors["embedding.weight"].data_ptr() not in names.values()


def test_memory_is_released_with_the_network(store: WeightStore) -> None:
    model = small_model()
    filled(model, store.publish(model, 1))
    memory = StagingMemory(model)
    kept = weakref.ref(memory.tensors["embedding.weight"])
    del memory
    gc.collect()
    assert kept() is not None
    del model
    gc.collect()
    assert kept() is None


def test_a_version_after_a_refused_one_is_whole(store: WeightStore) -> None:
    model = small_model()
    folders = [store.publish(small_model(seed=seed), seed) for seed in (1, 2)]
    torn = min(folders[0].glob("*.safetensors"))
    content = bytearray(torn.read_bytes())
    content[-1] ^= 1
    torn.write_bytes(content)
    with pytest.raises(CheckpointError, match="torn or was changed"):
        filled(model, folders[0])
    filled(model, folders[1])
    assert_same_weights(model, load_model(folders[1]))
