"""A corpus of bytes and a network small enough to train inside a test."""

import sysconfig
from pathlib import Path

import numpy as np

from m2forge.config import TomlValue, build
from m2forge.corpus.token_set import CorpusWriter
from m2forge.pretrain.config import PretrainConfig

END = 256
NETWORK = (
    "num_layers=2",
    "hidden_size=32",
    "attention.num_heads=2",
    "attention.num_kv_heads=1",
    "attention.head_dim=16",
    "attention.rotary_dim=8",
    "moe.num_experts=4",
    "moe.intermediate_size=16",
    "max_context=64",
)


def write_corpus(folder: Path) -> Path:
    """Files of the standard library in two domains, a byte a token."""
    root = Path(sysconfig.get_paths()["stdlib"])
    with CorpusWriter(folder, vocab_size=END + 1) as writer:
        for index, name in enumerate(("abc.py", "bisect.py", "copy.py", "glob.py", "heapq.py", "io.py")):
            tokens = np.array([*(root / name).read_bytes(), END])
            writer.add("code" if index % 2 else "web", tokens, split="train")
        writer.finish({"code": 0.5, "web": 0.5}, end_of_text_id=END)
    return folder


def write_numbered(folder: Path, num_documents: int) -> dict[int, list[int]]:
    """A corpus in two domains whose tokens all differ, so that each tells where it came from; the tokens by domain."""
    rng, token = np.random.default_rng(0), 0
    tokens: dict[int, list[int]] = {0: [], 1: []}
    with CorpusWriter(folder, vocab_size=4096) as writer:
        for index in range(num_documents):
            document = np.arange(token, token + int(rng.integers(5, 60)))
            token += document.size
            writer.add(("code", "web")[index % 2], document, split="train")
            tokens[index % 2] += document.tolist()
        writer.finish()
    return tokens


def make_config(corpus: Path, **changes: TomlValue) -> PretrainConfig:
    """Every kind of phase in a few steps: constant, decay with a longer context, more modules frozen, then joint."""
    phase: dict[str, TomlValue] = {
        "pack_tokens": 64,
        "context": 32,
        "lr": {"start": 3e-3},
        "mtp_weight": {"start": 0.3},
        "steps": 6,
    }
    data: dict[str, TomlValue] = {
        "name": "small",
        "corpus": str(corpus),
        "model": "m2-nano",
        "model_set": list(NETWORK),
        "train": {"checkpoint": {"every_steps": 4, "keep": 2}, "machine": {"device": "cpu", "num_threads": 1}},
        "phases": [
            phase | {"name": "constant", "warmup_steps": 3, "packs_per_step": 2},
            phase | {"name": "decay", "context": 64, "lr": {"start": 3e-3, "end": 1e-3}},
            phase | {"name": "modules", "num_mtp": 3, "trains": "mtp", "steps": 5},
            phase | {"name": "joint", "mtp_weight": {"start": 0.3, "end": 0.1}, "steps": 5},
        ],
    }
    return build(PretrainConfig, data | changes)
