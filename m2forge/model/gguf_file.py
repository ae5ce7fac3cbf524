"""Reads a GGUF file (llama.cpp's format) of the llama architecture.

A `Source`: the config comes from the file's metadata, tensors have Hugging Face names, and the `gguf` library
dequantises quantised ones one at a time (in float32). Tensors that do not fit within the file, or have more bytes in
total than it, are rejected before any is read. llama.cpp rotates adjacent dimensions where we rotate halves, so its
files hold the rows of q and k permuted; reading restores our order:

    ours[head, half · K/2 + i] = stored[head, 2i + half],      half in {0, 1}, K the head dimension
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from m2forge.errors import CheckpointError, DataError, NotFoundError
from m2forge.gguf_header import GGUFHeader, StoredTensor, read_header
from m2forge.model.config import AttentionConfig, ModelConfig, RopeScaling
from m2forge.model.config_file import list_problems
from m2forge.model.rotary import frequencies
from m2forge.model.tensor_source import TensorHeader, TokenIds

ARCHITECTURE = "llama"
GGUF_SUFFIX = ".gguf"
_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    kind: Any
    """A GGMLQuantizationType."""
    data: np.ndarray
    """The tensor's bytes in the memory-mapped file, by rows."""


class GGUFSource:
    """See `Source`. The file stays memory-mapped while this object lives."""

    def __init__(self, path: Path) -> None:
        self.origin = str(path)
        self._gguf = _library()
        try:
            header = read_header(path)
            self._tensors = self._locate(header)
        except CheckpointError:
            raise
        except DataError as error:
            raise CheckpointError(str(error)) from error
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is not a complete GGUF file: {error}; fetch it again") from error
        self._fields = header.fields
        self.config = self._read_config()
        ids = {key: self._fields.get(stored) for key, stored in _TOKEN_IDS.items()}
        self.token_ids: TokenIds = {key: id if isinstance(id, int) else None for key, id in ids.items()}
        self._tensors.pop(_ROPE_FACTORS, None)
        self.headers = {name: self._header(tensor) for name, tensor in self._tensors.items()}
        self.problems = tuple(
            f"{name} is stored as {tensor.kind.name}, which the gguf library cannot dequantise; convert "
            "the file to Q8_0 or F16 with llama-quantize"
            for name, tensor in self._tensors.items()
            if not self._can_dequantize(tensor.kind)
        )

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        values = self._dequantize(self._tensors[name])
        attention = self.config.attention
        if name.endswith("q_proj.weight"):
            values = _unpermuted(values, attention.num_heads)
        elif name.endswith("k_proj.weight"):
            values = _unpermuted(values, attention.num_kv_heads)
        # The memory map is read-only and a tensor must not be, so values that still point into it are copied.
        return torch.from_numpy(values if values.flags.writeable else values.copy()).to(dtype)

    def _locate(self, header: GGUFHeader) -> dict[str, _Tensor]:
        """Every tensor's bytes; raises ValueError if the file cannot hold them."""
        tensors = {
            _public_name(name): self._slice(name, stored, header.data) for name, stored in header.tensors.items()
        }
        num_bytes = sum(tensor.data.nbytes for tensor in tensors.values())
        if num_bytes > header.data.size:
            raise ValueError(f"its tensors have {num_bytes} bytes, the file has {header.data.size}")
        return tensors

    def _slice(self, name: str, stored: StoredTensor, data: np.ndarray) -> _Tensor:
        try:
            kind = self._gguf.GGMLQuantizationType(stored.kind)
        except ValueError:
            raise CheckpointError(
                f"{self.origin}: {name} is stored as type {stored.kind}, a quantisation that the installed gguf "
                "library does not know; install a newer one, or convert the file to Q8_0 or F16 with llama-quantize"
            ) from None
        block_size, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        *rows, width = stored.shape or (1,)
        if width % block_size:
            raise ValueError(f"{name} has rows of {width} values, expected a multiple of {block_size} for {kind.name}")
        byte_shape = (*rows, width // block_size * block_bytes)
        end = stored.start + math.prod(byte_shape)
        if end > data.size:
            raise ValueError(f"{name}, shape {list(stored.shape)}, ends at byte {end}, the file at {data.size}")
        return _Tensor(stored.shape or (1,), kind, data[stored.start : end].reshape(byte_shape))

    def _dequantize(self, tensor: _Tensor) -> np.ndarray:
        return np.asarray(self._gguf.dequantize(tensor.data, tensor.kind), dtype=np.float32)

    def _header(self, tensor: _Tensor) -> TensorHeader:
        unquantised = {"F16": torch.float16, "BF16": torch.bfloat16}
        return TensorHeader(tensor.shape, unquantised.get(tensor.kind.name, torch.float32))

    def _can_dequantize(self, kind: Any) -> bool:
        _, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        try:
            self._gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    # -- configuration ------------------------------------------------------------------------------------------------

    def _read_config(self) -> ModelConfig:
        self._refuse_other_networks()
        heads = self._number("attention.head_count")
        width, scaling = self._number("embedding_length"), self._scaling()
        head_dim = self._number("attention.key_length", width // max(heads, 1))
        try:
            config = ModelConfig(
                family="llama",
                vocab_size=self._vocab_size(),
                hidden_size=width,
                num_layers=self._number("block_count"),
                attention=AttentionConfig(
                    num_heads=heads,
                    num_kv_heads=self._number("attention.head_count_kv", heads),
                    head_dim=head_dim,
                    rotary_dim=self._number("rope.dimension_count", head_dim),
                    rope_theta=self._float("rope.freq_base", 10_000.0),
                    rope_scaling=scaling,
                ),
                intermediate_size=self._number("feed_forward_length"),
                norm_eps=self._float("attention.layer_norm_rms_epsilon", 1e-5),
                tied_head="lm_head.weight" not in self._tensors,
                max_context=self._number("context_length", 4096),
            )
        except ValidationError as error:
            raise CheckpointError(f"{self.origin}: invalid metadata: {list_problems(error)}") from error
        if config.attention.rotary_dim != head_dim:
            raise CheckpointError(
                f"{self.origin}: rope.dimension_count {config.attention.rotary_dim} differs from the head dimension "
                f"{head_dim}; the llama family rotates whole heads"
            )
        return config if scaling is not None else self._with_rope_factors(config)

    def _metadata(self, key: str, default: Any = None) -> Any:
        return self._fields.get(key, default)

    def _refuse_other_networks(self) -> None:
        architecture = self._metadata("general.architecture")
        if architecture != ARCHITECTURE:
            raise CheckpointError(
                f"{self.origin}: architecture {architecture!r} is not supported; from GGUF only {ARCHITECTURE!r} is, "
                "other models are imported from their Hugging Face folder"
            )
        num_parts = self._metadata("split.count", 1)
        if num_parts not in (0, 1):
            raise CheckpointError(f"{self.origin} is one of {num_parts} parts; merge them with llama-gguf-split first")
        for key in ("expert_count", "attention.sliding_window"):
            if self._number(key, 0):
                raise CheckpointError(f"{self.origin}: {key} = {self._number(key)} is not supported for llama")

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._metadata(f"{ARCHITECTURE}.{key}", default)
        if not isinstance(value, int):
            problem = "is missing" if value is None else f"is {str(value)[:60]}, expected one integer for all layers"
            raise CheckpointError(f"{self.origin}: {ARCHITECTURE}.{key} {problem}")
        return value

    def _float(self, key: str, default: float) -> float:
        """The shortest decimal that is this float32: the file's 9.99999974e-06 was 1e-05 before it was stored."""
        value = self._metadata(f"{ARCHITECTURE}.{key}", default)
        if not isinstance(value, int | float):
            raise CheckpointError(f"{self.origin}: {ARCHITECTURE}.{key} is {str(value)[:60]!r}, expected a number")
        return float(str(np.float32(value)))

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("model.embed_tokens.weight")
        return self._number("vocab_size", None if embedding is None else embedding.shape[0])

    def _scaling(self) -> RopeScaling | None:
        kind = self._metadata(f"{ARCHITECTURE}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind != "linear":
            raise CheckpointError(f"{self.origin}: rope.scaling.type {kind!r} is not supported; known: none, linear")
        factor = self._float("rope.scaling.factor", 1.0)
        if not factor > 0:
            raise CheckpointError(f"{self.origin}: rope.scaling.factor is {factor}, expected a number above 0")
        return RopeScaling(kind="linear", factor=factor)

    def _with_rope_factors(self, config: ModelConfig) -> ModelConfig:
        """llama.cpp stores llama3 scaling as one factor per frequency; this finds the parameters that give them."""
        tensor = self._tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return config
        factors = torch.tensor(self._dequantize(tensor))
        scaling = RopeScaling(kind="llama3", factor=float(factors.max()))
        attention = config.attention.model_copy(update={"rope_scaling": scaling})
        expected = frequencies(config.attention) / frequencies(attention)
        if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4):
            raise CheckpointError(f"{self.origin}: {_ROPE_FACTORS} is not the llama3 scaling known here")
        return config.model_copy(update={"attention": attention})


def _library() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise NotFoundError(
            "reading GGUF files needs the gguf library, which is not installed; run: pip install 'm2forge[gguf]'"
        ) from error
    return gguf


def _public_name(name: str) -> str:
    """The Hugging Face name; an unknown name stays unchanged and is reported later."""
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}"
    return _NAMES.get(name, name)


def _unpermuted(stored: np.ndarray, num_heads: int) -> np.ndarray:
    pairs = stored.reshape(num_heads, -1, 2, stored.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)
