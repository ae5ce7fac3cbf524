"""The engine on CUDA: fused kernels and graphs draw what the plain network on a CPU would, up to rounding."""

from collections import defaultdict

import numpy as np
import pytest
import torch

from m2forge.model.build import build
from m2forge.model.config import ModelConfig, RopeScaling, WindowConfig
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.protocols import Prompt
from m2forge.records import PolicyVersion, Sampling
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.rollout.execution.cuda_network import FusedNetwork, PrefillGraphs
from m2forge.rollout.execution.decode import Network
from m2forge.rollout.execution.model_runner import PlainNetwork
from m2forge.rollout.kv.paged_plan import Bundle, PagedCache, PagedPlan, Span, planned
from m2forge.rollout.speculation.adaptive_depth import FixedDepth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CONFIG = preset("m2-nano").model_copy(update={"num_mtp": 3})
EXTRAS = {
    "qkv_bias": True,
    "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_context=64),
    "window": WindowConfig(size=6, layers=(1,)),
}
"""Settings that other model families have and M2 lacks: biases, YaRN, a window."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def network(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    model = build(config, "cuda", dtype, seed=1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("qk_norm", ["flat", "head", "none"])
@torch.no_grad()
def test_the_fused_network_is_the_plain_one(qk_norm: str, dtype: torch.dtype) -> None:
    attention = CONFIG.attention.model_copy(update={"qk_norm": qk_norm, **(EXTRAS if qk_norm == "none" else {})})
    config = CONFIG.model_copy(update={"attention": attention})
    model, exact = network(config, dtype), build(config, "cuda", torch.float32)
    exact.load_state_dict(model.state_dict())
    caches = [PagedCache(config, 60, 8, torch.device("cuda"), kind, 3) for kind in (dtype, torch.float32)]
    networks: list[Network] = [FusedNetwork(model, caches[0]), PlainNetwork(exact)]
    # So many that those which a tie sends to another expert, with all behind them, are never most of them.
    torch.manual_seed(0)
    table_BS = torch.randperm(60, device="cuda")[:48].view(16, 3)
    for start, num_tokens in ((0, 9), (9, 1), (10, 4)):
        tokens = torch.randint(0, config.vocab_size, (16 * num_tokens,), device="cuda")
        position_BQ = start + torch.arange(num_tokens, device="cuda").repeat(16, 1)
        found = []
        for cache, each in zip(caches, networks, strict=True):
            plan = PagedPlan(cache, [Bundle(0, table_BS, position_BQ)])
            state_ND, hidden_ND, _ = each.main(tokens, plan)
            cache.write_states(0, plan, state_ND)
            plan = PagedPlan(cache, [Bundle(0, table_BS, position_BQ)], config.num_layers)
            found.append((hidden_ND, each.module(0, cache.parent_states(0, plan), tokens, plan)[1]))
        for ours, plain in zip(*found, strict=True):
            error_N = (ours.float() - plain).norm(dim=1) / plain.norm(dim=1)
            assert float(error_N.median()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@torch.no_grad()
def test_a_graph_prefills_what_the_network_does(dtype: torch.dtype) -> None:
    model, device = network(CONFIG, dtype), torch.device("cuda")
    caches = [PagedCache(CONFIG, 200, 8, device, dtype) for _ in range(2)]
    networks = [FusedNetwork(model, cache) for cache in caches]
    graphs = PrefillGraphs(networks[0], caches[0], CONFIG)
    rng, num_found = np.random.default_rng(0), 0
    for _ in range(12):
        blocks = rng.permutation(200).reshape(20, 10)
        sizes = np.sort(np.concatenate((np.ones(int(rng.integers(1, 14)), int), rng.integers(2, 60, 3))))
        spans = [Span(int(rng.integers(0, 20)), int(num), blocks[index]) for index, num in enumerate(sizes)]
        tokens = rng.integers(0, CONFIG.vocab_size, int(sizes.sum())).tolist()
        _, expected_ND, _ = networks[1].main(torch.tensor(tokens, device=device), planned(caches[1], spans))
        found = graphs.run(tokens, spans)
        if found is None:
            networks[0].main(torch.tensor(tokens, device=device), planned(caches[0], spans))
        else:
            num_found += 1
            error_N = (found[0].float() - expected_ND.float()).norm(dim=1) / expected_ND.float().norm(dim=1)
            assert float(error_N.median()) < TOLERANCE[dtype]
    assert num_found


def complete(core: Core, prompts: list[Prompt]) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    found: dict[tuple[int, int], tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    for place, prompt in enumerate(prompts):
        core.add(str(place), prompt)
    while not core.is_idle:
        for id, chunk in core.step():
            found[int(id), chunk.sample][0].extend(chunk.ids.tolist())
            found[int(id), chunk.sample][1].extend(chunk.raw_logprobs.tolist())
        core.audit()
    return dict(found)


@pytest.mark.parametrize("speculation", [0, 1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_graphs_draw_from_the_policy(temperature: float, speculation: int) -> None:
    model = network(CONFIG, torch.float32)
    config = RolloutConfig(block_tokens=8, num_blocks=256, max_running=12, step_tokens=64, speculation=speculation)
    core = Core(model, config, PolicyVersion("p", 0), depth=FixedDepth(speculation))
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(
            rng.integers(0, CONFIG.vocab_size, int(rng.integers(1, 60)), dtype=np.int32),
            max_tokens=int(rng.integers(1, 40)),
            sampling=Sampling(temperature),
            seed=7,
            num_samples=1 + place % 2,
        )
        for place in range(16)
    ]
    found = complete(core, prompts)
    assert core.metrics()["total_whole_steps"] > 10
    exact = build(CONFIG, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    for (place, _), (ids, raw_logprobs) in found.items():
        assert len(ids) == prompts[place].max_tokens
        row = torch.tensor([*prompts[place].ids.tolist(), *ids])
        with torch.no_grad():
            logits_LV = exact.logits(exact(row[None], with_mtp=False).hidden_ND)[prompts[place].ids.size - 1 : -1]
        drawn_L = logits_LV.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert np.allclose(drawn_L.numpy(), raw_logprobs, atol=1e-4)
        if temperature == 0:
            assert float((logits_LV.amax(-1) - logits_LV.gather(1, torch.tensor(ids)[:, None])[:, 0]).max()) < 1e-4
    # With a seed, what is drawn does not depend on speculation.
    plain = Core(network(CONFIG, torch.float32), config.model_copy(update={"speculation": 0}), PolicyVersion("p", 0))
    plain.model.load_state_dict(model.state_dict())
    same = [found[key][0] == ids for key, (ids, _) in complete(plain, prompts).items()]
    assert np.mean(same) > 0.8  # rounding may tip a draw


def test_weights_that_arrive_are_those_that_graphs_multiply_by() -> None:
    model, other = network(CONFIG, torch.float32), network(CONFIG, torch.float32)
    core = Core(model, RolloutConfig(num_blocks=64, max_running=4, step_tokens=64), PolicyVersion("p", 0))
    prompt = Prompt(np.arange(5, dtype=np.int32), 12, Sampling(0.0))
    complete(core, [prompt])
    core.load(other.state_dict(), PolicyVersion("p", 1))
    fresh = Core(other, RolloutConfig(num_blocks=64, max_running=4, step_tokens=64), PolicyVersion("p", 1))
    ((ids, logprobs),), ((expected_ids, expected),) = (complete(each, [prompt]).values() for each in (core, fresh))
    assert ids == expected_ids
    # A shape that is new to a core runs without a graph, whose products round differently.
    assert np.allclose(logprobs, expected, rtol=0, atol=1e-5)
