"""The network over the paged cache on CUDA, in eleven to fourteen launches a layer.

What `Transformer.forward` and `Transformer.run_module` compute, with each sum joined to the norm behind it, both norms
and rotations of attention to the writes into the cache, and all that follows a router's product in one kernel. Nothing
waits for the device, and grids follow from shapes alone, so a CUDA graph can hold it. They are its twins.
"""

import torch
from torch import Tensor

from m2forge.kernels.expert import expert_ffn_unsorted
from m2forge.kernels.linear import linear, linear_float32
from m2forge.model.attention import Attention
from m2forge.model.block import Block
from m2forge.model.ffn import DenseFFN, MixtureFFN
from m2forge.model.mtp import MTPModule
from m2forge.model.norm import RMSNorm
from m2forge.model.rope import Rotation, frequencies, rotation
from m2forge.model.transformer import Transformer
from m2forge.rollout.paged_plan import PagedCache, PagedPlan


def serves(cache: PagedCache) -> bool:
    if cache.device.type != "cuda":
        return False
    from m2forge.kernels.paged_attention_triton import serves as serves_cache

    return serves_cache(cache.k_YPTGK[0])


def is_capturable(model: Transformer) -> bool:
    """Whether the experts never make the host wait, which a CUDA graph cannot hold."""
    from m2forge.kernels.expert_decode_triton import serves as serves_experts

    mixtures = [part for part in model.modules() if isinstance(part, MixtureFFN)]
    is_narrow = model.embedding.weight.dtype == torch.bfloat16
    return all(
        is_narrow or serves_experts(part.w13.new_empty(1, part.w13.shape[2]), part.w13, part.w2) for part in mixtures
    )


class FusedNetwork:
    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._frequency_R = frequencies(model.config.attention, cache.device)

    def main(self, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        """States, what the head takes, and the experts that were chosen (N, layers, K), if there are any."""
        model, chosen = self._model, list[Tensor]()
        x_ND, delta_ND = model.embedding(token_N), None
        turn = rotation(plan.position_N, self._frequency_R, x_ND.dtype)
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            x_ND, delta_ND, expert_NK = self._block(block, layer, layer, x_ND, delta_ND, turn, plan)
            chosen += [] if expert_NK is None else [expert_NK]
        assert delta_ND is not None
        state_ND, hidden_ND = _add_norm(x_ND, delta_ND, model.norm)
        return state_ND, hidden_ND, torch.stack(chosen, 1) if chosen else None

    def module(self, index: int, parent_ND: Tensor, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor]:
        """As `Transformer.run_module`."""
        model, module = self._model, self._model.mtp[index]
        assert isinstance(module, MTPModule)
        turn = rotation(plan.position_N, self._frequency_R, parent_ND.dtype)
        embedding_ND = model.embedding(token_N)
        joined = torch.cat((_norm(parent_ND, module.state_norm), _norm(embedding_ND, module.embedding_norm)), -1)
        last, depth = model.config.num_layers - 1, model.config.num_layers + index
        x_ND = linear(joined, module.projection.weight)
        x_ND, delta_ND, _ = self._block(module.block, last, depth, x_ND, None, turn, plan)
        return _add_norm(x_ND, delta_ND, module.norm)

    def _block(
        self,
        block: Block,
        layer: int,
        depth: int,
        x_ND: Tensor,
        delta_ND: Tensor | None,
        turn: Rotation,
        plan: PagedPlan,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The state before the last sum, what is still to be added to it, and the experts chosen. `layer` says what
        the block sees, `depth` where in the cache it lies."""
        if delta_ND is None:
            normed_ND = _norm(x_ND, block.attention_norm)
        else:
            x_ND, normed_ND = _add_norm(x_ND, delta_ND, block.attention_norm)
        window = self._model.config.attention.window if self._model.config.is_windowed(layer) else None
        sight = None if window is None else (window.size, window.num_sinks)
        x_ND, normed_ND = _add_norm(
            x_ND, self._attention(block.attention, depth, normed_ND, turn, plan, sight), block.ffn_norm
        )
        if isinstance(block.ffn, DenseFFN):
            return x_ND, block.ffn(normed_ND)[0], None
        return x_ND, *_mixture(block.ffn, normed_ND)

    def _attention(
        self,
        attention: Attention,
        depth: int,
        x_ND: Tensor,
        turn: Rotation,
        plan: PagedPlan,
        sight: tuple[int, int] | None,
    ) -> Tensor:
        from m2forge.kernels.rotary_triton import rotate_into_cache

        k_PTGK, v_PTGK = self._cache.k_YPTGK[depth], self._cache.v_YPTGK[depth]
        q_weight, k_weight, eps = None, None, 0.0
        if attention.config.qk_norm != "none":
            q_weight, k_weight, eps = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps
        qkv_NW = linear(x_ND, attention.qkv.weight)
        q_NHK = rotate_into_cache(
            qkv_NW, k_PTGK, v_PTGK, plan.slot_N, *turn, attention.config.qk_norm, q_weight, k_weight, eps
        )
        mixed_NHK = plan.attend(q_NHK, k_PTGK, v_PTGK, sight)
        return linear(mixed_NHK.flatten(1), attention.out.weight)


def _mixture(ffn: MixtureFFN, x_ND: Tensor) -> tuple[Tensor, Tensor]:
    from m2forge.kernels.router_triton import select_experts

    router, config = ffn.router, ffn.router.config
    expert_NK, weight_NK = select_experts(
        linear_float32(x_ND, router.weight), router.bias, config.top_k, config.scoring, config.normalize
    )
    return expert_ffn_unsorted(x_ND, ffn.w13, ffn.w2, weight_NK, expert_NK), expert_NK


def _norm(x_ND: Tensor, norm: RMSNorm) -> Tensor:
    from m2forge.kernels.norm_triton import rms_norm_cuda

    return rms_norm_cuda(x_ND, norm.weight, norm.eps)


def _add_norm(x_ND: Tensor, delta_ND: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    from m2forge.kernels.norm_triton import add_rms_norm

    return add_rms_norm(x_ND, delta_ND, norm.weight, norm.eps)
