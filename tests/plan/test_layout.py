"""Layouts: what they exchange is what two ranks really exchange; what fits comes first."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from m2forge.errors import NotFoundError
from m2forge.model.build import build
from m2forge.model.preset import preset
from m2forge.plan.gpu import find_gpu
from m2forge.plan.layout import Layout, Workload, link_bytes, list_layouts, make_plans, rank_step
from m2forge.plan.report import render, to_json
from m2forge.train.activation import MicroBatch
from m2forge.train.config import MeshConfig, OptimizerConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.memory import TrainingStep
from m2forge.train.parallel import ProcessRanks, shard_model
from tests.model.draw import SMALL
from tests.train.draw import draw_pack
from tests.train.processes import run_ranks

NETWORK = SMALL.model_copy(update={"vocab_size": 32, "num_layers": 2, "num_mtp": 0})
NUM_PACKS = 2


class Exchanged:
    """Bytes of the collectives of a step; small ones, such as counts and norms, left out."""

    def __init__(self, least: int) -> None:
        self.num_bytes, self._least = 0, least

    def __enter__(self) -> "Exchanged":
        # Newer versions of torch have other names for the collectives of FSDP2.
        single = ("all_gather_single", "reduce_scatter_single")
        tensor = ("all_gather_into_tensor", "reduce_scatter_tensor")
        names = (*(single if hasattr(dist, single[0]) else tensor), "all_reduce")
        self._real = {name: getattr(dist, name) for name in names}
        for name, function in self._real.items():
            setattr(dist, name, self._counting(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(dist, name, function)

    def _counting(self, name: str, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            tensors = [*args, *options.values()]
            sent = max(tensor.nbytes for tensor in tensors if hasattr(tensor, "nbytes"))
            if sent >= self._least:
                self.num_bytes += sent
            return function(*args, **options)

        return run


def exchange(ranks: ProcessRanks) -> dict[str, int]:
    found = {}
    for name, mesh in (("shard", MeshConfig(shard=2)), ("replicate", MeshConfig(replicate=2))):
        model = build(NETWORK, seed=0)
        if mesh.is_sharded:
            shard_model(model, mesh, ranks)
        engine = TrainEngine(model, OptimizerConfig(), ranks=ranks)
        packs = [draw_pack(seed, [9, 6]) for seed in range(NUM_PACKS)]
        with Exchanged(least=4096) as counted:
            engine.step_rows(packs, lr=1e-3)
        found[name] = counted.num_bytes
    return found


def test_exchanged_bytes_are_those_of_two_ranks(tmp_path: Path) -> None:
    found: Any = run_ranks(exchange, tmp_path)[0]
    batch = MicroBatch(15, 9, 15)
    for name, layout in (("shard", Layout(1, 2, 1, "none")), ("replicate", Layout(2, 1, 1, "none"))):
        step = TrainingStep(
            NETWORK,
            OptimizerConfig(),
            batch,
            NUM_PACKS,
            item_bytes=4,
            device="cpu",
            is_compiled=False,
            shard=layout.shard,
        )
        assert found[name] == link_bytes(step, layout)[name]


@settings(max_examples=20)
@given(st.sampled_from((1, 2, 6, 8, 64)), st.sampled_from(("m2-mini", "m2-tiny")))
def test_every_layout_uses_all_gpus(num_gpus: int, name: str) -> None:
    network = preset(name)
    found = list(list_layouts(network, num_gpus))
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.replicate * layout.shard == num_gpus
        assert layout.shard % layout.expert == 0
        MeshConfig(replicate=layout.replicate, shard=layout.shard, expert=layout.expert).of_ranks(num_gpus)


def test_what_fits_comes_first_and_fastest() -> None:
    network = preset("m2-mini")
    batch = MicroBatch(32_768, 32_768, 32_768)
    workload, gpu = Workload("m2-mini", network, batch), find_gpu("H100")
    plans = make_plans(workload, gpu, 4, 2.0, 50e9)
    fits = [plan.fits for plan in plans]
    assert fits == sorted(fits, reverse=True)
    speeds = [plan.tokens_per_s for plan in plans if plan.fits]
    assert speeds == sorted(speeds, reverse=True)
    best = plans[0]
    assert best.dollars_per_million == pytest.approx(4 * 2.0 / 3600 / best.tokens_per_s * 1e6)
    assert best.step_s == pytest.approx(sum(best.parts.values()))
    text = render(workload, plans, gpu, 4, 2.0, 3)
    assert str(best.layout) in text
    assert to_json(workload, plans, gpu, None)["plans"][0]["fits"] is True


def test_too_large_a_network_is_refused_with_its_reason() -> None:
    network = preset("m2")
    workload = Workload("m2", network, MicroBatch(4096, 4096, 4096))
    gpu = find_gpu("A100")
    plans = make_plans(workload, gpu, 8, 1.0, 50e9)
    assert not any(plan.fits for plan in plans)
    assert "no layout fits on 8 × A100" in render(workload, plans, gpu, 8, 1.0, 3)
    assert "moments" in plans[0].reason


def test_a_pack_per_step_leaves_ranks_idle() -> None:
    network = preset("m2-tiny")
    workload = Workload("m2-tiny", network, MicroBatch(64, 64, 64), packs_per_step=6)
    assert rank_step(workload, Layout(4, 1, 1, "none")).num_batches == 2


def test_an_unknown_gpu_is_named() -> None:
    with pytest.raises(NotFoundError, match="H200"):
        find_gpu("H20")
