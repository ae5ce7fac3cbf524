"""The run decides how its agents sample; a batch that nothing can be learnt from ends it with the reason."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from m2forge.config import load, write_resolved
from m2forge.errors import ConfigError, EngineError, TrainingError
from m2forge.model.checkpoint import load_model
from m2forge.model.config_file import read_config
from m2forge.model.plan import CausalRows
from m2forge.observe.metrics import read_metrics
from m2forge.pool.pool import Pool
from m2forge.pool.record import Append
from m2forge.pool.stored import Outcome, read_units
from m2forge.records import RequestedSampling, Reward, Sampling
from m2forge.rl.child import Child
from m2forge.rl.child_main import MODULE
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.rl.loop import run_rl
from m2forge.rl.trainer import Trainer
from m2forge.tasks.catalog import find_family
from m2forge.tasks.task_set import TaskSet
from m2forge.train.run_dir import CONFIG_FILE
from m2forge.tree.token_tree import TokenTree
from tests.model.stand_in_hub import FIRST_COMMIT, ID, StandInHub, hub_at, serving
from tests.rl.ring import AGENT, ROOT
from tests.rl.scene import make_call, make_config, make_model
from tests.rl.test_loop import make_run

CONTEXT = 590
"""The domain's context limit: some prompts leave less room than their completions need."""
GREEDY = Path(__file__).parent / "greedy_agent.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scene"))


def read_trees(run_dir: Path, model: Path) -> list[TokenTree]:
    config = make_config(model)
    pool = Pool(Layout(run_dir).pool(config.pool), read_config(model).vocab_size)
    with pool, pool.database.read() as connection:
        units = read_units(connection, range(1, 100), pool.vocab_size)
        return [episode.tree() for unit in units for episode in unit.episodes]


@pytest.fixture(scope="module")
def run_dir(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step from a hub id, whose agent asks for greedy samples, in a short context, with its routing
    recorded."""
    config, folder = make_run(Path(ID), num_steps=1), tmp_path_factory.mktemp("runs")
    hub = StandInHub()
    hub.publish(model)
    stage = config.curriculum.stages[0]
    domains = {name: each.model_copy(update={"context": CONTEXT}) for name, each in stage.domains.items()}
    stages = (stage.model_copy(update={"domains": domains}),)
    changes = {
        "agent": config.agent.model_copy(update={"command": (sys.executable, str(GREEDY), str(AGENT))}),
        "eval": config.eval.model_copy(update={"num_tasks": 0}),
        "curriculum": config.curriculum.model_copy(update={"stages": stages}),
        "policy": config.policy.model_copy(update={"replay": "recorded"}),
    }
    with pytest.MonkeyPatch.context() as patch, serving(hub) as url, hub_at(url, folder / "home"):
        patch.setenv("PYTHONPATH", str(ROOT))
        run_rl(config.model_copy(update=changes), folder)
    assert len(hub.fetched) == len({*hub.fetched}), "the loop fetches, its processes read the cache"
    return folder / "run"


def test_a_run_from_a_hub_id_writes_its_commit(run_dir: Path) -> None:
    config = load(RLConfig, run_dir / "config.toml")
    assert (config.model, config.revision) == (ID, FIRST_COMMIT)
    assert (run_dir / "model" / "tokenizer.json").is_file()


def test_an_agent_that_asks_for_greedy_samples_is_trained(model: Path, run_dir: Path) -> None:
    (step,) = read_metrics(run_dir / "metrics.jsonl")
    assert step.values["num_edges"] > 0
    samples = [sample for tree in read_trees(run_dir, model) for sample in tree.samples]
    assert samples
    assert all(sample.sampling == Sampling() for sample in samples)
    assert all(sample.requested == RequestedSampling(Sampling(0.0, 0.5), 7) for sample in samples)


def test_completions_end_where_the_context_of_their_domain_does(model: Path, run_dir: Path) -> None:
    samples = [sample for tree in read_trees(run_dir, model) for sample in tree.samples]
    assert max(sample.num_tokens for sample in samples) == CONTEXT


def test_recorded_experts_are_the_engines_and_are_replayed(model: Path, run_dir: Path) -> None:
    (step,) = read_metrics(run_dir / "metrics.jsonl")
    # The last token of a path is not run, nor what only a request for another group had computed.
    assert step.values["replayed_share"] > 0.5
    network = load_model(model, dtype=torch.float32)
    num_equal = num_known = 0
    for tree in read_trees(run_dir, model):
        for index in range(len(tree.samples)):
            routing = tree.routing(index)
            assert routing is not None
            path = torch.tensor(tree.path(index), dtype=torch.int64)
            with torch.no_grad():
                own = network(
                    path, CausalRows(1, path.numel(), path.device), with_mtp=False, returns_experts=True
                ).experts_NLK
            is_known = routing[:, 0, 0] >= 0
            assert not is_known[-1]
            num_known += int(is_known.sum())
            same = np.sort(routing, -1) == np.sort(own.numpy(), -1)
            num_equal += int((same.all((1, 2)) & is_known).sum())
    # Paths are run in other batches here, and sums round differently: a near tie may fall the other way.
    assert num_equal > 0.99 * num_known > 0


@pytest.mark.parametrize(
    ("agent", "policy", "message"),
    [
        (
            {"temperature": 0},
            {},
            "agent.sampling: nothing sampled this way can be trained: temperature: expected a num",
        ),
        ({"temperature": 500.0}, {}, "temperature: expected 0.01 to 100"),
        ({"top_p": 0.9}, {}, 'policy.truncated_sampling = "allow"'),
        ({"frequency_penalty": 0.5}, {}, "expected none cut off"),
        ({"top_p": 0.9}, {"truncated_sampling": "allow"}, None),
        ({"temperature": 0}, {"loss": "sft"}, None),
        ({"temperature": 0.7}, {}, None),
        ({"top_p": 2.0}, {}, "top_p: expected a number above 0, at most 1"),
    ],
)
def test_sampling_that_cannot_be_trained_is_refused_at_the_door(
    tmp_path: Path, agent: dict[str, object], policy: dict[str, object], message: str | None
) -> None:
    fields = {"agent": {"command": ["true"], "sampling": agent}, "policy": policy}
    if message is None:
        assert make_config(tmp_path, **fields).agent.sampling.record() == Sampling(**agent)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path, **fields)


def fill_untrainable(pool: Pool) -> None:
    """Two groups of two: greedy calls, calls cut off by top-p, and an attempt that called nothing."""
    tasks, rng = TaskSet(find_family("chain"), "train", 0), np.random.default_rng(0)
    pool.put([(tasks.next(1, 3), 2) for _ in range(2)], stage="only")
    samplings: tuple[list[Sampling], ...] = ([Sampling(0.0)] * 2, [Sampling(0.0)], [Sampling(top_p=0.5)], [])
    for place, (lease, given) in enumerate(zip(pool.lease("test", 4), samplings, strict=True)):
        writer = lease.writer(pool.vocab_size)
        for sampling in given:
            call = replace(make_call(rng, pool.vocab_size), sampling=sampling)
            pool.append([Append(lease, writer.write(call))])
        reward = Reward(process=0.0, speed=0.0, perf=place % 2, total=place % 2)
        pool.finish(lease, Outcome(reward=reward, step_rewards=(0.0,) * len(given)))


def test_a_batch_without_trainable_samples_is_an_error(model: Path, tmp_path: Path) -> None:
    config = make_config(model)
    with Pool(Layout(tmp_path).pool(config.pool), read_config(model).vocab_size) as pool:
        fill_untrainable(pool)
        with pytest.raises(TrainingError, match="step 1: nothing in the batch of 4 episodes") as refused:
            Trainer(tmp_path, config).run()
        assert "3 × sampling: temperature: expected a number above 0" in str(refused.value)
        assert "1 × sampling: expected none cut off" in str(refused.value)
        assert "1 of 4 episodes recorded no completion call" in str(refused.value)
        newest = Layout(tmp_path).weight_store(config).newest()
        assert newest is not None
        assert newest[0].step == 0
        # What was refused is not spent: with another policy it is trained.
        allowed = config.policy.model_copy(update={"truncated_sampling": "allow"})
        again = Trainer(tmp_path, config.model_copy(update={"policy": allowed}))
        again._discard_later(pool)
        assert again._learn(pool, next(again._batches(pool)))["num_edges"] > 0


def test_a_trainer_that_can_train_nothing_ends_the_run_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = make_config(model)
    with Pool(Layout(tmp_path).pool(config.pool), read_config(model).vocab_size) as pool:
        fill_untrainable(pool)
    write_resolved(config, tmp_path / CONFIG_FILE)
    child = Child("trainer", (MODULE, "trainer", str(tmp_path)), tmp_path / "log")
    with pytest.raises(EngineError, match="the trainer process: step 1: nothing in the batch of 4 episodes"):
        asyncio.run(child.supervise())
    assert child.num_starts == 1
