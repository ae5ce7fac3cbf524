"""Folders that hold changed elements: the same bits as whole ones, in few bytes; errors name what is broken."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from m2forge.errors import CheckpointError
from m2forge.model.build import build
from m2forge.model.checkpoint import (
    complete_version,
    fill,
    load_model,
    open_source,
    public_tensors,
    save_model,
    write_share,
)
from m2forge.model.delta import DELTA_CONFIG_FILE, DELTA_FILE, find_changes, find_indices
from m2forge.model.folder import FolderSource
from m2forge.model.manifest import MANIFEST_FILE, describe, write_manifest
from m2forge.model.preset import preset
from m2forge.model.tensor_source import refuse_misfits
from m2forge.model.transformer import Transformer

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float16)


def make_model(dtype: torch.dtype = torch.bfloat16) -> Transformer:
    torch.manual_seed(0)
    return build(preset("m2-nano").with_layers(1), torch.device("cpu"), dtype)


def perturb(model: Transformer, share: float, generator: torch.Generator) -> None:
    """Change about this share of each weight's elements."""
    with torch.no_grad():
        for weight in model.parameters():
            is_changed = torch.rand(weight.shape, generator=generator) < share
            weight[is_changed] += 1.0


def publish(model: Transformer, folder: Path, num_deltas: int, share: float = 0.02) -> list[Path]:
    """A whole version and deltas, each of the one before; the last is that of `model`."""
    generator = torch.Generator().manual_seed(1)
    folders = [folder / f"step-{step}" for step in range(num_deltas + 1)]
    save_model(model, folders[0])
    published = {name: tensor.detach().clone() for name, tensor in public_tensors(model).items()}
    for before, after in itertools.pairwise(folders):
        perturb(model, share, generator)
        after.mkdir()
        paths = list(write_share(model, public_tensors(model), after, None, published))
        complete_version(model, after, {path.name: describe(path) for path in paths}, before.name)
    return folders


def same_bits(one: Transformer, other: Transformer) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in mine
    )


@settings(max_examples=60)
@given(st.data())
def test_changes_give_back_every_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    size = data.draw(st.integers(1, 2000))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    old = torch.randint(-(2**15), 2**15, (size,), generator=generator).to(bits)  # any bits: NaN, -0.0, infinities
    new = torch.where(
        torch.rand(size, generator=generator) < data.draw(st.sampled_from((0.0, 0.002, 0.1, 1.0))), ~old, old
    )
    gaps, values = find_changes(old.view(dtype), new.view(dtype))
    indices = find_indices(gaps)
    assert torch.equal(indices, (old != new).nonzero().view(-1))
    rebuilt = old.clone()
    rebuilt[indices] = values.view(bits)
    assert torch.equal(rebuilt, new)


@pytest.mark.parametrize("share", [0.01, 0.03, 0.05])
def test_a_changed_element_of_bfloat16_takes_little(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1_000_000, generator=generator).to(torch.bfloat16)
    is_changed = torch.rand(len(old), generator=generator) < share
    gaps, values = find_changes(old, torch.where(is_changed, -old, old))
    assert (gaps.nbytes + values.nbytes) / len(values) <= 3.2


def test_a_chain_of_deltas_reads_as_the_whole_folder(tmp_path: Path) -> None:
    model = make_model()
    folders = publish(model, tmp_path, 3)
    assert same_bits(load_model(folders[-1]), model)
    sizes = [(folder / DELTA_FILE).stat().st_size for folder in folders[1:]]
    assert max(sizes) < (folders[0] / "model.safetensors").stat().st_size / 5


@pytest.mark.parametrize("served", [torch.bfloat16, torch.float32])
def test_a_network_takes_only_the_changes_since_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: torch.dtype
) -> None:
    folders = publish(make_model(), tmp_path, 3)
    expected, model = load_model(folders[3], dtype=served), load_model(folders[1], dtype=served)
    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "read", None)
        fill(model, open_source(folders[3]), folders[1])
    assert same_bits(model, expected)
    again = load_model(folders[2], dtype=served)
    fill(again, open_source(folders[1]), folders[2])  # backwards: no delta leads there
    assert same_bits(again, load_model(folders[1], dtype=served))


def test_tensors_that_changed_throughout_are_stored_whole(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    folders = publish(model, tmp_path, 1, share=1.1)
    assert all("/" not in name for name in load_file(folders[1] / DELTA_FILE))
    assert same_bits(load_model(folders[1]), model)


def test_a_delta_that_is_broken_is_refused_with_its_name(tmp_path: Path) -> None:
    folders = publish(make_model(), tmp_path, 1)
    path = folders[1] / DELTA_FILE
    stored = load_file(path)
    name = next(key for key in stored if key.endswith("/gaps"))
    stored[name] = torch.cat([stored[name], torch.full((100_000,), 254, dtype=torch.uint8)])
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=r"delta\.safetensors is torn or was changed"):
        open_source(folders[1])
    write_manifest(folders[1], {DELTA_FILE: describe(path)})
    with pytest.raises(CheckpointError, match="gaps and other values"):
        refuse_misfits(open_source(folders[1]))
    (folders[1] / DELTA_CONFIG_FILE).write_text(json.dumps({"base": "../elsewhere"}))
    with pytest.raises(CheckpointError, match=r"'\.\./elsewhere' is not beside it"):
        open_source(folders[1])


def test_a_delta_from_before_there_were_manifests_is_read(tmp_path: Path) -> None:
    model = make_model()
    folder = publish(model, tmp_path, 1)[1]
    digest = hashlib.blake2b((folder / DELTA_FILE).read_bytes(), digest_size=16).hexdigest()
    (folder / MANIFEST_FILE).unlink()
    config = json.loads((folder / DELTA_CONFIG_FILE).read_text())
    (folder / DELTA_CONFIG_FILE).write_text(json.dumps(config | {"digest": digest}))
    assert same_bits(load_model(folder), model)
    (folder / DELTA_CONFIG_FILE).write_text(json.dumps(config | {"digest": "0"}))
    with pytest.raises(CheckpointError, match="torn"):
        open_source(folder)
