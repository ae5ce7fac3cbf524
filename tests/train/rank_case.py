"""A case of training on several ranks, run on each rank and in one process: draws packs and trees, deals them to the
ranks, trains, and returns all that the steps leave behind. A case may contain a bug, which tests must notice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from m2forge.kernels.expert import Dispatch, ExpertFFN, dispatch
from m2forge.model.build import build, empty
from m2forge.model.config import LoRAConfig
from m2forge.model.lora import attach
from m2forge.model.plan import Documents
from m2forge.model.preset import preset
from m2forge.model.transformer import MixtureFFN, MTPSource, Transformer
from m2forge.records import Call, FinishReason, Pack
from m2forge.train.batch import BatchT
from m2forge.train.config import MeshConfig, OptimizerConfig, PolicyConfig, WalkConfig
from m2forge.train.context_parallel import ContextGroup, ContextPlan, Share
from m2forge.train.engine import TrainEngine
from m2forge.train.optimizer import Norms, Optimizer
from m2forge.train.parallel import (
    ProcessRanks,
    Ranks,
    align,
    context_group,
    expand_mtp,
    gathered,
    local,
    refuse_drift,
    shard_model,
    sharded_modules,
)
from m2forge.tree.token_tree import TokenTree
from tests.train.draw import VOCAB, draw_pack, small_model

_T = TypeVar("_T")
Over = Literal["rows", "trees"]
Bug = Literal["none", "mean", "mean of experts", "no gradient of weights", "no gradient of states", "wrong rank"]
"""mean: gradients are averaged over the ranks; of experts: those alone. no gradient: what travels back to the tokens of
the experts' operator. wrong rank: tokens travel to the next rank."""
ContextBug = Literal[
    "none",
    "own tokens alone",
    "own parents alone",
    "counted twice",
    "next positions",
    "keys as received",
    "first queries",
    "no gradient of keys",
]
"""Mistakes planted in ranks that share a pack. own: the attention, or the MTP modules, of a rank ignore the tokens of
others. counted twice: each rank's loss is divided by the sum of what all hold. next positions: they start at 0 on each
rank. Where queries are divided: keys as received, not in the order of tokens; first queries: masks of the first tokens;
no gradient of keys and values that travelled."""

CPU = torch.device("cpu")
LENGTHS = [[5, 4], [7], [2, 9]]
SHARDED = MeshConfig(shard="auto")


@dataclass(frozen=True)
class Case:
    mesh: MeshConfig = SHARDED
    over: Over = "rows"
    num_steps: int = 2
    kind: Literal["adamw", "muon"] = "adamw"
    offload: Literal["none", "host"] = "none"
    recompute: Literal["none", "block"] = "none"
    walk: WalkConfig | None = None
    """How the ranks walk; one process runs whole packs."""
    added: MTPSource | None = None
    """The origin of two MTP modules that are added after the first step."""
    frozen: bool = False
    is_compiled: bool = False
    """Only on several ranks."""
    lora: LoRAConfig | None = None
    moe: Mapping[str, object] = field(default_factory=dict)
    attention: Mapping[str, object] = field(default_factory=dict)
    vocab_size: int = 32
    dtype: torch.dtype = torch.float64
    preset: str | None = None
    """In place of the small network, with two MTP modules."""
    replay: Literal["none", "recorded"] = "none"
    seed: int = 0
    """Above 0: of the shapes of rows and trees."""
    bug: Bug = "none"
    context_bug: ContextBug = "none"

    @property
    def optimizer(self) -> OptimizerConfig:
        # Below the norms of some steps and above those of others.
        return OptimizerConfig(kind=self.kind, max_norm={"rows": 3.6, "trees": 1.5}[self.over])


class MeanRanks(ProcessRanks):
    """The bug that is planted: an average where a sum belongs."""

    def sum(self, tensor: Tensor) -> Tensor:
        total = super().sum(tensor)
        is_gradient = tensor.numel() > 100
        return total / self.num_ranks if is_gradient else total


class RecordingEngine(TrainEngine):
    """Keeps the expert loads of each step."""

    def _update(self, load_LE: Tensor | None, lr: float) -> Norms:
        assert load_LE is not None
        self.loads = [*getattr(self, "loads", []), load_LE]
        return super()._update(load_LE, lr)


@dataclass(frozen=True)
class WrongFFN:
    """An operator of experts that makes a mistake."""

    right: ExpertFFN
    bug: Bug

    def __call__(self, x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, where: Dispatch) -> Tensor:
        if self.bug == "no gradient of weights":
            weight_NK = weight_NK.detach()
        if self.bug == "no gradient of states":
            x_ND = x_ND.detach()
        if self.bug == "wrong rank":
            num_experts = where.ends_E.shape[0]
            expert_NK = torch.searchsorted(where.ends_E, where.slot_NK, right=True)
            where = dispatch((expert_NK + num_experts // 2) % num_experts, num_experts)
        return self.right(x_ND, w13_EGD, w2_EDF, weight_NK, where)


def plant(bug: Bug, model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, MixtureFFN) and bug != "mean":
            module.expert_ffn = WrongFFN(module.expert_ffn, bug)
    for unit in sharded_modules(model):
        if bug == "mean" or (bug == "mean of experts" and isinstance(unit, MixtureFFN)):
            unit.set_gradient_divide_factor(2.0)


@dataclass(frozen=True)
class WrongContext(ContextGroup):
    """Splits packs with a mistake."""

    bug: ContextBug = "none"

    @property
    def size(self) -> int:
        return 1 if self.bug == "counted twice" else self.group.size()

    def split(self, batch: BatchT) -> BatchT:
        part = ContextGroup(self.group, self.parts, self.network).split(batch)
        own = Documents([part.tokens_N.shape[0]], CPU)
        name = {"own tokens alone": "bind", "own parents alone": "to_parent", "next positions": "position_N"}.get(
            self.bug
        )
        if name is not None:
            setattr(part.plan, name, getattr(own, name))
        assert isinstance(part.plan, ContextPlan)
        part.plan.share = with_bug(part.plan.share, self.bug)
        return part


@dataclass(frozen=True)
class DetachedShare(Share):
    def gather(self, rows: Tensor) -> Tensor:
        return super().gather(rows.detach())


def with_bug(share: Share, bug: ContextBug) -> Share:
    if bug == "keys as received":
        return replace(share, order_N=None)
    if bug == "first queries":
        assert share.query_Q is not None
        return replace(share, query_Q=torch.arange(share.query_Q.shape[0]))
    if bug == "no gradient of keys":
        return DetachedShare(**{each.name: getattr(share, each.name) for each in fields(share)})
    return share


def packs_of(step: int, ranks: Ranks, seed: int = 0, sharing: int = 1) -> list[Pack]:
    lengths = LENGTHS if not seed else draw_lengths(100 * seed + step)
    packs = [draw_pack(10 * step + index, lengths) for index, lengths in enumerate(lengths)]
    return share_of(packs, step, ranks, sharing)


def draw_lengths(seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 12, generator.integers(1, 4)).tolist() for _ in range(3)]


def trees_of(step: int, ranks: Ranks, seed: int = 0, sharing: int = 1) -> list[TokenTree]:
    return share_of([draw_tree(10 * step + index, seed) for index in range(3)], step, ranks, sharing)


def share_of(items: list[_T], step: int, ranks: Ranks, sharing: int) -> list[_T]:
    """Three items: two for the first rank and one for the last; in every other step all for the first. `sharing`:
    number of neighbours that have the same."""
    last, index = ranks.num_ranks // sharing - 1, ranks.rank // sharing
    if last == 0:
        return items
    num_first = 2 + step % 2
    return {0: items[:num_first], last: items[num_first:]}.get(index, [])


def draw_tree(seed: int, shape_seed: int = 0) -> TokenTree:
    """Three answers to one prompt, the last of them after the first and a turn of the environment; with the routing of
    all tokens but the last, over four experts."""
    generator = np.random.default_rng(seed)
    sizes = np.random.default_rng(100 * shape_seed + seed).integers(1, 9, 5) if shape_seed else (6, 4, 5, 3, 4)
    ids = [generator.integers(0, VOCAB, size).astype(np.int32) for size in sizes]
    prompts = [ids[0], ids[0], np.concatenate((ids[0], ids[1], ids[3]))]
    tree = TokenTree(VOCAB)
    for index, (prompt, response) in enumerate(zip(prompts, (ids[1], ids[2], ids[4]), strict=True)):
        call = Call(
            prompt_ids=prompt,
            response_ids=response,
            logprobs=-4 * generator.random(response.size, np.float32),
            versions=np.zeros(response.size, np.int32),
            finish_reason=FinishReason.STOP,
            started_s=0.0,
            finished_s=1.0,
        )
        advantage, order = float(generator.normal()), generator.random((prompt.size + response.size - 1, 2, 4))
        tree.add(
            call,
            f"answer {index}",
            episode="e",
            advantage=advantage,
            weight=1.0 + index,
            experts=order.argsort(-1)[..., :2].astype(np.int16),
        )
    return tree


def make_model(case: Case, ranks: Ranks) -> Transformer:
    if case.preset is not None:
        config = preset(case.preset)
        assert config.moe is not None
        moe = config.moe.model_copy(update=case.moe)
        model = build(config.model_copy(update={"num_mtp": 2, "moe": moe}), dtype=case.dtype, seed=0)
    else:
        sizes = {"num_experts": 4, "top_k": 2, "intermediate_size": 8, **case.moe}
        model = small_model(case.dtype, case.attention, moe=sizes, vocab_size=case.vocab_size)
    if ranks.rank:
        model.init_weights(seed=1)
    return model


def make_engine(case: Case, ranks: Ranks, model: Transformer | None = None) -> RecordingEngine:
    model = model or make_model(case, ranks)
    model.recompute = case.recompute
    if case.lora is not None:
        attach(model, case.lora.model_copy(update={"seed": ranks.rank}), Path("base"))
    if isinstance(ranks, ProcessRanks):
        align(model, ranks)
        if case.mesh.is_sharded:
            shard_model(model, case.mesh, ranks)
        if case.bug != "none":
            plant(case.bug, model)
        if case.bug == "mean":
            ranks = MeanRanks(CPU)
        if case.is_compiled:
            model.compile_blocks("aot_eager")
    model.freeze_main(case.frozen)
    context = context_group(case.mesh, ranks, model.config) if isinstance(ranks, ProcessRanks) else None
    if context is not None and case.context_bug != "none":
        context = WrongContext(context.group, context.parts, context.network, case.context_bug)
    # So that three trees are more than one pack.
    policy = PolicyConfig(pack_tokens=40, replay=case.replay)
    return RecordingEngine(
        model,
        case.optimizer,
        ranks=ranks,
        policy=policy,
        offload=case.offload,
        router_bias="balanced" if case.over == "rows" else "frozen",
        walk=case.walk if isinstance(ranks, ProcessRanks) else None,
        context=context,
    )


@torch.no_grad()
def unsharded_model(model: Transformer, ranks: Ranks) -> Transformer | None:
    """`model` itself if it is not sharded, else a copy on rank 0, and None on the others; all call this together."""
    modules = sharded_modules(model)
    if not modules:
        return model
    for module in modules:
        module.reshard()
    copy = empty(model.config, "cpu", model.embedding.weight.dtype) if ranks.rank == 0 else None
    if copy is not None and model.lora is not None and model.base is not None:
        attach(copy, model.lora, model.base)
    target = {} if copy is None else copy.state_dict()
    for name, tensor in model.state_dict().items():
        full = gathered(local(tensor), tensor)
        if copy is not None:
            target[name].copy_(full)
    if copy is not None:
        copy.token_ids = model.token_ids
    return copy


def whole_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of all ranks, on each; they call this together."""
    weights = {name: slot.weight for name, slot in optimizer.slots.items()}
    return {name: gathered(rows.tensor, weights[name.rpartition("/")[0]]) for name, rows in optimizer.held().items()}


def run_case(case: Case, ranks: Ranks) -> dict[str, Any]:
    engine, first = make_engine(case, ranks), 0
    if case.added is not None:
        first = 1
        train(engine, range(first), case.over, case.seed)
        engine.model = expand_mtp(engine.model, 4, case.added, case.mesh, ranks)
        engine.model.recompute = case.recompute
        engine.model.freeze_main(case.frozen)
        engine.optimizer.follow(engine.model)
        engine.loads = []
    return train(engine, range(first, case.num_steps), case.over, case.seed)


def train(engine: RecordingEngine, steps: Sequence[int], over: str = "rows", seed: int = 0) -> dict[str, Any]:
    """All that these steps leave behind; weights and state on rank 0."""
    ranks, sharing = engine.ranks, 1 if engine.context is None else engine.context.group.size()
    metrics, logprobs = [], []
    for step in steps:
        if over == "rows":
            packs = packs_of(step, ranks, seed, sharing)
            metrics.append(engine.step_rows(packs, lr=1e-2, mtp_weight=0.3).read())
        else:
            report = engine.step(trees_of(step, ranks, seed, sharing), lr=1e-2)
            metrics.append(report.read())
            logprobs += [logp for _, logp in report.logprobs()]
    refuse_drift(engine.model, ranks)
    whole, state = unsharded_model(engine.model, ranks), whole_state(engine.optimizer)
    return {
        "metrics": {
            name: torch.tensor([values[name] for values in metrics], dtype=torch.float64) for name in metrics[0]
        },
        "loads": torch.stack(engine.loads),
        "logprobs": logprobs,
        "weights": {} if whole is None else whole.state_dict(),
        "state": state,
        "num_steps": engine.optimizer.num_steps,
        "sharded": [name for name, slot in engine.optimizer.slots.items() if slot.is_sharded],
    }
