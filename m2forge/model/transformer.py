"""The network: embedding, blocks, final norm, LM head, and the chain of multi-token prediction (MTP) modules.

Token ids in; hidden states and routing statistics out. Logits are a separate step, because training needs them only at
loss positions (kernels/cross_entropy.py). Masks come from an attention plan; parallelism stays outside.

Shapes: B rows, L their length, N flat tokens, D hidden size, V vocabulary, E experts.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from m2forge.kernels.linear import linear, linear_float32
from m2forge.model.block import Block
from m2forge.model.config import ModelConfig
from m2forge.model.ffn import Balance, MixtureFFN
from m2forge.model.mtp import MTPGradient, MTPModule, MTPSource, copied_module
from m2forge.model.norm import RMSNorm
from m2forge.model.plan import AttentionPlan, CausalRows
from m2forge.model.rope import frequencies, rotation
from m2forge.model.router import Router, update_bias


@dataclass(frozen=True)
class Output:
    hidden_ND: Tensor
    """Hidden states after the final norm: the LM head's input."""
    mtp_hidden_ND: tuple[Tensor, ...]
    """The same for each MTP module."""
    load_LE: Tensor | None
    """Tokens per expert of every MoE layer, modules included, weighted by the plan's counts, int64; None for a dense
    network."""
    affinity_LE: Tensor | None
    """The `affinity_LE` of `router.aux_loss`, with gradient; None if that loss has weight 0."""
    experts_NLK: Tensor | None = None
    """Experts chosen by the main model, in layer order, if requested and there are any."""
    state_ND: Tensor | None = None
    """Hidden states before the final norm: the first MTP module's input."""


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mtp = nn.ModuleList(MTPModule(config) for _ in range(config.num_mtp))
        self.head = None if config.tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.recompute: Literal["none", "block"] = "none"
        """Activation checkpointing. block: store only each block's input and recompute the block in the backward
        pass."""
        self.token_ids: Mapping[str, int | list[int] | None] = {}
        """Ids of special tokens, such as `eos_token_id`, saved with the weights."""

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        tokens: Tensor,
        plan: AttentionPlan | None = None,
        *,
        with_mtp: bool = True,
        mtp_gradient: MTPGradient = "all",
        experts_NLK: Tensor | None = None,
        returns_experts: bool = False,
    ) -> Output:
        """`tokens`: (B, L) rows, or (N,) flat with their plan. Without the MTP modules, which logits do not need, the
        output has nothing of them. `mtp_gradient`: whether the MTP loss also trains the main model. `experts_NLK`:
        recorded experts that the main model's routers replay, in layer order; −1 in all K entries where there is no
        record. The modules choose for themselves. `returns_experts`: whether the output includes the main model's
        experts."""
        if plan is None:
            plan = CausalRows(*_rows(tokens), tokens.device)
        tokens_N = tokens.flatten()
        if plan.position_N.shape != tokens_N.shape:
            raise ValueError(f"the plan is for {plan.position_N.shape[0]} tokens, got {tokens_N.shape[0]}")
        recorded = self._recorded(experts_NLK, tokens_N.shape[0])
        embedding_ND = self.embedding(tokens_N)
        turn = rotation(plan.position_N, frequencies(self.config.attention, tokens.device), embedding_ND.dtype)
        full = plan.bind(None)
        window = self.config.attention.window
        windowed = full if window is None else plan.bind(window)
        x_ND, balances = embedding_ND, []
        with fastest_attention(tokens.device):
            for layer, block in enumerate(self.blocks):
                attend = windowed if self.config.is_windowed(layer) else full
                x_ND, balance = self._run(block, x_ND, turn, attend, plan.count_N, recorded.get(layer))
                balances.append(balance)
            chosen_NLK = _chosen(balances) if returns_experts else None
            state_ND, mtp_hidden = x_ND, []
            if mtp_gradient == "modules":
                state_ND, embedding_ND = state_ND.detach(), embedding_ND.detach()
            last = windowed if self.config.is_windowed(self.config.num_layers - 1) else full
            for module in self.mtp if with_mtp else ():
                parent_ND = plan.to_parent(state_ND)
                state_ND, balance = self._run(module, parent_ND, embedding_ND, turn, last, plan.count_N)
                balances.append(balance)
                assert isinstance(module, MTPModule)
                mtp_hidden.append(module.norm(state_ND))
        return Output(self.norm(x_ND), tuple(mtp_hidden), *self._balance(balances), chosen_NLK, x_ND)

    def run_module(self, index: int, parent_ND: Tensor, tokens_N: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Runs one MTP module; returns its states, which the next module takes, and the LM head's input. Row n of
        `parent_ND` is the state of the previous module, or of the main model, at n's parent."""
        module = self.mtp[index]
        assert isinstance(module, MTPModule)
        turn = rotation(plan.position_N, frequencies(self.config.attention, tokens_N.device), parent_ND.dtype)
        is_windowed = self.config.is_windowed(self.config.num_layers - 1)
        attend = plan.bind(self.config.attention.window if is_windowed else None)
        with fastest_attention(tokens_N.device):
            state_ND, _ = module(parent_ND, self.embedding(tokens_N), turn, attend, plan.count_N)
        return state_ND, module.norm(state_ND)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the given hidden states, in at least float32 if the config asks for it."""
        if self.config.float32_head:
            flat: Tensor = linear_float32(hidden.flatten(0, -2), self.head_weight)
            return flat.view(*hidden.shape[:-1], -1)
        return linear(hidden, self.head_weight)

    def _run(self, module: nn.Module, *inputs: object) -> tuple[Tensor, Balance | None]:
        if self.recompute == "block" and torch.is_grad_enabled():
            return checkpoint(module, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
        return module(*inputs)  # type: ignore[no-any-return]

    def _balance(self, balances: list[Balance | None]) -> tuple[Tensor | None, Tensor | None]:
        seen = [balance for balance in balances if balance is not None]
        if not seen:
            return None, None
        load_LE = torch.stack([balance.load_E for balance in seen]).long()
        if self.config.moe is None or self.config.moe.aux_loss_weight == 0:
            return load_LE, None
        return load_LE, torch.stack([balance.affinity_E for balance in seen])

    def _recorded(self, experts_NLK: Tensor | None, num_tokens: int) -> dict[int, Tensor]:
        """Recorded experts, by layer of the main model."""
        if experts_NLK is None:
            return {}
        sparse = [layer for layer in range(self.config.num_layers) if self.config.is_sparse(layer)]
        moe = self.config.moe
        expected = (num_tokens, len(sparse), moe.top_k if moe else 0)
        if moe is None or tuple(experts_NLK.shape) != expected:
            raise ValueError(f"recorded experts of shape {tuple(experts_NLK.shape)}: this network takes {expected}")
        # An out-of-range expert would read foreign memory. On CUDA the check does not sync with the host.
        is_none_NL = (experts_NLK < 0).any(-1)
        is_known = (is_none_NL == (experts_NLK == -1).all(-1)).all() & (experts_NLK < moe.num_experts).all()
        if is_known.is_cuda:
            torch._assert_async(is_known)
        elif not is_known:
            raise ValueError(f"recorded experts must lie in 0..{moe.num_experts - 1}, or be -1 where unknown")
        return dict(zip(sparse, experts_NLK.unbind(1), strict=True))

    # -- initialisation and training ----------------------------------------------------------------------------------

    def init_weights(self, seed: int = 0) -> None:
        """Initialises matrices from a normal distribution with `init_std`, norms to 1 and biases to 0, on the weights'
        device."""
        self._draw(self, seed)

    def _draw(self, module: nn.Module, seed: int) -> None:
        generator = torch.Generator(self.embedding.weight.device).manual_seed(seed)
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, self.config.init_std, generator=generator)
            else:
                parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        for part in module.modules():
            if isinstance(part, Router) and part.bias is not None:
                part.bias.data.zero_()

    def compile_blocks(self) -> None:
        """Compile each block separately: one graph serves all layers of a shape."""
        for block in (*self.blocks, *self.mtp):
            block.compile()

    def routers(self) -> Iterator[Router]:
        """Routers in the order of `Output.load_LE`."""
        for block in (*self.blocks, *(module.block for module in self.mtp)):
            if isinstance(block.ffn, MixtureFFN):
                yield block.ffn.router

    def update_router_biases(self, load_LE: Tensor) -> None:
        """One step of the sign rule from the loads of a whole optimizer step; frozen routers do not change, nor do
        those of the modules if `load_LE` does not include them."""
        routers = list(self.routers())
        num_main = sum(isinstance(block.ffn, MixtureFFN) for block in self.blocks)
        if load_LE.shape[0] not in (num_main, len(routers)):
            raise ValueError(
                f"loads of {load_LE.shape[0]} layers: this network has {num_main}, {len(routers)} with MTP"
            )
        for router, load_E in zip(routers, load_LE, strict=False):
            learns = router.config.bias_update == "sign" and router.weight.requires_grad
            if router.bias is not None and learns:
                update_bias(router.bias, load_E, router.config.bias_rate)

    def freeze_learnt_biases(self, frozen: bool) -> None:
        """Freeze the selection biases that learn by gradient, or let them learn where their router does."""
        for router in self.routers():
            if isinstance(router.bias, nn.Parameter):
                router.bias.requires_grad_(not frozen and router.weight.requires_grad)

    def expand_mtp(self, num_modules: int, source: MTPSource = "main", seed: int = 0) -> None:
        """Extend the chain to `num_modules` with copies, or with random weights from `seed`; existing modules do not
        change."""
        if not self.mtp:
            raise ValueError("there is no first module to copy projection and norms from; start with num_mtp = 1")
        if num_modules < len(self.mtp):
            raise ValueError(f"cannot expand from {len(self.mtp)} modules to {num_modules}")
        first, last = self.mtp[0], self.blocks[-1]
        assert isinstance(first, MTPModule)
        assert isinstance(last, Block)
        for index in range(len(self.mtp), num_modules):
            module = copied_module(first, last, self.norm, source)
            if source == "random":
                self._draw(module, seed + index)
            self.mtp.append(module)
        self.config = self.config.model_copy(update={"num_mtp": num_modules})

    def freeze_main(self, frozen: bool = True) -> None:
        """Freeze the main model, so that only the MTP modules learn, or unfreeze it."""
        for name, parameter in self.named_parameters():
            if not name.startswith("mtp."):
                parameter.requires_grad_(not frozen)


def _rows(tokens: Tensor) -> tuple[int, int]:
    if tokens.dim() != 2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} need a plan; without one give (rows, length)")
    return tokens.shape[0], tokens.shape[1]


def _chosen(balances: list[Balance | None]) -> Tensor | None:
    chosen = [balance.expert_NK for balance in balances if balance is not None]
    return torch.stack(chosen, dim=1) if chosen else None


def fastest_attention(device: torch.device) -> AbstractContextManager[None]:
    """Orders the backends of `scaled_dot_product_attention`: cuDNN first, which is 1.5 times as fast as the default on
    Hopper."""
    if device.type != "cuda":
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
