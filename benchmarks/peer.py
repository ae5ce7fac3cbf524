"""transformers' network with our weights, for side-by-side runs."""

import torch
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

from m2forge.model.architecture import to_public
from m2forge.model.config import ModelConfig
from m2forge.model.transformer import Block, MixtureFFN, Transformer


def peer(config: ModelConfig, ours: Transformer, experts: str) -> MiniMaxM2ForCausalLM:
    """transformers' model with our weights."""
    public = {key: value for key, value in to_public(config).items() if key not in ("model_type", "architectures")}
    dtype, device = ours.embedding.weight.dtype, ours.embedding.weight.device
    hf_config = MiniMaxM2Config(**public, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    with device:
        model: MiniMaxM2ForCausalLM = MiniMaxM2ForCausalLM._from_config(  # type: ignore[no-untyped-call]
            hf_config, experts_implementation=experts, dtype=dtype
        )
    q, kv = config.attention.q_width, config.attention.kv_width
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(ours.embedding.weight)
        model.lm_head.weight.copy_(ours.head_weight)
        for theirs, block in zip(model.model.layers, ours.blocks, strict=True):
            assert isinstance(block, Block)
            assert isinstance(block.ffn, MixtureFFN)
            attention = theirs.self_attn
            for projection, rows in zip(
                (attention.q_proj, attention.k_proj, attention.v_proj),
                block.attention.qkv.weight.split((q, kv, kv)),
                strict=True,
            ):
                projection.weight.copy_(rows)
            attention.o_proj.weight.copy_(block.attention.out.weight)
            theirs.mlp.gate.weight.copy_(block.ffn.router.weight)
            theirs.mlp.experts.gate_up_proj.copy_(block.ffn.w13)
            theirs.mlp.experts.down_proj.copy_(block.ffn.w2)
    model.train()
    return model
