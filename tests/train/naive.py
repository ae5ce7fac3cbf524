"""The step over trees in the plainest way: one row per sample, all logits, autograd. What the engine must equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from m2forge.model.transformer import Router, Transformer
from m2forge.records import Call, Sampling
from m2forge.train.config import PolicyConfig
from m2forge.train.engine import TrainEngine
from m2forge.tree.token_tree import TokenTree
from tests.tree.draw import VOCAB, call_sets, make_call

TEMPERATURES = (1.0, 0.7, 1.0, 1.6)


@st.composite
def forests(
    draw: st.DrawFn, max_trees: int = 2, max_calls: int = 5, ids: Sequence[int] = range(VOCAB)
) -> list[TokenTree]:
    """Branching trees with duplicates, empty actions and one-token nodes; advantages, weights, temperatures, ratios.
    `ids`: the tokens of which they are made."""
    sets = [draw(call_sets(max_calls)) for _ in range(draw(st.integers(1, max_trees)))]
    # One action at least is not empty.
    sets[0].append(make_call([0, 1], [2, 3, 4], seed=99))
    named = np.array(ids, np.int32)
    return [
        make_tree(
            [replace(call, prompt_ids=named[call.prompt_ids], response_ids=named[call.response_ids]) for call in calls],
            f"t{index}",
            spread=draw(st.sampled_from((0.1, 3.0))),
            vocab_size=max(ids) + 1,
        )
        for index, calls in enumerate(sets)
    ]


def make_tree(
    calls: Sequence[Call], name: str = "t", spread: float = 1.0, vocab_size: int = VOCAB, weight: float = 1.0
) -> TokenTree:
    tree = TokenTree(vocab_size)
    for index, call in enumerate(calls):
        sampling = Sampling(TEMPERATURES[index % len(TEMPERATURES)])
        tree.add(
            replace(call, sampling=sampling, logprobs=call.logprobs * spread * 4),
            f"{name}s{index}",
            advantage=(-1) ** index * (0.3 + index / 5),
            weight=weight * (1 + index % 3),
        )
    return tree


@dataclass
class Naive:
    total: torch.Tensor
    """The whole loss, to differentiate."""
    main: torch.Tensor
    """The policy's part of it."""
    magnitude: float
    """Σ |terms| of the policy's part."""
    load_LE: torch.Tensor
    ratios: torch.Tensor
    entropies: torch.Tensor


def naive_step(model: Transformer, trees: Sequence[TokenTree], config: PolicyConfig) -> Naive:
    samples = [(tree, index, sample) for tree in trees for index, sample in enumerate(tree.samples)]
    weight_sum = sum(sample.weight * sample.num_response for *_, sample in samples)
    terms: list[torch.Tensor] = []
    drafts: list[torch.Tensor] = []
    ratios: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    load = affinity = torch.zeros(())
    for tree, index, sample in samples:
        path = torch.tensor(tree.path(index), dtype=torch.int64)
        output = model(path[None])
        load = load + output.load_LE
        affinity = affinity + (0 if output.affinity_LE is None else output.affinity_LE)
        target = path[sample.num_prompt :]
        weight = sample.weight / weight_sum
        temperature = 1.0 if config.loss == "sft" else sample.sampling.temperature
        logits = model.logits(output.hidden_ND)[sample.num_prompt - 1 : -1]
        all_logp = F.log_softmax(logits / temperature, -1)
        logp = all_logp[range(len(target)), target]
        ratio = (logp - torch.tensor(sample.logprobs, dtype=torch.float64)).exp().detach()
        terms += [weight * term for term in naive_terms(config, logp, ratio, sample.advantage).unbind()]
        ratios += ratio.unbind()
        entropies += (-(all_logp.exp() * all_logp).sum(-1)).detach().unbind()
        for hidden in output.mtp_hidden_ND:
            draft = model.logits(hidden)[sample.num_prompt - 1 : -1]
            if config.mtp_loss == "ce":
                losses = F.cross_entropy(draft, target, reduction="none")
            else:
                losses = plain_topk(
                    config.mtp_loss, (logits / temperature).detach(), draft / temperature, config.mtp_top_k
                )
            drafts += [weight * loss for loss in losses.unbind()]
    main = torch.stack(terms).sum()
    total = main + config.mtp_weight / len(model.mtp) * torch.stack(drafts).sum()
    if model.config.moe is not None and model.config.moe.aux_loss_weight:
        num_tokens = sum(sample.num_tokens for *_, sample in samples)
        fraction = load.double() / load.sum(-1, keepdim=True)
        balance = model.config.moe.num_experts * (fraction * affinity / num_tokens).sum(-1).mean()
        total = total + model.config.moe.aux_loss_weight * balance
    magnitude = torch.stack(terms).abs().sum().item()
    return Naive(total, main.detach(), magnitude, load, torch.stack(ratios), torch.stack(entropies))


def naive_terms(config: PolicyConfig, logp: torch.Tensor, ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    if config.loss == "cispo":
        return -torch.clamp(ratio, max=config.max_ratio) * advantage * logp
    if config.loss == "ppo_clip":
        live = ratio * (logp - logp.detach()).exp()
        clipped = torch.clamp(live, 1 - config.ppo_low, 1 + config.ppo_high)
        return -torch.min(live * advantage, clipped * advantage)
    return -logp


def plain_topk(kind: str, policy: torch.Tensor, draft: torch.Tensor, top_k: int) -> torch.Tensor:
    """What each row costs over the policy's top-k tokens and the rest, from all logits, by autograd."""
    p, q = policy.softmax(-1), draft.softmax(-1)
    chosen = policy.topk(min(top_k, policy.shape[1])).indices
    is_rest = torch.ones_like(p).scatter(1, chosen, 0.0)
    p_buckets = torch.cat((p.gather(1, chosen), (p * is_rest).sum(-1, keepdim=True)), -1)
    q_buckets = torch.cat((q.gather(1, chosen), (q * is_rest).sum(-1, keepdim=True)), -1)
    if top_k >= policy.shape[1]:
        p_buckets, q_buckets = p_buckets[:, :-1], q_buckets[:, :-1]
    if kind == "topk_acceptance":
        return -torch.minimum(p_buckets, q_buckets).sum(-1).log()
    return (p_buckets * (p_buckets.log() - q_buckets.log())).sum(-1)


def watch_margin(model: Transformer) -> Callable[[], float]:
    """Afterwards: how near any token's choice of experts came to another one."""
    margins = [1.0]

    def hook(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        assert isinstance(router, Router)
        scores = (inputs[0] @ router.weight.t()).sigmoid()
        ordered = (scores if router.bias is None else scores + router.bias).sort(-1, descending=True).values
        k = router.config.top_k
        margins.append(float((ordered[:, k - 1] - ordered[:, k]).detach().min()))

    for router in model.routers():
        router.register_forward_hook(hook)
    return lambda: min(margins)


def watch_gradients(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Filled with the gradients of each step, as the optimizer takes them."""
    seen: dict[str, torch.Tensor] = {}
    step = engine.optimizer.step

    def watched(lr: float):  # type: ignore[no-untyped-def]  # as the optimizer's
        slots = engine.optimizer.slots.items()
        seen.update({name: slot.gradient.clone() for name, slot in slots if slot.gradient is not None})
        return step(lr)

    engine.optimizer.step = watched  # type: ignore[method-assign]
    return seen
