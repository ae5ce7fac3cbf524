"""The network over the paged cache in bfloat16 on a CPU, in six native calls per dense layer.

Computes the same as `Transformer.forward` and `Transformer.run_module`, which are its references. It fuses each norm
with the product after it, the gate and each residual sum with the product before it, and the QK norms and rotary
embeddings with the cache writes. Sums and gates are rounded once. cuda_network.py is the CUDA counterpart.
"""

import torch
from torch import Tensor

from m2forge.kernels import linear as products
from m2forge.kernels.linear import biased_linear, native_linear
from m2forge.kernels.pointwise import Norm, rotate_into_cache
from m2forge.model.rotary import Rotation, frequencies, rotation
from m2forge.model.transformer import (
    Attention,
    Block,
    DenseFFN,
    MTPModule,
    RMSNorm,
    Transformer,
)
from m2forge.rollout.kv.paged_plan import PagedCache, PagedPlan


def serves(model: Transformer, cache: PagedCache) -> bool:
    """Whether the native bfloat16 product supports every matrix and norm of the network."""
    parts = [part for part in model.modules() if isinstance(part, (torch.nn.Linear, RMSNorm))]
    weights = [weight.detach() for part in parts for weight in part.parameters(recurse=False)]
    return products.serves(cache.k_YPTGK, *weights)


class CPUNetwork:
    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._layers = list(zip(cache.k_YPTGK, cache.v_YPTGK, strict=True))
        self._frequency_R = frequencies(model.config.attention)
        self._rotary_factor = model.config.attention.rotary_factor

    def main(self, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns hidden states, the LM head's input, and the chosen experts (N, layers, K), if there are any."""
        model, chosen = self._model, list[Tensor]()
        x_ND = model.embedding(token_N)
        rotary = rotation(plan.position_N, self._frequency_R, x_ND.dtype, self._rotary_factor)
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            x_ND, expert_NK = self._block(block, layer, layer, x_ND, rotary, plan)
            chosen += [] if expert_NK is None else [expert_NK]
        return x_ND, model.norm(x_ND), torch.stack(chosen, 1) if chosen else None

    def module(self, index: int, parent_ND: Tensor, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor]:
        """As `Transformer.run_module`."""
        model, module = self._model, self._model.mtp[index]
        assert isinstance(module, MTPModule)
        rotary = rotation(plan.position_N, self._frequency_R, parent_ND.dtype, self._rotary_factor)
        joined = torch.cat((module.state_norm(parent_ND), module.embedding_norm(model.embedding(token_N))), -1)
        x_ND = native_linear(joined, module.projection.weight, joined.dtype)
        last, depth = model.config.num_layers - 1, model.config.num_layers + index
        x_ND, _ = self._block(module.block, last, depth, x_ND, rotary, plan)
        return x_ND, module.norm(x_ND)

    def _block(
        self, block: Block, layer: int, depth: int, x_ND: Tensor, rotary: Rotation, plan: PagedPlan
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the state after the block, and the chosen experts. `layer` selects the attention window, `depth` the
        layer of the cache."""
        window = self._model.config.attention.window if self._model.config.is_windowed(layer) else None
        sight = None if window is None else (window.size, window.num_sinks)
        attention, ffn, dtype = block.attention, block.ffn, x_ND.dtype
        qkv_NW = _project(x_ND, attention, _norm(block.attention_norm))
        k_PTGK, v_PTGK = self._layers[depth]
        q_NHK = rotate_into_cache(qkv_NW, k_PTGK, v_PTGK, plan.slot_N, rotary, *_qk_norms(attention))
        mixed_NHK = plan.attend(q_NHK, k_PTGK, v_PTGK, sight)
        x_ND = native_linear(mixed_NHK.flatten(1), attention.out.weight, dtype, onto=x_ND)
        if isinstance(ffn, DenseFFN):
            h_NF = native_linear(x_ND, ffn.w13.weight, dtype, _norm(block.ffn_norm), is_gated=True)
            return native_linear(h_NF, ffn.w2.weight, dtype, onto=x_ND), None
        out_ND, balance = ffn(block.ffn_norm(x_ND))
        return x_ND + out_ND, balance.expert_NK


def _project(x_ND: Tensor, attention: Attention, norm: Norm) -> Tensor:
    qkv = attention.qkv
    if not attention.config.qkv_bias:
        return native_linear(x_ND, qkv.weight, x_ND.dtype, norm)
    return biased_linear(x_ND, qkv.weight, qkv.bias, norm)


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


def _qk_norms(attention: Attention) -> tuple[Norm, Norm] | tuple[None, None]:
    if attention.config.qk_norm == "none":
        return None, None
    return _norm(attention.q_norm), _norm(attention.k_norm)
