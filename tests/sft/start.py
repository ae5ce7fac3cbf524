"""A network small enough to fine-tune inside a test."""

from pathlib import Path

from m2forge.model.build import build
from m2forge.model.checkpoint import save_model
from m2forge.model.config import AttentionConfig, ModelConfig, MoEConfig
from m2forge.text.tokenizer import Tokenizer
from tests.sft.sample import chat_format


def write_start(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """A model folder with a tokenizer, by default that of `chat_format`."""
    tokenizer = tokenizer or chat_format().tokenizer
    network = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_layers=1,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, rotary_dim=4, rope_theta=1e4),
        moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=8),
        max_context=512,
    )
    save_model(build(network), folder)
    tokenizer.save(folder)
    return folder
