"""Random trees for a network, their samples as rows, and how near a router came to choosing otherwise."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from m2forge.kernels.linear import linear_float32
from m2forge.model.build import build
from m2forge.model.config import AttentionConfig, ModelConfig, MoEConfig, RopeScaling, WindowConfig
from m2forge.model.transformer import Router, Transformer
from m2forge.records import Call, FinishReason
from m2forge.tree.token_tree import TokenTree
from tests.model.bias import set_biases
from tests.tree.draw import VOCAB, call_sets

MIN_MARGIN = 1e-9
"""Nearer than this, rounding may choose another expert, and two orders of summing need not agree."""

SMALL_TREE = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=24,
    num_layers=2,
    attention=AttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rotary_dim=4,
        rope_theta=1e4,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_context=64),
        qkv_bias=True,
        qk_norm="flat",
    ),
    moe=MoEConfig(num_experts=6, top_k=2, intermediate_size=12, aux_loss_weight=0.3),
    num_mtp=3,
)
"""Shaped as m2-tiny, with three prediction modules, biases and YaRN."""


@st.composite
def forests(draw: st.DrawFn, max_trees: int = 3, max_calls: int = 8) -> list[list[Call]]:
    """Calls of each tree: paths that branch at any depth, end inside others, repeat, and sometimes sample nothing."""
    forest = [draw(call_sets(max_calls)) for _ in range(draw(st.integers(1, max_trees)))]
    for calls in forest:
        calls.extend(draw(st.lists(st.sampled_from(calls), max_size=2)))
    return forest


def windowed(config: ModelConfig, window: WindowConfig | None) -> ModelConfig:
    return config.model_copy(update={"attention": config.attention.model_copy(update={"window": window})})


def windows() -> st.SearchStrategy[WindowConfig | None]:
    layers = st.sets(st.integers(0, 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    return st.none() | st.builds(WindowConfig, size=st.integers(1, 9), layers=layers, num_sinks=st.integers(0, 3))


def drawn_network(config: ModelConfig, seed: int) -> Transformer:
    """In float64, with weights and biases large enough that every part matters."""
    model = build(config, dtype=torch.float64, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    set_biases(model, std=0.1, seed=seed)
    return model


def branching_tree(vocab_size: int, seed: int, num_episodes: int = 4, num_turns: int = 4) -> TokenTree:
    """Episodes with one prompt; each call continues the last one, or goes back and takes another turn."""
    rng = np.random.default_rng(seed)
    tree = TokenTree(vocab_size)

    def tokens() -> npt.NDArray[np.int32]:
        return rng.integers(0, vocab_size, int(rng.integers(1, 150)), dtype=np.int32)

    prompt = tokens()
    for episode in range(num_episodes):
        history = [prompt]
        for turn in range(num_turns):
            del history[int(rng.integers(1, len(history) + 1)) :]
            sent, sampled = np.concatenate((*history, tokens())), tokens()
            logprobs = np.full(sampled.size, -1.0, np.float32)
            call = Call(sent, sampled, logprobs, np.zeros_like(sampled), FinishReason.STOP, 0.0, 1.0)
            tree.add(call, f"{episode}.{turn}", advantage=(-1.0) ** turn, weight=1.0 + episode)
            history += [sent[sum(part.size for part in history) :], sampled]
    return tree


def tokens_of(call: Call) -> Tensor:
    return torch.tensor([*call.prompt_ids.tolist(), *call.response_ids.tolist()])


@dataclass
class Watch:
    """What the routers did while it was on."""

    margin: float = float("inf")
    """The least gap between the last expert chosen and the first not chosen, of all tokens and layers."""
    choices: list[Tensor] = field(default_factory=list)
    """Experts of each call of a router, in order."""


@contextmanager
def watched(model: Transformer) -> Iterator[Watch]:
    watch = Watch()

    @torch.no_grad()
    def look(router: nn.Module, inputs: Sequence[Tensor], routing: Sequence[Tensor]) -> None:
        assert isinstance(router, Router)
        scores_NE = linear_float32(inputs[0], router.weight)
        scores_NE = scores_NE.sigmoid() if router.config.scoring == "sigmoid" else scores_NE.softmax(-1)
        sorted_NE = (scores_NE if router.bias is None else scores_NE + router.bias).sort(-1, descending=True).values
        top_k = router.config.top_k
        if top_k < sorted_NE.shape[1]:
            watch.margin = min(watch.margin, float((sorted_NE[:, top_k - 1] - sorted_NE[:, top_k]).min()))
        watch.choices.append(routing[0])

    handles = [router.register_forward_hook(look) for router in model.routers()]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()
