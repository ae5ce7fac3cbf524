"""The run decides how its agents sample; a batch that nothing can be learnt from ends it with the reason."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from m2forge.cluster.launcher import Role
from m2forge.cluster.local import LocalLauncher
from m2forge.config import write_resolved
from m2forge.errors import ConfigError, EngineError, TrainingError
from m2forge.model.config_file import read_config
from m2forge.pool.pool import Pool
from m2forge.pool.record import Append
from m2forge.pool.stored import Outcome
from m2forge.records import Reward, Sampling
from m2forge.rl.child_main import MODULE
from m2forge.rl.layout import Layout
from m2forge.rl.trainer import Trainer
from m2forge.tasks.catalog import find_family
from m2forge.tasks.task_set import TaskSet
from m2forge.train.run_dir import CONFIG_FILE
from tests.rl.ring import ROOT
from tests.rl.scene import make_call, make_config, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scene"))


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
        again._end_publishing()


def test_a_trainer_that_can_train_nothing_ends_the_run_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = make_config(model)
    with Pool(Layout(tmp_path).pool(config.pool), read_config(model).vocab_size) as pool:
        fill_untrainable(pool)
    write_resolved(config, tmp_path / CONFIG_FILE)
    role = Role("trainer", (MODULE, "trainer", str(tmp_path)))
    child = asyncio.run(LocalLauncher(tmp_path / "log").launch(role))
    with pytest.raises(EngineError, match="the trainer process: step 1: nothing in the batch of 4 episodes"):
        asyncio.run(child.supervise())
    assert child.num_starts == 1
