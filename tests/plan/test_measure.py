"""One rank's share: what a single process trains of a layout, and the rates that its seconds give."""

from dataclasses import replace

import pytest
import torch

from m2forge.errors import ConfigError
from m2forge.model.config import LoRAConfig
from m2forge.model.preset import preset
from m2forge.plan import measure
from m2forge.plan.gpu import find_gpu
from m2forge.plan.measure import calibrate, calibrating_steps, make_engine, measure_step, random_pack, rank_share
from m2forge.plan.parallel_layout import ParallelLayout, Workload, rank_step
from m2forge.plan.work import step_work
from m2forge.train.activation import MicroBatch
from m2forge.train.config import WalkConfig
from m2forge.train.memory import TrainingStep, rank_memory

TINY = preset("m2-tiny").with_layers(2)
LORA = LoRAConfig(rank=4, targets=("q_proj", r"experts\.\d+\.w2"))
CPU = torch.device("cpu")
H200 = find_gpu("H200").rates


def ranks_step(layout: ParallelLayout, lora: LoRAConfig | None = None, is_even: bool = True) -> TrainingStep:
    """A rank's step on packs of 96 tokens, one path each, four for each group of ranks that share packs."""
    batch = MicroBatch(96, 96, 96, num_mtp=0, trains_main=lora is None, is_even=is_even)
    packs = 4 * layout.num_gpus // layout.context
    walk = WalkConfig(segment_tokens=32)
    workload = Workload("tiny", TINY, batch, packs, lora=lora, walk=walk)
    return replace(rank_step(workload, layout), item_bytes=4, device="cpu", is_compiled=False)


def test_the_share_has_the_layouts_experts_and_tokens() -> None:
    share = rank_share(ranks_step(ParallelLayout(1, 4, 2, 4, "walk and block, stack on host"), LORA))
    moe = share.network.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k) == (16, 8)
    assert (share.shard, share.expert, share.context) == (1, 1, 1)
    # Two ranks share a pack, and each segment of its walk.
    assert (share.batch.num_tokens, share.batch.context) == (48, 48)
    assert share.walk == WalkConfig(segment_tokens=16, stack="host", recompute="block")
    assert (share.recompute, share.lora, share.num_batches) == ("block", LORA, 2)
    # The preset's module does not run.
    assert share.network.num_mtp == 0


def test_the_shares_engine_trains_the_adapters_of_its_experts() -> None:
    share = rank_share(ranks_step(ParallelLayout(1, 4, 2, 4, "walk"), LORA))
    engine = make_engine(share, CPU)
    trained = {name: weight for name, weight in engine.model.named_parameters() if weight.requires_grad}
    assert trained
    assert all("adapter" in name for name in trained)
    experts = {weight.shape[0] for name, weight in trained.items() if weight.dim() == 3}
    assert experts == {16}
    assert {weight.shape[-2] for name, weight in trained.items() if name.endswith(".a")} == {4}
    assert engine.walk == WalkConfig(segment_tokens=16)
    assert sum(random_pack(share, 0).lengths) == 48


@pytest.mark.parametrize(("recompute", "lora"), [("none", None), ("block", LORA), ("walk", LORA)])
def test_a_share_runs_on_one_process(recompute: str, lora: LoRAConfig | None) -> None:
    share = rank_share(ranks_step(ParallelLayout(1, 4, 2, 4, recompute), lora))
    assert measure_step(share, CPU, num_steps=1).seconds > 0


def test_a_whole_ranks_step_is_not_run() -> None:
    with pytest.raises(ConfigError, match="a step of 4 ranks cannot run on one"):
        make_engine(ranks_step(ParallelLayout(1, 4, 1, 1, "none")), CPU)


def test_a_rank_with_few_experts_chooses_among_them() -> None:
    moe = rank_share(ranks_step(ParallelLayout(1, 16, 1, 16, "none"))).network.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k) == (4, 4)


@pytest.mark.parametrize("is_even", [True, False])
def test_documents_are_of_one_length_where_the_workloads_are(is_even: bool) -> None:
    """Which attention serves them depends on it, and the prediction too."""
    for step in calibrating_steps(
        rank_share(ranks_step(ParallelLayout(1, 2, 2, 1, "none"), None, is_even)), 1e12, H200
    ):
        assert (len(set(random_pack(step, 0).lengths.tolist())) == 1) == is_even == step.batch.is_even


def test_calibrating_steps_fit_and_keep_the_shares_experts() -> None:
    share = rank_share(ranks_step(ParallelLayout(1, 4, 2, 4, "none"), LORA))
    whole, *others = calibrating_steps(share, 1e12, H200)
    assert whole == share
    assert len(others) >= 3
    moe = share.network.moe
    assert all(step.network.moe == moe and step.lora == LORA for step in others)
    # A network with less memory keeps all tokens and experts, and fewer layers.
    one_layer = rank_memory(replace(share, network=share.network.with_layers(1))).total
    smaller = calibrating_steps(share, (one_layer + 1) / 0.85, H200)[0]
    assert (smaller.network.num_layers, smaller.batch, smaller.network.moe) == (1, share.batch, moe)
    with pytest.raises(ConfigError, match="not one layer of a rank's share, 48 tokens"):
        calibrating_steps(share, one_layer / 2, H200)


def test_a_long_step_has_two_layers_or_one_of_each_kind() -> None:
    share = rank_share(ranks_step(ParallelLayout(1, 4, 2, 4, "none")))
    moe = share.network.moe
    assert moe is not None
    share = replace(share, network=share.network.with_layers(6))
    slow = replace(H200, dense=H200.dense / 1e9, expert=H200.expert / 1e9)
    assert calibrating_steps(share, 1e12, H200)[0] == share
    assert calibrating_steps(share, 1e12, slow)[0].network.num_layers == 2
    dense = moe.model_copy(update={"dense_layers": (0, 1, 2)})
    mixed = share.network.model_copy(update={"moe": dense, "intermediate_size": 64})
    assert calibrating_steps(replace(share, network=mixed), 1e12, slow)[0].network.num_layers == 4


def test_a_timed_step_logs_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "m2forge")
    measure_step(rank_share(ranks_step(ParallelLayout(1, 4, 2, 4, "none"))), CPU, num_steps=1)
    starts = ("weights drawn on cpu in", "warm-up 1 of 2: ", "warm-up 2 of 2: ", "timed: ")
    lines = [message.strip() for message in caplog.messages]
    assert [next((start for start in starts if line.startswith(start)), line) for line in lines] == [*starts]


def test_a_step_longer_than_it_need_be_is_timed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "m2forge")
    monkeypatch.setattr(measure, "ENOUGH_S", 0.0)
    measure_step(rank_share(ranks_step(ParallelLayout(1, 4, 2, 4, "none"))), CPU)
    assert caplog.messages[-1].endswith("the median of 1")


def test_a_share_that_runs_out_of_memory_is_one_error() -> None:
    def run_out(step: TrainingStep) -> float:
        raise torch.OutOfMemoryError

    with pytest.raises(
        ConfigError, match=r"step 1 of \d on a small GPU: 2 of 2 layers .* out of memory, with 1000.0 GB"
    ):
        calibrate(ranks_step(ParallelLayout(1, 4, 2, 4, "block")), H200, 1e12, run_out, "a small GPU")


def test_rates_are_fitted_to_the_timed_share() -> None:
    rank = ranks_step(ParallelLayout(1, 4, 2, 4, "block"))
    seen: list[TrainingStep] = []

    def time_step(step: TrainingStep) -> float:
        seen.append(step)
        return 3 * step_work(step).seconds(H200)

    found = calibrate(rank, H200, 1e12, time_step, "a slow H200")
    assert seen[0] == rank_share(rank)
    assert [one.step for one in found.timed] == seen
    assert found.timed[0].seconds == pytest.approx(3 * found.timed[0].before_s)
    # The fit's pull towards the rates before keeps it from being exact.
    assert found.timed[0].fitted_s == pytest.approx(found.timed[0].seconds, rel=0.02)
    assert "one rank's share, timed by --measure on a slow H200" in found.rates.origin
