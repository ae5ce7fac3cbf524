"""GGUF: a real language model against transformers, and small files that are wrong in one way each."""

import functools
import json
import math
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from m2forge import cli
from m2forge.errors import CheckpointError, NotFoundError
from m2forge.model.checkpoint import load_model
from m2forge.model.config import RopeScaling
from m2forge.model.convert import import_model
from m2forge.model.gguf_file import GGUFSource
from m2forge.model.tensor_source import refuse_misfits
from m2forge.text.tokenizer import load_tokenizer
from tests.model.generate import generate
from tests.text.draw import smollm2_path


@dataclass(frozen=True)
class SmolLM2:
    path: Path
    tokenizer: Any
    """The tokenizer that transformers reads from the file."""


def read_as_array(reader: Callable[[str], gguf.GGUFReader], path: str) -> gguf.GGUFReader:
    """The reader slices its file once for each of 100,000 strings; slices of a `memmap` run Python code each time."""
    memmap = np.memmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, mode: np.asarray(memmap(path, mode=mode)))
        return reader(path)


@pytest.fixture(scope="module")
def smollm2() -> Generator[SmolLM2, None, None]:
    path = smollm2_path()
    # The library takes seconds to index the file, which is only read: once for transformers instead of four times. And
    # it makes its table of public names once instead of for each of transformers' modules.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(functools.partial(read_as_array, gguf.GGUFReader)))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield SmolLM2(path, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))


def test_smollm2_continues_as_in_transformers(tmp_path: Path, smollm2: SmolLM2) -> None:
    path, tokenizer = smollm2.path, smollm2.tokenizer
    import_model(path, tmp_path / "m", dtype="float32")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    model = load_model(tmp_path / "m")
    peer: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    prompt = tokenizer("The three primary colours are", return_tensors="pt")
    num_prompt = prompt["input_ids"].shape[1]
    whole = peer.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    expected = whole[num_prompt:].tolist()
    assert len(expected) == 12
    assert generate(model, prompt["input_ids"][0], max_new_tokens=4) == expected[:4]
    # All of them in one pass: the likeliest token behind every start of what transformers wrote is the one it wrote.
    with torch.no_grad():
        ours_TV, theirs_TV = model.logits(model(whole[None]).hidden_ND), peer(whole[None]).logits[0]
    assert ours_TV[num_prompt - 1 : -1].argmax(-1).tolist() == expected
    torch.testing.assert_close(ours_TV, theirs_TV, rtol=1e-4, atol=5e-4)
    # The tokenizer came along: for us and, in the same folder, for transformers.
    text = "The three primary colours are"
    assert load_tokenizer(tmp_path / "m").encode(text) == prompt["input_ids"][0].tolist()
    assert AutoTokenizer.from_pretrained(tmp_path / "m")(text)["input_ids"] == prompt["input_ids"][0].tolist()


def test_the_tokenizer_of_smollm2_has_the_ids_of_transformers(smollm2: SmolLM2) -> None:
    ours, peer = load_tokenizer(smollm2.path), smollm2.tokenizer
    assert (ours.vocab_size, ours.end_of_text_id, ours.names.eos) == (49152, 0, "<|im_end|>")
    assert ours.chat_template == peer.chat_template
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    # transformers does not set digits apart for this model, which shows where several spaces stand before one.
    lines = [line.lstrip() for text in texts for line in text.splitlines()]
    assert len(lines) > 1000
    expected = peer(lines, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ours.encode_batch(lines) == expected
    assert ours.decode(ours.encode("\n".join(lines))) == "\n".join(lines)
    assert not set(ours.encode("<|im_end|><|im_start|>")) & set(ours.special_ids.values())
    spaced = [ours.decode([id]) for id in ours.encode("a\n\n12")]
    assert spaced == ["a", "\n\n", "1", "2"]


# -- small files ------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN, VOCABULARY = 4, 2, 8, 64, 32, 40
Tensors = dict[str, np.ndarray]
Numbers = dict[str, int | None]


def small_tensors() -> Tensors:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCABULARY, HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (WIDTH, HIDDEN),
        "blk.0.ffn_up.weight": (WIDTH, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, WIDTH),
    }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_small(path: Path, tensors: Tensors, architecture: str = "llama", numbers: Numbers | None = None) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    settings: Numbers = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for key, value in (settings | (numbers or {})).items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_q_and_k_rows_are_put_back_in_order(tmp_path: Path) -> None:
    tensors = small_tensors()
    write_small(tmp_path / "a.gguf", tensors)
    source = GGUFSource(tmp_path / "a.gguf")
    refuse_misfits(source)
    assert source.config.norm_eps == 1e-5
    assert not source.config.tied_head
    for stored, public, num_heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
        given = source.read(f"model.layers.0.self_attn.{public}.weight", torch.float32)
        for head in range(num_heads):
            for half in range(2):
                for i in range(HEAD_DIM // 2):
                    row = tensors[f"blk.0.{stored}.weight"][head * HEAD_DIM + 2 * i + half]
                    assert np.array_equal(given[head * HEAD_DIM + half * HEAD_DIM // 2 + i], row)
    value = source.read("model.layers.0.self_attn.v_proj.weight", torch.float32)
    assert np.array_equal(value, tensors["blk.0.attn_v.weight"])


def test_16_bit_tensors_stay_16_bit(tmp_path: Path) -> None:
    tensors = {name: t.astype(np.float16) if t.ndim == 2 else t for name, t in small_tensors().items()}
    write_small(tmp_path / "a.gguf", tensors)
    done = import_model(tmp_path / "a.gguf", tmp_path / "m")
    assert done.dtype == "float16"
    model = load_model(tmp_path / "m")
    assert model.embedding.weight.dtype == torch.float16
    assert np.array_equal(model.embedding.weight.detach(), tensors["token_embd.weight"])


def llama3_factors(num_frequencies: int, factor: float) -> np.ndarray:
    """One factor per frequency as llama.cpp's converter computes them, theta 10000, by the published rule."""
    factors = []
    for i in range(num_frequencies):
        wavelength = 2 * math.pi * 10_000 ** (i / num_frequencies)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_frequency_factors_become_a_scaling(tmp_path: Path) -> None:
    # Heads of 32: the longest wavelength, 2π · 10000^(15/16), is beyond 8192 and shows the whole factor.
    shapes = {"blk.0.attn_q.weight": (128, HIDDEN), "blk.0.attn_output.weight": (HIDDEN, 128)}
    shapes |= {"blk.0.attn_k.weight": (64, HIDDEN), "blk.0.attn_v.weight": (64, HIDDEN)}
    tensors = small_tensors() | {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    heads: Numbers = {"attention.key_length": 32}
    write_small(tmp_path / "a.gguf", tensors | {"rope_freqs.weight": llama3_factors(16, 8.0)}, numbers=heads)
    source = GGUFSource(tmp_path / "a.gguf")
    refuse_misfits(source)
    assert source.config.attention.rope_scaling == RopeScaling(kind="llama3", factor=8.0)
    write_small(tmp_path / "b.gguf", tensors | {"rope_freqs.weight": np.arange(1, 17, dtype=np.float32)}, numbers=heads)
    with pytest.raises(CheckpointError, match="not the llama3 scaling"):
        GGUFSource(tmp_path / "b.gguf")


def test_every_misfit_is_named_in_one_error(tmp_path: Path) -> None:
    tensors = small_tensors()
    del tensors["blk.0.attn_k.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(HEADS * HEAD_DIM, dtype=np.float32)
    tensors["output_norm.weight"] = np.zeros(7, dtype=np.float32)
    tensors["output.weight"] = np.zeros((VOCABULARY, HIDDEN), dtype=np.int8)
    write_small(tmp_path / "a.gguf", tensors)
    with pytest.raises(CheckpointError) as caught:
        import_model(tmp_path / "a.gguf", tmp_path / "m")
    message = str(caught.value)
    assert "4 tensors do not fit" in message
    assert "missing: model.layers.0.self_attn.k_proj.weight, shape [16, 32]" in message
    assert "extra: blk.0.attn_q.bias, shape [32]" in message
    assert "misshapen: model.norm.weight has shape [7], expected [32]" in message
    assert "unusable: lm_head.weight is stored as I8" in message
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: write_small(path, small_tensors(), "qwen3"), "architecture 'qwen3' is not supported"),
        (
            lambda path: write_small(path, small_tensors(), numbers={"expert_count": 8}),
            "expert_count = 8 is not supported",
        ),
        (
            lambda path: write_small(path, small_tensors(), numbers={"embedding_length": None}),
            "llama.embedding_length is missing",
        ),
        (lambda path: write_small(path, small_tensors(), numbers={"rope.dimension_count": 4}), "rotates whole heads"),
        (lambda path: write_small(path, small_tensors(), numbers={"attention.head_count_kv": 3}), "must be a multiple"),
        (lambda path: path.write_bytes(b"GGUF"), "is not a complete GGUF file"),
        (lambda path: path.write_bytes(bytes(range(256)) * 16), "is not a complete GGUF file"),
        (lambda path: cut(path), "is not a complete GGUF file"),
        (
            lambda path: retype(path, 999),
            "output_norm.weight is stored as type 999, a quantisation that the installed gguf library does not know",
        ),
    ],
)
def test_a_file_that_cannot_be_used_exits_with_2(
    tmp_path: Path, write: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a.gguf")
    assert cli.main(["import", str(tmp_path / "a.gguf"), str(tmp_path / "m")]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def retype(path: Path, kind: int) -> None:
    """Behind a tensor's name stand the number of its dimensions, each of them, and its type."""
    write_small(path, small_tensors())
    data, name = bytearray(path.read_bytes()), b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8
    data[at : at + 4] = kind.to_bytes(4, "little")
    path.write_bytes(data)


def cut(path: Path) -> None:
    write_small(path, small_tensors())
    path.write_bytes(path.read_bytes()[:-2000])


def test_without_the_library_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(NotFoundError, match=r"pip install 'm2forge\[gguf\]'"):
        import_model(tmp_path / "a.gguf", tmp_path / "m")
