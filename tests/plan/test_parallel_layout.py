"""Layouts: what they exchange is what two ranks really exchange; what fits comes first."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2forge.errors import NotFoundError
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.preset import preset
from m2forge.plan.gpu import find_gpu
from m2forge.plan.parallel_layout import ParallelLayout, Workload, link_bytes, list_layouts, make_plans, rank_step
from m2forge.plan.report import render, to_json
from m2forge.plan.work import step_work
from m2forge.train.activation import MicroBatch
from m2forge.train.config import MeshConfig, OptimizerConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.parallel import ProcessRanks, context_group, shard_model
from tests.model.draw import SMALL
from tests.train.draw import draw_pack
from tests.train.processes import run_ranks
from tests.train.received import Received

assert SMALL.moe is not None
MOE = SMALL.moe.model_copy(update={"num_experts": 4, "top_k": 3})
"""Each token chooses three of four experts, so that both ranks hold some of them."""
NETWORK = SMALL.model_copy(update={"vocab_size": 32, "num_layers": 2, "num_mtp": 1, "moe": MOE})
NUM_PACKS = 2
LEAST_BYTES = 512


MESHES = {
    "shard": (MeshConfig(shard=2), ParallelLayout(1, 2, 1, 1, "none")),
    "replicate": (MeshConfig(replicate=2), ParallelLayout(2, 1, 1, 1, "none")),
    "context": (MeshConfig(context=2), ParallelLayout(1, 1, 2, 1, "none")),
    "expert": (MeshConfig(shard=2, expert=2), ParallelLayout(1, 2, 1, 2, "none")),
    "queries divided": (MeshConfig(context=2), ParallelLayout(1, 1, 2, 1, "none")),
    "context, recomputed": (MeshConfig(context=2), ParallelLayout(1, 1, 2, 1, "block")),
}
MESHES_OF_FOUR = {
    "replicated shards": (MeshConfig(replicate=2, shard=2), ParallelLayout(2, 2, 1, 1, "none")),
    "heads and queries divided": (MeshConfig(context=4), ParallelLayout(1, 1, 4, 1, "none")),
}
HEADS = {"queries divided": (9, 3), "heads and queries divided": (6, 2)}
"""(Query heads, key/value heads) of other networks than NETWORK."""


def network_of(name: str) -> ModelConfig:
    attention = NETWORK.attention
    num_heads, num_kv_heads = HEADS.get(name, (attention.num_heads, attention.num_kv_heads))
    changes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return NETWORK.model_copy(update={"attention": attention.model_copy(update=changes)})


def receive(ranks: ProcessRanks) -> dict[str, float]:
    found = {}
    for name, (mesh, layout) in (MESHES if ranks.num_ranks == 2 else MESHES_OF_FOUR).items():
        model = build(network_of(name), seed=0)
        model.recompute = "block" if layout.recompute == "block" else "none"
        if mesh.is_sharded:
            shard_model(model, mesh, ranks)
        engine = TrainEngine(model, OptimizerConfig(), ranks=ranks, context=context_group(mesh, ranks, model.config))
        packs = [draw_pack(seed, [18, 14]) for seed in range(NUM_PACKS)]
        with Received(least=LEAST_BYTES) as received:
            engine.step_rows(packs, lr=1e-3, mtp_weight=0.1)
        found[name] = received.num_bytes
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_received_bytes_are_the_plans(num_ranks: int, tmp_path: Path) -> None:
    found: Any = run_ranks(receive, tmp_path, num_ranks)[0]
    for name, (_, layout) in (MESHES if num_ranks == 2 else MESHES_OF_FOUR).items():
        workload = Workload(
            name, network_of(name), MicroBatch(32, 18, 32, NETWORK.num_mtp), NUM_PACKS * layout.num_gpus
        )
        step = replace(rank_step(workload, layout), num_batches=NUM_PACKS, item_bytes=4, device="cpu")
        assert found[name] == sum(link_bytes(step, layout).values())


@settings(max_examples=20)
@given(st.sampled_from((1, 2, 6, 8, 64)), st.sampled_from(("m2-mini", "m2-tiny")))
def test_every_layout_uses_all_gpus(num_gpus: int, name: str) -> None:
    network = preset(name)
    found = list(list_layouts(network, num_gpus))
    assert len(set(found)) == len(found)
    for layout in found:
        axes = {"replicate": layout.replicate, "shard": layout.shard, "context": layout.context}
        assert math.prod(axes.values()) == num_gpus == layout.num_gpus
        mesh = MeshConfig.model_validate(axes | {"expert": layout.expert}).of_ranks(num_gpus)
        mesh.refuse_misfit(network)


def test_context_need_not_divide_the_heads() -> None:
    network = network_of("queries divided")
    assert {layout.context for layout in list_layouts(network, 8)} == {1, 2, 4, 8}
    step = rank_step(Workload("", network, MicroBatch(64, 64, 64)), ParallelLayout(1, 1, 2, 1, "none"))
    assert step_work(step).is_flex
    assert not step_work(replace(step, context=3)).is_flex


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
    assert to_json(workload, plans, gpu, [])["plans"][0]["fits"] is True


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
    assert rank_step(workload, ParallelLayout(4, 1, 1, 1, "none")).num_batches == 2


def test_an_unknown_gpu_is_named() -> None:
    with pytest.raises(NotFoundError, match="H200"):
        find_gpu("H20")
