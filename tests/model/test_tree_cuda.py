"""The network over trees in bfloat16 on CUDA: as near the exact gradient as rows are, one compilation for all trees."""

import numpy as np
import pytest
import torch
from torch import Tensor

from m2forge.kernels.head_loss import linear_cross_entropy
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.plan import AttentionPlan, Documents, Trees
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.tree.flat import FlatTree, flatten
from tests.model.draw_tree import branching_tree, watched

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CONFIG = preset("m2-tiny").model_copy(update={"hidden_size": 256, "num_mtp": 0})
WITH_MODULES = CONFIG.model_copy(update={"num_mtp": 2})


def branching(seed: int, num_episodes: int = 4, num_turns: int = 4) -> FlatTree:
    return flatten(branching_tree(CONFIG.vocab_size, seed, num_episodes, num_turns))


def backward(model: Transformer, tokens_N: Tensor, plan: AttentionPlan, *edges: Tensor) -> None:
    position_M, target_M, weight_M = (x.cuda() for x in edges)
    output = model(tokens_N.cuda(), plan)
    losses = [
        linear_cross_entropy(
            hidden_ND, model.head_weight, target_M, position_M=position_M, weight_M=weight_M, float32_head=True
        )[0]
        for hidden_ND in (output.hidden_ND, *output.mtp_hidden_ND)
    ]
    torch.stack(losses).sum().backward()


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


def gradient(model: Transformer, of: str = "") -> Tensor:
    """Return the gradients of the parameters whose names begin with `of`, in one row."""
    found = [p.grad for name, p in model.named_parameters() if name.startswith(of) and p.grad is not None]
    return torch.cat([grad.double().flatten() for grad in found])


def gradient_errors(config: ModelConfig, of: str = "") -> tuple[list[float], list[float]]:
    """Relative errors of the bfloat16 gradient over rows and over the tree, of six trees."""
    errors: tuple[list[float], list[float]] = ([], [])
    for seed in range(6):
        flat = branching(seed)
        weight_S = torch.randn(flat.sample_S.size, generator=torch.Generator().manual_seed(seed))
        # The float32 reference starts from the rounded weights.
        rounded = build(config, "cuda", torch.bfloat16, seed=seed)
        exact = build(config, "cuda", torch.float32)
        exact.load_state_dict(rounded.state_dict())
        over_rows(exact, flat, weight_S)
        expected = gradient(exact, of)
        for found, run in zip(errors, (over_rows, over_tree), strict=True):
            model = build(config, "cuda", torch.bfloat16, seed=seed)
            run(model, flat, weight_S)
            found.append(float((gradient(model, of) - expected).norm() / expected.norm()))
    print("relative error of the gradient over rows and over the tree", errors)
    return errors


def test_bfloat16_trees_are_as_exact_as_bfloat16_rows() -> None:
    rows, tree = gradient_errors(CONFIG)
    # The same in the mean; single draws differ by what expert a token near a tie goes to.
    assert np.mean(tree) <= np.mean(rows)


def test_bfloat16_mtp_modules_over_trees_are_exact_as_over_rows() -> None:
    rows, tree = gradient_errors(WITH_MODULES, of="mtp.")
    # The same in the mean, save for a tenth: a module that took another token's state would be off by its whole size.
    assert np.mean(tree) <= 1.1 * np.mean(rows)
    assert np.mean(tree) < 0.1


def test_float32_states_over_a_tree_equal_those_of_its_paths() -> None:
    assert CONFIG.moe is not None
    # Few experts, few tokens and large weights: choices lie apart, and rounding turns none of them.
    moe = CONFIG.moe.model_copy(update={"num_experts": 16, "top_k": 4})
    config = WITH_MODULES.model_copy(update={"moe": moe, "init_std": 0.06})
    flat = branching(0, num_episodes=2, num_turns=2)
    tokens_N = torch.tensor(flat.tokens_N).long()
    paths = [torch.tensor(flat.path(sample)).long() for sample in range(flat.sample_S.size)]
    for seed in range(8):
        exact = build(config, dtype=torch.float64, seed=seed)
        with torch.no_grad(), watched(exact) as watch:
            expected = [exact(tokens_N[path][None]) for path in paths]
        if watch.margin > 1e-6:
            break
    assert watch.margin > 1e-6
    model = build(config, "cuda", torch.float32)
    model.load_state_dict(exact.state_dict())
    with torch.no_grad():
        output = model(tokens_N.cuda(), Trees(flat, "cuda"))
    for path, row in zip(paths, expected, strict=True):
        states = zip((output.hidden_ND, *output.mtp_hidden_ND), (row.hidden_ND, *row.mtp_hidden_ND), strict=True)
        for state_ND, row_ND in states:
            # States are of size 1 behind their norm; float32 sums of up to 256 terms through six blocks.
            torch.testing.assert_close(state_ND[path.cuda()].double().cpu(), row_ND, rtol=0, atol=1e-4)


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
