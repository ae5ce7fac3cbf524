"""Block-scaled 8-bit weights, against a loop over single blocks and against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from m2forge.errors import CheckpointError
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.config import AttentionConfig, ModelConfig, MoEConfig
from m2forge.model.convert import import_model
from m2forge.model.folder import dequantize

LARGEST = 448.0
"""The largest value of float8_e4m3fn."""

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=256,
    num_layers=2,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=32, qk_norm="flat"),
    moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=128),
)
RAGGED = CONFIG.model_copy(update={"hidden_size": 200, "moe": MoEConfig(num_experts=4, top_k=2, intermediate_size=136)})


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(8-bit weight, scales, what they stand for in float32), one block at a time."""
    rows, columns = weight.shape
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty((rows + 127) // 128, (columns + 127) // 128)
    meant = torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, min(128 * i + 128, rows)), slice(128 * j, min(128 * j + 128, columns)))
            scales[i, j] = weight[block].abs().max() / LARGEST
            stored[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[block] = stored[block].float() * scales[i, j]
    return stored, scales, meant


def quantize_folder(folder: Path) -> dict[str, Tensor]:
    """Store the projections of a saved model in 8 bits, as the released M2 does; returns what each tensor means."""
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for name in list(tensors):
        if "_proj." in name or ".experts." in name:
            tensors[name], tensors[f"{name}_scale_inv"], meant[name] = quantize(tensors[name].float())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def make_folder(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    save_model(build(config), folder, dtype=torch.bfloat16, public_only=True)
    return quantize_folder(folder)


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (129, 127), (300, 500)])
def test_each_block_has_its_own_scale(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    # Rows of very different size, so that a scale of the wrong block shows.
    weight = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[0])[:, None]
    stored, scales, meant = quantize(weight)
    assert torch.equal(dequantize(stored, scales, torch.float32), meant)
    assert torch.equal(dequantize(stored, scales), meant.to(torch.bfloat16))
    # Three bits of mantissa: half a step is 1/16 of the value, above the format's smallest steps.
    torch.testing.assert_close(meant, weight, rtol=1 / 16, atol=float(scales.max()) * 2**-9)


def test_scales_of_another_grid_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[129, 4\] with scales of shape \[1, 1\]"):
        dequantize(torch.zeros(129, 4, dtype=torch.float8_e4m3fn), torch.ones(1, 1))


@pytest.mark.parametrize("config", [CONFIG, RAGGED], ids=["whole blocks", "ragged blocks"])
def test_an_8_bit_checkpoint_loads_as_what_it_means(tmp_path: Path, config: ModelConfig) -> None:
    meant = make_folder(tmp_path / "m", config)
    loaded = load_model(tmp_path / "m")
    assert loaded.embedding.weight.dtype == torch.bfloat16
    save_model(loaded, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == meant.keys()
    for name, tensor in again.items():
        assert torch.equal(tensor, meant[name].to(tensor.dtype)), name


def test_logits_equal_transformers_dequantising_the_same_files(tmp_path: Path) -> None:
    make_folder(tmp_path / "m", CONFIG)
    peer: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m",
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        experts_implementation="eager",
    )
    peer.float()  # it leaves what was not 8-bit as stored
    model = load_model(tmp_path / "m", dtype=torch.float32)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.logits(model(tokens).hidden_ND).view(2, 16, -1)
        expected = peer(tokens, use_cache=False).logits
    # float32 rounding over two layers of width 256.
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_import_writes_bfloat16_without_scales(tmp_path: Path) -> None:
    meant = make_folder(tmp_path / "m", RAGGED)
    done = import_model(tmp_path / "m", tmp_path / "ours")
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    assert done.dtype == "bfloat16"
    assert tensors.keys() == meant.keys()
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    assert all(torch.equal(tensor, meant[name].to(tensor.dtype)) for name, tensor in tensors.items())


def test_wrong_scales_are_named_together(tmp_path: Path) -> None:
    make_folder(tmp_path / "m", CONFIG)
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    layer = "model.layers.0.self_attn."
    del tensors[f"{layer}q_proj.weight_scale_inv"]
    tensors[f"{layer}k_proj.weight_scale_inv"] = torch.ones(2, 2)
    tensors["model.norm.weight_scale_inv"] = torch.ones(2)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "m")
    message = str(caught.value)
    assert "3 tensors do not fit" in message
    assert f"{layer}q_proj.weight_scale_inv, shape [2, 2], is missing" in message
    assert f"{layer}k_proj.weight_scale_inv has shape [2, 2], expected [1, 2]" in message
    assert "extra: model.norm.weight_scale_inv, shape [2]" in message
