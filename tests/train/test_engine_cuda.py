"""Steps of the engine on CUDA against the same steps on a CPU in float64: over trees and rows, modules and padding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.train.config import OptimizerConfig, PolicyConfig, WalkConfig
from m2forge.train.engine import PendingMetrics, TrainEngine
from tests.model.draw_tree import branching_tree
from tests.train.draw import draw_pack
from tests.train.naive import watch_gradients, watch_margin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DEVICE = "cuda"
OPTIMIZER = OptimizerConfig(max_norm=1e9, eps=1e-2)
"""An eps above rounding, so that a gradient of nothing but rounding makes no step."""
POLICY = PolicyConfig(mtp_weight=0.4, mtp_gradient="all", pack_tokens=640, bucket_tokens=256)
"""Several packs a step, padded on CUDA."""
SAFE_MARGIN = 1e-6
"""Float32 scores of experts are nearer than this to the exact ones: no choice may hang on less."""


@pytest.fixture(autouse=True)
def _compiles_afresh() -> None:
    """Torch stops compiling a function after eight kinds of calls in a process; a run makes fewer."""
    torch._dynamo.reset()


def tiny() -> ModelConfig:
    config = preset("m2-tiny")
    assert config.moe is not None
    # Few experts and large weights: choices lie apart, and rounding turns none of them.
    moe = config.moe.model_copy(update={"aux_loss_weight": 0.5, "num_experts": 16, "top_k": 4})
    return config.model_copy(update={"hidden_size": 256, "num_mtp": 2, "moe": moe, "init_std": 0.06})


def over_trees(engine: TrainEngine) -> PendingMetrics:
    trees = [branching_tree(engine.model.config.vocab_size, seed, 2, 2) for seed in (0, 1)]
    return engine.step(trees, lr=1e-2, version=1)


def over_rows(engine: TrainEngine) -> PendingMetrics:
    packs = [draw_pack(0, [100, 7, 300]), draw_pack(1, [128, 128])]
    return engine.step_rows(packs, lr=1e-2, pack_tokens=512, mtp_weight=0.4)


class Stepped:
    """An engine after one step."""

    def __init__(
        self, model: Transformer, run: Callable[[TrainEngine], PendingMetrics], walk: WalkConfig | None = None
    ) -> None:
        self.model, self.margin = model, watch_margin(model)
        engine = TrainEngine(model, OPTIMIZER, policy=POLICY, router_bias="balanced", walk=walk)
        self.gradients = watch_gradients(engine)
        self.figures = run(engine).read()
        self.state = {name: value.double().cpu() for name, value in model.state_dict().items()}


def exact_step(start: Transformer, run: Callable[[TrainEngine], PendingMetrics]) -> Stepped:
    """From the same weights, on a CPU in float64."""
    model = build(start.config, dtype=torch.float64)
    model.load_state_dict(start.state_dict())
    return Stepped(model, run)


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double().cpu() - expected).norm() / expected.norm())


WALKS = [None, WalkConfig(segment_tokens=100), WalkConfig(segment_tokens=128, recompute="block", stack="host")]


@pytest.mark.parametrize("walk", WALKS, ids=["whole", "walk", "walk on the host"])
@pytest.mark.parametrize("run", [over_trees, over_rows])
def test_a_float32_step_on_cuda_is_the_float64_step_on_a_cpu(
    run: Callable[[TrainEngine], PendingMetrics], walk: WalkConfig | None
) -> None:
    for seed in range(8):
        start = build(tiny(), DEVICE, torch.float32, seed=seed)
        exact = exact_step(start, run)
        if exact.margin() > SAFE_MARGIN:
            break
    assert exact.margin() > SAFE_MARGIN
    start.recompute = "none" if walk is None else walk.recompute
    ours = Stepped(start, run, walk)
    assert ours.gradients.keys() == exact.gradients.keys()
    errors = {name: relative_error(ours.gradients[name], expected) for name, expected in exact.gradients.items()}
    # Float32 rounds to 6e-8; sums over a thousand tokens, six blocks forward and back.
    assert max(errors.values()) < 1e-4, max(errors.items(), key=lambda item: item[1])
    # Loads are integers over integers; only the mean over layers adds up in another order.
    balance = [name for name in exact.figures if name.startswith(("max_vio", "expert_load"))]
    assert len(balance) == 1 + 3 * 6
    assert [ours.figures[name] for name in balance] == pytest.approx(
        [exact.figures[name] for name in balance], rel=1e-12
    )
    assert ours.figures == pytest.approx(exact.figures, rel=1e-4, abs=1e-5)
    # A step at 1e-2 with eps 1e-2 hands an error of the gradient on at no more than its own size.
    for name, expected in exact.state.items():
        torch.testing.assert_close(ours.state[name], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("walk", WALKS, ids=["whole", "walk", "walk on the host"])
@pytest.mark.parametrize("run", [over_trees, over_rows])
def test_a_bfloat16_step_on_cuda_is_near_the_float64_step(
    run: Callable[[TrainEngine], PendingMetrics], walk: WalkConfig | None
) -> None:
    start = build(tiny(), DEVICE, torch.bfloat16, seed=0)
    exact = exact_step(start, run)
    start.recompute = "none" if walk is None else walk.recompute
    ours = Stepped(start, run, walk)
    whole = [torch.cat([x.double().cpu().flatten() for x in s.gradients.values()]) for s in (ours, exact)]
    # bfloat16 rounds to 4e-3, and tokens near a tie go to other experts: 1% is usual, a wrong mask or module is 100%.
    assert relative_error(*whole) < 0.05
    assert ours.figures["loss"] == pytest.approx(exact.figures["loss"], rel=0.02, abs=0.02)
    assert ours.figures["mtp_loss/2"] == pytest.approx(exact.figures["mtp_loss/2"], rel=0.05)
