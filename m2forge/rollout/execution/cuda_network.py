"""The network over the paged cache on CUDA, in ten to thirteen kernel launches a layer.

Computes the same as `Transformer.forward` and `Transformer.run_module`, which are its references. It fuses each
residual sum with the norm after it, the QK norms and rotary embeddings with the cache writes, and everything after the
router's product into one kernel. It never syncs with the host, and grids depend on shapes alone, so a CUDA graph can
hold it.
"""

import torch
from torch import Tensor

from m2forge.kernels.expert import FEW_PAIRS, expert_ffn_unsorted
from m2forge.kernels.linear import linear, linear_float32
from m2forge.kernels.residual import Ending, Pairs
from m2forge.kernels.slow_path import expert_kernel_problem, paged_kernel_problem
from m2forge.model.config import ModelConfig
from m2forge.model.rotary import Rotation, frequencies, rotation
from m2forge.model.transformer import (
    Attention,
    Block,
    DenseFFN,
    MixtureFFN,
    MTPModule,
    RMSNorm,
    Transformer,
)
from m2forge.rollout.kv.paged_plan import PagedCache, PagedPlan

Delta = Tensor | Pairs
"""A residual that is not yet added to the state."""


def serves(cache: PagedCache) -> bool:
    if cache.device.type != "cuda":
        return False
    from m2forge.kernels.paged_attention_triton import serves as serves_cache

    return serves_cache(cache.k_YPTGK[0])


def is_capturable(model: Transformer) -> bool:
    """Whether the experts' kernels never sync with the host, which a CUDA graph cannot hold."""
    from m2forge.kernels.expert_triton import serves as serves_experts

    mixtures = [part for part in model.modules() if isinstance(part, MixtureFFN)]
    is_narrow = model.embedding.weight.dtype == torch.bfloat16
    return all(
        is_narrow or serves_experts(part.w13.new_empty(1, part.w13.shape[2]), part.w13, part.w2) for part in mixtures
    )


def slow_reason(config: ModelConfig, device: str, dtype: torch.dtype, block_tokens: int) -> str | None:
    """Why an engine decodes slowly on this device, and what to do; None where nothing is known to be slow."""
    if device == "cpu":
        is_slow = dtype == torch.float16
        return "no CPU kernel takes float16, which decodes slowly; use bfloat16 or float32" if is_slow else None
    problem = paged_kernel_problem(dtype, config.attention.head_dim, block_tokens)
    if problem is not None:
        return f"decoding runs without CUDA graphs and fused kernels, which is slow: {problem}"
    if config.moe is not None:
        problem = expert_kernel_problem(dtype, config.hidden_size, config.moe.intermediate_size)
    return None if problem is None else f"decoding runs without CUDA graphs, which is slow: {problem}"


class FusedNetwork:
    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self.frequency_R = frequencies(model.config.attention, cache.device)
        self.rotary_factor = model.config.attention.rotary_factor

    def main(self, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns hidden states, the LM head's input, and the chosen experts (N, layers, K), if there are any."""
        norm, x_ND = self._model.norm, self._model.embedding(token_N)
        rotary = rotation(plan.position_N, self.frequency_R, x_ND.dtype, self.rotary_factor)
        x_ND, delta, experts = self._blocks(x_ND, _norm(x_ND, _first_norm(self._model)), rotary, plan, None)
        return *_add_norm(x_ND, delta, norm), experts

    def module(self, index: int, parent_ND: Tensor, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor]:
        """As `Transformer.run_module`."""
        module = self._model.mtp[index]
        assert isinstance(module, MTPModule)
        rotary = rotation(plan.position_N, self.frequency_R, parent_ND.dtype, self.rotary_factor)
        embedding_ND = self._model.embedding(token_N)
        joined = torch.cat((_norm(parent_ND, module.state_norm), _norm(embedding_ND, module.embedding_norm)), -1)
        x_ND, delta = self._module(index, joined, rotary, plan, None)
        return _add_norm(x_ND, delta, module.norm)

    def begun_main(
        self, x_ND: Tensor, normed_ND: Tensor, rotary: Rotation, plan: PagedPlan, ending: Ending
    ) -> tuple[Tensor, Tensor | None]:
        """`main` for rows that are already embedded and normed; returns the LM head's input and the experts. Padding
        rows (position −1) choose no experts."""
        x_ND, delta, experts = self._blocks(x_ND, normed_ND, rotary, plan, plan.position_N)
        return _end_norm(x_ND, delta, self._model.norm, ending), experts

    def begun_module(self, index: int, joined: Tensor, rotary: Rotation, plan: PagedPlan, ending: Ending) -> Tensor:
        """`module` for rows that are already joined and normed; returns the LM head's input."""
        module = self._model.mtp[index]
        assert isinstance(module, MTPModule)
        x_ND, delta = self._module(index, joined, rotary, plan, plan.position_N)
        return _end_norm(x_ND, delta, module.norm, ending)

    def _blocks(
        self, x_ND: Tensor, normed_ND: Tensor, rotary: Rotation, plan: PagedPlan, position_N: Tensor | None
    ) -> tuple[Tensor, Delta, Tensor | None]:
        delta: Delta | None = None
        chosen = list[Tensor]()
        for layer, block in enumerate(self._model.blocks):
            assert isinstance(block, Block)
            if delta is not None:
                x_ND, normed_ND = _add_norm(x_ND, delta, block.attention_norm)
            x_ND, delta, expert_NK = self._block(block, layer, layer, x_ND, normed_ND, rotary, plan, position_N)
            chosen += [] if expert_NK is None else [expert_NK]
        assert delta is not None
        return x_ND, delta, torch.stack(chosen, 1) if chosen else None

    def _module(
        self, index: int, joined: Tensor, rotary: Rotation, plan: PagedPlan, position_N: Tensor | None
    ) -> tuple[Tensor, Delta]:
        module, num_layers = self._model.mtp[index], self._model.config.num_layers
        assert isinstance(module, MTPModule)
        x_ND = linear(joined, module.projection.weight)
        normed_ND = _norm(x_ND, module.block.attention_norm)
        x_ND, delta, _ = self._block(
            module.block, num_layers - 1, num_layers + index, x_ND, normed_ND, rotary, plan, position_N
        )
        return x_ND, delta

    def _block(
        self,
        block: Block,
        layer: int,
        depth: int,
        x_ND: Tensor,
        normed_ND: Tensor,
        rotary: Rotation,
        plan: PagedPlan,
        position_N: Tensor | None,
    ) -> tuple[Tensor, Delta, Tensor | None]:
        """Returns the state before the last residual sum, the residual, and the chosen experts. `layer` selects the
        attention window, `depth` the layer of the cache; rows with `position_N` below 0 are padding."""
        window = self._model.config.attention.window if self._model.config.is_windowed(layer) else None
        sight = None if window is None else (window.size, window.num_sinks)
        x_ND, normed_ND = _add_norm(
            x_ND, self._attention(block.attention, depth, normed_ND, rotary, plan, sight), block.ffn_norm
        )
        if isinstance(block.ffn, DenseFFN):
            return x_ND, block.ffn(normed_ND)[0], None
        return x_ND, *_mixture(block.ffn, normed_ND, position_N)

    def _attention(
        self,
        attention: Attention,
        depth: int,
        x_ND: Tensor,
        rotary: Rotation,
        plan: PagedPlan,
        sight: tuple[int, int] | None,
    ) -> Tensor:
        from m2forge.kernels.rotary_triton import rotate_into_cache

        k_PTGK, v_PTGK = self._cache.k_YPTGK[depth], self._cache.v_YPTGK[depth]
        q_weight, k_weight, eps = None, None, 0.0
        if attention.config.qk_norm != "none":
            q_weight, k_weight, eps = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps
        qkv_NW = attention.qkv(x_ND)
        q_NHK = rotate_into_cache(
            qkv_NW, k_PTGK, v_PTGK, plan.slot_N, *rotary, attention.config.qk_norm, q_weight, k_weight, eps
        )
        mixed_NHK = plan.attend(q_NHK, k_PTGK, v_PTGK, sight)
        return linear(mixed_NHK.flatten(1), attention.out.weight)


def _mixture(ffn: MixtureFFN, x_ND: Tensor, position_N: Tensor | None) -> tuple[Delta, Tensor]:
    from m2forge.kernels.expert_triton import expert_pairs, serves
    from m2forge.kernels.router_triton import select_experts

    router, config, num_rows = ffn.router, ffn.router.config, x_ND.shape[0]
    is_few = num_rows * config.top_k <= FEW_PAIRS and serves(x_ND, ffn.w13, ffn.w2)
    expert_NK, weight_NK = select_experts(
        *(linear_float32(x_ND, router.weight), router.bias, config.top_k, config.scoring, config.normalize),
        position_N=position_N if is_few else None,
    )
    if is_few and num_rows > 1:
        y_NKD = expert_pairs(x_ND, ffn.w13, ffn.w2, weight_NK, expert_NK)
        return Pairs(y_NKD, expert_NK, ffn.w2.shape[0]), expert_NK
    return expert_ffn_unsorted(x_ND, ffn.w13, ffn.w2, weight_NK, expert_NK), expert_NK


def _first_norm(model: Transformer) -> RMSNorm:
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block.attention_norm


def _norm(x_ND: Tensor, norm: RMSNorm) -> Tensor:
    from m2forge.kernels.norm_triton import rms_norm_cuda

    return rms_norm_cuda(x_ND, norm.weight, norm.eps)


def _add_norm(x_ND: Tensor, delta: Delta, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    from m2forge.kernels.norm_triton import add_rms_norm

    return add_rms_norm(x_ND, delta, norm.weight, norm.eps)


def _end_norm(x_ND: Tensor, delta: Delta, norm: RMSNorm, ending: Ending) -> Tensor:
    from m2forge.kernels.norm_triton import end_rms_norm

    return end_rms_norm(x_ND, delta, norm.weight, norm.eps, ending)
