"""The network over trees in bfloat16 on CUDA: as near the exact gradient as rows are, one compilation for all trees."""

import numpy as np
import pytest
import torch
from torch import Tensor

from m2forge.kernels.cross_entropy import linear_cross_entropy
from m2forge.model.build import build
from m2forge.model.plan import AttentionPlan, Documents
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.model.tree_plan import Trees
from m2forge.records import Call, FinishReason
from m2forge.tree.flat import FlatTree
from m2forge.tree.flatten import flatten
from m2forge.tree.token_tree import TokenTree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CONFIG = preset("m2-tiny").model_copy(update={"hidden_size": 256, "num_mtp": 0})


def branching(seed: int, num_episodes: int = 4, num_turns: int = 4) -> FlatTree:
    """Episodes with one prompt; each call continues the last one, or goes back and takes another turn."""
    rng = np.random.default_rng(seed)
    tree = TokenTree(CONFIG.vocab_size)

    def tokens() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return rng.integers(0, CONFIG.vocab_size, int(rng.integers(1, 150)), dtype=np.int32)

    prompt = tokens()
    for episode in range(num_episodes):
        history = [prompt]
        for turn in range(num_turns):
            del history[int(rng.integers(1, len(history) + 1)) :]
            sent, sampled = np.concatenate((*history, tokens())), tokens()
            logprobs = np.full(sampled.size, -1.0, np.float32)
            call = Call(sent, sampled, logprobs, np.zeros_like(sampled), FinishReason.STOP, 0.0, 1.0)
            tree.add(call, f"{episode}.{turn}")
            history += [sent[sum(part.size for part in history) :], sampled]
    return flatten(tree)


def backward(model: Transformer, tokens_N: Tensor, plan: AttentionPlan, *edges: Tensor) -> None:
    position_M, target_M, weight_M = (x.cuda() for x in edges)
    hidden_ND = model(tokens_N.cuda(), plan).hidden_ND
    loss, _ = linear_cross_entropy(
        hidden_ND, model.head_weight, target_M, position_M=position_M, weight_M=weight_M, float32_head=True
    )
    loss.backward()


def over_tree(model: Transformer, flat: FlatTree, weight_S: Tensor, length: int | None = None) -> None:
    tokens_N = torch.zeros(length or flat.num_tokens, dtype=torch.int64)
    tokens_N[: flat.num_tokens] = torch.tensor(flat.tokens_N)
    position_M, target_M, sample_M = (
        torch.tensor(x).long() for x in (flat.edge_position_M, flat.edge_target_M, flat.edge_sample_M)
    )
    backward(model, tokens_N, Trees(flat, "cuda", length), position_M, target_M, weight_S[sample_M])


def over_rows(model: Transformer, flat: FlatTree, weight_S: Tensor) -> None:
    """All in one pass, so that their gradients are rounded as often as a tree's."""
    paths = [flat.path(sample) for sample in range(flat.sample_S.size)]
    ends = np.cumsum([path.size for path in paths])
    positions = [
        end - 1 - np.arange(flat.edge_target_M[flat.edges_of(sample)].size, 0, -1) for sample, end in enumerate(ends)
    ]
    position_M, target_M, sample_M = (
        torch.tensor(x).long() for x in (np.concatenate(positions), flat.edge_target_M, flat.edge_sample_M)
    )
    tokens_N = torch.tensor(flat.tokens_N[np.concatenate(paths)]).long()
    plan = Documents([path.size for path in paths], "cuda")
    backward(model, tokens_N, plan, position_M, target_M, weight_S[sample_M])


def gradient(model: Transformer) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def test_bfloat16_trees_are_as_exact_as_bfloat16_rows() -> None:
    errors: dict[str, list[float]] = {"rows": [], "tree": []}
    for seed in range(6):
        flat = branching(seed)
        weight_S = torch.randn(flat.sample_S.size, generator=torch.Generator().manual_seed(seed))
        # The float32 reference starts from the rounded weights.
        rounded = build(CONFIG, "cuda", torch.bfloat16, seed=seed)
        exact = build(CONFIG, "cuda", torch.float32)
        exact.load_state_dict(rounded.state_dict())
        over_rows(exact, flat, weight_S)
        for name, run in (("rows", over_rows), ("tree", over_tree)):
            model = build(CONFIG, "cuda", torch.bfloat16, seed=seed)
            run(model, flat, weight_S)
            errors[name].append(float((gradient(model) - gradient(exact)).norm() / gradient(exact).norm()))
    print("relative error of the gradient", errors)
    # The same in the mean; single draws differ by what expert a token near a tie goes to.
    assert np.mean(errors["tree"]) <= np.mean(errors["rows"])


@pytest.mark.filterwarnings("default")  # torch's compiler warns of what it does itself
def test_a_tree_of_another_shape_is_not_compiled_again() -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    model = build(CONFIG, "cuda", torch.bfloat16)
    model.compile_blocks()
    graphs = []
    for seed in range(6):
        flat = branching(seed, num_episodes=2 + seed)
        length = -(-flat.num_tokens // 256) * 256
        over_tree(model, flat, torch.ones(flat.sample_S.size), length)
        graphs.append(counters["stats"]["unique_graphs"])
    # The first tree is compiled for its length, the second for any length.
    assert graphs[1] == graphs[-1], graphs
