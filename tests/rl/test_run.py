"""One run of one step, looked at from several sides: it starts from a hub id, in a cell of a notebook; its agent asks
for greedy samples, in a short context; its routing is recorded; two ranks train it and broadcast its versions to two
samplers.
(test_restart.py runs whole, with evaluations.)
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from m2forge.config import load
from m2forge.model.checkpoint import load_model
from m2forge.model.config_file import read_config
from m2forge.model.delta import is_delta_folder
from m2forge.model.plan import CausalRows
from m2forge.observe.metrics import read_metrics
from m2forge.pool.pool import Pool
from m2forge.pool.stored import read_units
from m2forge.records import RequestedSampling, Sampling
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import EvalResult
from m2forge.rl.layout import Layout
from m2forge.rl.loop import train_rl
from m2forge.rl.ranks import log_path
from m2forge.train.config import MeshConfig
from m2forge.tree.token_tree import TokenTree
from tests.model.stand_in_hub import FIRST_COMMIT, ID, StandInHub, hub_at, serving
from tests.rl.ring import AGENT, ROOT
from tests.rl.scene import make_model
from tests.rl.test_loop import make_run

CONTEXT = 590
"""The domain's context limit: some prompts leave less room than their completions need."""
GREEDY = Path(__file__).parent / "greedy_agent.py"


@dataclass(frozen=True)
class Ended:
    run_dir: Path
    config: RLConfig
    model: Path
    """The folder that the hub serves."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    model, folder = make_model(tmp_path_factory.mktemp("scene")), tmp_path_factory.mktemp("runs")
    hub, config = StandInHub(), make_run(Path(ID), num_steps=1)
    hub.publish(model)
    stage = config.curriculum.stages[0]
    domains = {name: each.model_copy(update={"context": CONTEXT}) for name, each in stage.domains.items()}
    stages = (stage.model_copy(update={"domains": domains}),)
    changes = {
        "eval": config.eval.model_copy(update={"num_tasks": 0}),
        "agent": config.agent.model_copy(update={"command": (sys.executable, str(GREEDY), str(AGENT))}),
        "curriculum": config.curriculum.model_copy(update={"stages": stages}),
        "policy": config.policy.model_copy(update={"replay": "recorded"}),
        "weights": config.weights.model_copy(update={"sync": "collective"}),
        "cluster": config.cluster.model_copy(update={"samplers": 2}),
        "train": config.train.model_copy(
            update={"machine": config.train.machine.model_copy(update={"mesh": MeshConfig(context=2)})}
        ),
    }
    config = config.model_copy(update=changes)

    async def cell() -> tuple[Path, list[EvalResult]]:
        return train_rl(config.model_copy(update={"num_steps": 9}), runs=folder, num_steps=1)

    with pytest.MonkeyPatch.context() as patch, serving(hub) as url, hub_at(url, folder / "home"):
        patch.setenv("PYTHONPATH", str(ROOT))
        # As in a notebook, where an event loop runs already.
        ended = asyncio.run(cell())
        assert ended == (folder / "run" / "model", [])
    assert len(hub.fetched) == len({*hub.fetched}), "the loop fetches, its processes read the cache"
    return Ended(folder / "run", config, model)


def read_trees(ended: Ended) -> list[TokenTree]:
    pool = Pool(Layout(ended.run_dir).pool(ended.config.pool), read_config(ended.model).vocab_size)
    with pool, pool.database.read() as connection:
        units = read_units(connection, range(1, 100), pool.vocab_size)
        return [episode.tree() for unit in units for episode in unit.episodes]


def test_a_run_from_a_hub_id_writes_its_commit(ended: Ended) -> None:
    config = load(RLConfig, ended.run_dir / "config.toml")
    assert (config.model, config.revision) == (ID, FIRST_COMMIT)
    assert (ended.run_dir / "model" / "tokenizer.json").is_file()


def test_the_loop_starts_the_ranks_of_the_mesh(ended: Ended) -> None:
    assert load(RLConfig, ended.run_dir / "config.toml").train.machine.mesh.context == 2
    assert log_path(Layout(ended.run_dir).log, 1).is_file()
    assert not log_path(Layout(ended.run_dir).log, 2).exists()


def test_a_version_may_hold_what_changed_alone(ended: Ended) -> None:
    newest = Layout(ended.run_dir).weight_store(ended.config).newest()
    assert newest is not None
    assert is_delta_folder(newest[1])
    published, final = load_model(newest[1]).state_dict(), load_model(ended.run_dir / "model").state_dict()
    assert all(torch.equal(published[name], final[name]) for name in final)


def test_the_ranks_broadcast_versions_to_both_samplers(ended: Ended) -> None:
    logs = [(Layout(ended.run_dir).log / "trainer.log"), log_path(Layout(ended.run_dir).log, 1)]
    assert all("broadcast version 1 to 2 samplers" in log.read_text() for log in logs)
    assert not Layout(ended.run_dir).broadcast.exists()


def test_the_trainer_computes_the_logprobs_of_both_samplers(ended: Ended) -> None:
    (step,) = read_metrics(ended.run_dir / "metrics.jsonl")
    assert step.values["staleness"] == 0
    # float32, and products over other numbers of rows
    assert abs(step.values["ratio_max"] - 1) < 1e-4


def test_an_agent_that_asks_for_greedy_samples_is_trained(ended: Ended) -> None:
    assert all(step.values["num_edges"] > 0 for step in read_metrics(ended.run_dir / "metrics.jsonl"))
    samples = [sample for tree in read_trees(ended) for sample in tree.samples]
    assert samples
    assert all(sample.sampling == Sampling() for sample in samples)
    assert all(sample.requested == RequestedSampling(Sampling(0.0, 0.5), 7) for sample in samples)


def test_completions_end_where_the_context_of_their_domain_does(ended: Ended) -> None:
    samples = [sample for tree in read_trees(ended) for sample in tree.samples]
    assert max(sample.num_tokens for sample in samples) == CONTEXT


def test_recorded_experts_are_the_engines_and_are_replayed(ended: Ended) -> None:
    assert all(step.values["replayed_share"] > 0 for step in read_metrics(ended.run_dir / "metrics.jsonl"))
    network = load_model(ended.model, dtype=torch.float32)
    num_equal = num_known = 0
    for tree in read_trees(ended):
        for index in range(len(tree.samples)):
            routing = tree.routing(index)
            assert routing is not None
            path = torch.tensor(tree.path(index), dtype=torch.int64)
            with torch.no_grad():
                own = network(
                    path, CausalRows(1, path.numel(), path.device), with_mtp=False, returns_experts=True
                ).experts_NLK
            is_known = routing[:, 0, 0] >= 0
            # The last token of a path is not run. Of a prompt what only a request for another group had computed is
            # not known, and how much that is depends on when requests come.
            assert is_known[tree.samples[index].num_prompt : -1].all()
            assert not is_known[-1]
            num_known += int(is_known.sum())
            same = np.sort(routing, -1) == np.sort(own.numpy(), -1)
            num_equal += int((same.all((1, 2)) & is_known).sum())
    # Paths are run in other batches here, and sums round differently: a near tie may fall the other way.
    assert num_equal > 0.99 * num_known > 0
