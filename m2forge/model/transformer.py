"""The network: embedding, blocks, final norm, LM head, and the chain of multi-token prediction (MTP) modules.

Token ids in; hidden states and routing statistics out. Logits are a separate step, because training needs them only at
loss positions (kernels/head_loss.py). Masks come from an attention plan; parallelism stays outside. The parts come
first, the whole last.

Shapes: B rows, L their length, N flat tokens, D hidden size, V vocabulary, E experts.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from m2forge.kernels.expert import ExpertFFN, dispatch, expert_ffn
from m2forge.kernels.linear import linear, linear_float32, pack
from m2forge.kernels.pointwise import gated, rms_norm, rotate
from m2forge.model.config import LoRAConfig, ModelConfig, MoEConfig
from m2forge.model.plan import Attend, AttentionPlan, CausalRows, LayeredAttend
from m2forge.model.rotary import Rotation, frequencies, rotation
from m2forge.model.rows import draw_rows, whole


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """A linear layer over kernels/linear.py."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.adapter: nn.Module | None = None
        """From the weight to the one to compute with (lora.py)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, adapted(self.weight, self.adapter), self.bias)

    def reset_parameters(self) -> None:
        """Draws nothing: weights are loaded, or drawn by `Transformer.init_weights`."""


def adapted(weight: Tensor, adapter: nn.Module | None) -> Tensor:
    return weight if adapter is None else adapter(weight)


def pack_weights(network: nn.Module, *others: Tensor) -> None:
    """Pack the weights of a serving network's linear layers, and `others`; call it again after every weight update."""
    pack((*(part.weight for part in network.modules() if isinstance(part, Linear)), *others))


# -- attention ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Grouped-query attention: projection, QK norm and rotary embedding; the plan supplies the mask. q, k and v are
    stacked in one matrix in this order: one product forward, one backward.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config.attention
        width, kv_width = self.config.q_width, self.config.kv_width
        self.qkv = Linear(config.hidden_size, width + 2 * kv_width, bias=self.config.qkv_bias)
        self.out = Linear(width, config.hidden_size)
        if self.config.qk_norm != "none":
            flat = self.config.qk_norm == "flat"
            self.q_norm = RMSNorm(width if flat else self.config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(kv_width if flat else self.config.head_dim, config.norm_eps)

    def forward(self, x_ND: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        c = self.config
        q, k, v = self.qkv(x_ND).split((c.q_width, c.kv_width, c.kv_width), dim=-1)
        if c.qk_norm == "flat":
            q, k = self.q_norm(q), self.k_norm(k)
        q_NHK, k_NGK, v_NGK = (x.unflatten(-1, (-1, c.head_dim)) for x in (q, k, v))
        if c.qk_norm == "head":
            q_NHK, k_NGK = self.q_norm(q_NHK), self.k_norm(k_NGK)
        mixed_NHK = attend(rotate(q_NHK, *rotation), rotate(k_NGK, *rotation), v_NGK)
        out: Tensor = self.out(mixed_NHK.flatten(1))
        return out


# -- the router --------------------------------------------------------------------------------------------------------


class Routing(NamedTuple):
    expert_NK: Tensor
    weight_NK: Tensor
    affinity_E: Tensor
    """Σ over tokens of a / Σa, weighted by count: P of the auxiliary loss before the division."""


class Router(nn.Module):
    """Chooses each token's experts and their weights.

        s = sigmoid(x W) or softmax(x W), in at least float32
        chosen = top-k of s + b          (b: the selection bias, which gets no gradient of the language-model loss)
        weight = s[chosen] / Σ s[chosen] (when normalised)

    Routing replay: experts recorded at sampling time can replace the top-k; the weights still come from s.

    Load balancing (N tokens, E experts, c = tokens per expert, each token weighted by the plan's count):

        sign rule:      b += rate · (d − mean d),   d = sign(mean c − c)
        auxiliary loss: E · Σ_e f_e P_e,            f = c / Σc detached, P = mean over tokens of a / Σa
                        with a = s, or a = s + b where b learns by gradient
        MaxVio:         max c / mean c − 1

    If f covers all micro-batches of a step, and P is one micro-batch's sum divided by the step's number of tokens, the
    micro-batches' auxiliary losses add up to that of the step.
    """

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias: Tensor | None = None
        if config.selection_bias:
            bias = torch.zeros(config.num_experts)
            if config.bias_update == "gradient":
                self.bias = nn.Parameter(bias)
            else:
                del self.bias
                self.register_buffer("bias", bias)

    def forward(self, x_ND: Tensor, count_N: Tensor | None = None, recorded_NK: Tensor | None = None) -> Routing:
        """`count_N`: weight of each token in the balance, 1 by default. `recorded_NK`: experts that replace the
        router's choice; −1 in all K entries of a token without a record."""
        logits_NE = linear_float32(x_ND, self.weight)
        scores_NE = logits_NE.sigmoid() if self.config.scoring == "sigmoid" else logits_NE.softmax(-1)
        selection_NE = scores_NE if self.bias is None else scores_NE + self.bias
        expert_NK = selection_NE.detach().topk(self.config.top_k, dim=-1, sorted=False).indices
        if recorded_NK is not None:
            expert_NK = torch.where(recorded_NK < 0, expert_NK, recorded_NK.to(expert_NK.dtype))
        weight_NK = scores_NE.gather(1, expert_NK)
        if self.config.normalize:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return Routing(expert_NK, weight_NK, self._affinity(scores_NE, selection_NE, count_N))

    def _affinity(self, scores_NE: Tensor, selection_NE: Tensor, count_N: Tensor | None) -> Tensor:
        if self.config.aux_loss_weight == 0:
            return scores_NE.new_zeros(self.config.num_experts)
        a_NE = selection_NE if self.config.bias_update == "gradient" else scores_NE
        share_NE = a_NE / a_NE.sum(-1, keepdim=True)
        return (share_NE if count_N is None else share_NE * count_N[:, None]).sum(0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Moves and casts like any module, but keeps the bias in at least float32: its small updates would vanish
        below."""
        # The data, not the tensor: a cast replaces a parameter's data in place.
        exact = None if self.bias is None else self.bias.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if exact is not None and self.bias is not None and self.bias.element_size() < torch.float32.itemsize:
            self.bias.data = exact.to(self.bias.device, torch.float32)
        return self


def max_violation(load_LE: Tensor) -> Tensor:
    """MaxVio of each layer: the highest expert load relative to the mean, minus 1; 0 is perfect balance."""
    load_LE = load_LE.double()
    return load_LE.amax(-1) / load_LE.mean(-1).clamp(min=1e-12) - 1


@torch.no_grad()
def update_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> None:
    """The centred sign rule, in place."""
    load_E = load_E.to(bias_E.dtype)
    direction_E = torch.sign(load_E.mean() - load_E)
    bias_E += rate * (direction_E - direction_E.mean())


def aux_loss(load_LE: Tensor, affinity_LE: Tensor, num_tokens: int | Tensor) -> Tensor:
    """The auxiliary load-balancing loss, averaged over layers; 1 at perfect balance.

    `load_LE` and `num_tokens` are those of the whole step, weighted by count; `affinity_LE` may be one micro-batch's.
    """
    fraction_LE = load_LE.to(affinity_LE.dtype) / load_LE.sum(-1, keepdim=True).clamp(min=1)
    return affinity_LE.shape[-1] * (fraction_LE.detach() * affinity_LE).sum(-1).mean() / num_tokens


# -- feed-forward layers -----------------------------------------------------------------------------------------------


class Balance(NamedTuple):
    """Routing statistics of one MoE layer: tokens per expert, the sum for P of the auxiliary loss, and the chosen
    experts."""

    load_E: Tensor
    affinity_E: Tensor
    expert_NK: Tensor


class DenseFFN(nn.Module):
    """W2 (silu(W1 x) * W3 x), with W1 above W3 in one matrix."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.w13 = Linear(hidden_size, 2 * width)
        self.w2 = Linear(width, hidden_size)

    def forward(
        self, x_ND: Tensor, count_N: Tensor | None = None, recorded_NK: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return self.w2(gated(self.w13(x_ND))), None


class MixtureFFN(nn.Module):
    """A mixture of experts (MoE) behind a router."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.num_experts = config.num_experts
        self.router = Router(hidden_size, config)
        self.w13 = nn.Parameter(torch.empty(config.num_experts, 2 * width, hidden_size))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, hidden_size, width))
        self.w13_adapter: nn.Module | None = None
        self.w2_adapter: nn.Module | None = None
        self.expert_ffn: ExpertFFN = expert_ffn
        """Another operator where ranks divide the experts."""

    def forward(
        self, x_ND: Tensor, count_N: Tensor | None = None, recorded_NK: Tensor | None = None
    ) -> tuple[Tensor, Balance]:
        routing: Routing = self.router(x_ND, count_N, recorded_NK)
        where = dispatch(routing.expert_NK, self.num_experts)
        w13, w2 = adapted(self.w13, self.w13_adapter), adapted(self.w2, self.w2_adapter)
        out_ND = self.expert_ffn(x_ND, w13, w2, routing.weight_NK, where)
        load_E = where.load_E if count_N is None else where.counted_load(count_N)
        return out_ND, Balance(load_E, routing.affinity_E, routing.expert_NK)


def build_ffn(config: ModelConfig, layer: int) -> DenseFFN | MixtureFFN:
    if config.moe is not None and config.is_sparse(layer):
        return MixtureFFN(config.hidden_size, config.moe)
    assert config.intermediate_size is not None
    return DenseFFN(config.hidden_size, config.intermediate_size)


# -- one layer ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One Transformer layer: x + attention(norm x), then x + ffn(norm x)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = build_ffn(config, layer)

    def forward(
        self,
        x_ND: Tensor,
        rotation: Rotation,
        attend: Attend,
        count_N: Tensor | None = None,
        recorded_NK: Tensor | None = None,
    ) -> tuple[Tensor, Balance | None]:
        """`count_N` and `recorded_NK` are passed to the router."""
        x_ND = x_ND + self.attention(self.attention_norm(x_ND), rotation, attend)
        out_ND, balance = self.ffn(self.ffn_norm(x_ND), count_N, recorded_NK)
        return x_ND + out_ND, balance


# -- multi-token prediction --------------------------------------------------------------------------------------------


MTPSource = Literal["main", "mtp1", "random"]
MTPGradient = Literal["all", "modules"]
"""Parameters that the MTP loss trains: all that it depends on, or the modules only."""


class MTPModule(nn.Module):
    """One of K chained modules, each predicting one token further ahead than the last. At token n, module i joins the
    state of module i−1 (or of the main model, for i = 1) at n's parent with n's own embedding, and predicts the
    token after n:

        h_i[n] = Block( P · [ RMSNorm(h_{i−1}[parent n]) ; RMSNorm(embedding[token n]) ] )

    So every depth predicts the same next tokens as the main model, from a main state that is i tokens old. Indexing by
    the child keeps this exact where a token has several children (a tree): a child has one parent. The state before a
    first token is zero. Embedding and LM head are the main model's.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.state_norm = RMSNorm(size, eps)
        self.embedding_norm = RMSNorm(size, eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        # Has the last layer's shape, so that it can be initialised from its weights.
        self.block = Block(config, config.num_layers - 1)
        self.norm = RMSNorm(size, eps)

    def forward(
        self,
        parent_ND: Tensor,
        embedding_ND: Tensor,
        rotation: Rotation,
        attend: Attend,
        count_N: Tensor | None = None,
    ) -> tuple[Tensor, Balance | None]:
        joined = torch.cat((self.state_norm(parent_ND), self.embedding_norm(embedding_ND)), dim=-1)
        out: tuple[Tensor, Balance | None] = self.block(self.projection(joined), rotation, attend, count_N)
        return out


def copied_module(first: MTPModule, last_block: Block, final_norm: RMSNorm, source: MTPSource) -> MTPModule:
    """A new module for the chain: projection and input norms copied from module 1; block and final norm from the main
    model (`source="main"`) or from module 1 too (`source="mtp1"`). It is trainable even if its sources are frozen."""
    module = copy.deepcopy(first)
    if source == "main":
        module.block = copy.deepcopy(last_block)
        module.norm = copy.deepcopy(final_norm)
    return module.requires_grad_()


def copied_name(name: str, num_layers: int, source: MTPSource) -> str:
    """The tensor of the network that `copied_module` copies as `name`, a tensor of a module of the chain."""
    _, _, inside = name.split(".", 2)
    if source == "main" and inside.startswith("block."):
        return f"blocks.{num_layers - 1}.{inside.removeprefix('block.')}"
    return inside if source == "main" and inside.startswith("norm.") else f"mtp.0.{inside}"


# -- the whole ---------------------------------------------------------------------------------------------------------


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
        # Without the initial values of nn.Embedding, which load torch's compiler on the meta device, over a second.
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mtp = nn.ModuleList(MTPModule(config) for _ in range(config.num_mtp))
        self.head = None if config.tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.recompute: Literal["none", "block"] = "none"
        """Activation checkpointing. block: store only each block's input and recompute the block in the backward
        pass."""
        self.token_ids: Mapping[str, int | list[int] | None] = {}
        """Ids of special tokens, such as `eos_token_id`, saved with the weights."""
        self.lora: LoRAConfig | None = None
        """The adapters that are trained in place of the weights, if there are any (lora.py)."""
        self.base: Path | None = None
        """The model whose weights these are, if there are adapters."""

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
        rotary = self._rotation(plan, embedding_ND.dtype)
        full = plan.bind(None)
        window = self.config.attention.window
        windowed = full if window is None else plan.bind(window)
        x_ND, balances = embedding_ND, []
        with fastest_attention(tokens.device):
            for layer, block in enumerate(self.blocks):
                attend = _at_layer(windowed if self.config.is_windowed(layer) else full, layer)
                x_ND, balance = self._run(block, x_ND, rotary, attend, plan.count_N, recorded.get(layer))
                balances.append(balance)
            chosen_NLK = _chosen(balances) if returns_experts else None
            state_ND, mtp_hidden = x_ND, []
            if mtp_gradient == "modules":
                state_ND, embedding_ND = state_ND.detach(), embedding_ND.detach()
            last = windowed if self.config.is_windowed(self.config.num_layers - 1) else full
            for layer, module in enumerate(self.mtp if with_mtp else (), start=self.config.num_layers):
                parent_ND, attend = plan.to_parent(state_ND), _at_layer(last, layer)
                state_ND, balance = self._run(module, parent_ND, embedding_ND, rotary, attend, plan.count_N)
                balances.append(balance)
                assert isinstance(module, MTPModule)
                mtp_hidden.append(module.norm(state_ND))
        return Output(self.norm(x_ND), tuple(mtp_hidden), *self._balance(balances), chosen_NLK, x_ND)

    def run_module(self, index: int, parent_ND: Tensor, tokens_N: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Runs one MTP module; returns its states, which the next module takes, and the LM head's input. Row n of
        `parent_ND` is the state of the previous module, or of the main model, at n's parent."""
        module = self.mtp[index]
        assert isinstance(module, MTPModule)
        rotary = self._rotation(plan, parent_ND.dtype)
        is_windowed = self.config.is_windowed(self.config.num_layers - 1)
        attend = plan.bind(self.config.attention.window if is_windowed else None)
        with fastest_attention(tokens_N.device):
            state_ND, _ = module(parent_ND, self.embedding(tokens_N), rotary, attend, plan.count_N)
        return state_ND, module.norm(state_ND)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the given hidden states, in at least float32 if the config sets it."""
        if self.config.float32_head:
            flat: Tensor = linear_float32(hidden.flatten(0, -2), self.head_weight)
            return flat.view(*hidden.shape[:-1], -1)
        return linear(hidden, self.head_weight)

    def _rotation(self, plan: AttentionPlan, dtype: torch.dtype) -> Rotation:
        attention, position_N = self.config.attention, plan.position_N
        return rotation(position_N, frequencies(attention, position_N.device), dtype, attention.rotary_factor)

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
        draw_rows(whole(module.state_dict()), self.config.init_std, seed)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile each block separately: one graph serves all layers of a shape. Experts on several ranks are called
        outside of graphs, since the number of rows that arrive changes with every call."""
        for module in self.modules():
            if isinstance(module, MixtureFFN) and module.expert_ffn is not expert_ffn:
                module.expert_ffn = torch.compiler.disable(module.expert_ffn)
        for block in (*self.blocks, *self.mtp):
            block.compile(backend=backend)

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
        """Freeze the main model, so that only the MTP modules learn, or unfreeze it. Of a network with adapters, these
        alone learn in either case."""
        for name, parameter in self.named_parameters():
            if not name.startswith("mtp.") and self.lora is None:
                parameter.requires_grad_(not frozen)


def _rows(tokens: Tensor) -> tuple[int, int]:
    if tokens.dim() != 2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} need a plan; without one give (rows, length)")
    return tokens.shape[0], tokens.shape[1]


def _at_layer(attend: Attend, layer: int) -> Attend:
    return attend.at_layer(layer) if isinstance(attend, LayeredAttend) else attend


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
