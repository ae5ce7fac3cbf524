"""Configurations and weights that ask for far more than their files hold are refused before anything is allocated."""

import json
import struct
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue

from m2forge.errors import CheckpointError
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.config import AttentionConfig, ModelConfig, MoEConfig
from m2forge.model.config_file import CONFIG_FILE, WEIGHTS_FILE, read_config
from m2forge.model.convert import import_model
from tests.bounds import within
from tests.model.test_gguf import Numbers, small_tensors, write_small

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4, rotary_dim=4)
LLAMA = ModelConfig(
    family="llama", vocab_size=16, hidden_size=8, num_layers=2, attention=ATTENTION, intermediate_size=16
)
QWEN = ModelConfig(
    family="qwen3_moe",
    vocab_size=16,
    hidden_size=8,
    num_layers=2,
    attention=ATTENTION.model_copy(update={"qk_norm": "head"}),
    moe=MoEConfig(
        num_experts=4, top_k=2, intermediate_size=8, scoring="softmax", selection_bias=False, bias_update="none"
    ),
    intermediate_size=8,
)


def folder_of(path: Path, config: ModelConfig, changes: dict[str, JsonValue]) -> Path:
    save_model(build(config), path, public_only=True)
    public = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps(public | changes))
    return path


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            LLAMA,
            {"num_hidden_layers": 1 << 24},
            "num_hidden_layers is 16777216, expected an integer of at most 4096",
        ),
        (LLAMA, {"num_hidden_layers": 10**15}, "num_hidden_layers is 10{15}, expected"),
        (
            LLAMA,
            {"num_hidden_layers": 4096},
            r"\(llama, 4096 layers\) asks for more than 1042 tensors, and there are 21",
        ),
        (LLAMA, {"num_hidden_layers": "9" * 50_000}, "num_hidden_layers is 9{40}, expected"),
        (LLAMA, {"vocab_size": 1 << 40}, "vocab_size"),
        (LLAMA, {"hidden_size": 1 << 24}, "21 tensors do not fit"),
        (LLAMA, {"head_dim": 1 << 50}, "head_dim is 1125899906842624, expected"),
        (QWEN, {"num_experts": 1 << 24}, "num_experts"),
        (QWEN, {"num_experts": 1 << 14}, "asks for more than"),
        (QWEN, {"num_hidden_layers": 10**12, "decoder_sparse_step": 2}, "num_hidden_layers is 10{12}, expected"),
        (QWEN, {"num_hidden_layers": 4096, "decoder_sparse_step": 2}, "asks for more than"),
        (
            QWEN,
            {"use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 10**12},
            "expected an integer",
        ),
        (
            QWEN,
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 10**12},
            "max_window_layers is 10{12}, expected",
        ),
        (LLAMA, {"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5, expected"),
    ],
)
def test_a_config_that_asks_for_more_than_the_weights_is_refused(
    tmp_path: Path, config: ModelConfig, changes: dict[str, JsonValue], message: str
) -> None:
    load_model(folder_of(tmp_path / "sound", config, {}))
    folder = folder_of(tmp_path / "m", config, changes)
    with within(), pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_our_own_config_is_bounded_too(tmp_path: Path) -> None:
    save_model(build(QWEN), tmp_path / "m")
    path = tmp_path / "m" / CONFIG_FILE
    public = json.loads(path.read_text())
    own = json.loads(public["m2forge"])
    for change, message in (
        ({"num_layers": 1 << 24}, "num_layers"),
        ({"moe": own["moe"] | {"dense_layers": [0] * 100_000}}, "each once"),
    ):
        path.write_text(json.dumps(public | {"m2forge": json.dumps(own | change)}))
        with within(), pytest.raises(CheckpointError, match=message):
            read_config(tmp_path / "m")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"block_count": 1 << 24}, "num_layers"),
        ({"block_count": 4000}, "asks for more than"),
        ({"embedding_length": 1 << 30}, "invalid metadata: head_dim: Input should be less than"),
        ({"attention.key_length": 1 << 24, "rope.dimension_count": 1 << 24}, "tensors do not fit"),
        ({"vocab_size": 1 << 24}, "tensors do not fit"),
    ],
)
def test_gguf_metadata_that_asks_for_more_tensors_is_refused(tmp_path: Path, numbers: Numbers, message: str) -> None:
    write_small(tmp_path / "a.gguf", small_tensors(), numbers=numbers)
    with within(), pytest.raises(CheckpointError, match=message):
        import_model(tmp_path / "a.gguf", tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 90_000_000) + b"{}",
        *(
            struct.pack("<Q", len(header)) + header.encode()
            for header in (
                '{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}',
                '{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}',
                '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            )
        ),
    ],
)
def test_a_safetensors_header_beyond_its_file_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = folder_of(tmp_path / "m", LLAMA, {})
    (folder / WEIGHTS_FILE).write_bytes(content + bytes(4))
    with within(), pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        load_model(folder, dtype=torch.float32)
