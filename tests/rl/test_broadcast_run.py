"""A run that broadcasts its versions, whose sampler is killed in the middle of one."""

from pathlib import Path

import pytest

from m2forge.rl.layout import Layout
from tests.rl.ring import command_of, started, wait_until_gone
from tests.rl.scene import make_model
from tests.rl.test_loop import make_run, trained_steps

TIMEOUT_S, NUM_STEPS = 1000.0, 10
"""Steps beyond those that the queue holds attempts for, so that the sampler must be back before the last."""


@pytest.mark.long
def test_a_sampler_killed_in_a_broadcast_is_restarted(tmp_path: Path) -> None:
    config = make_run(make_model(tmp_path / "scene"), NUM_STEPS)
    weights = config.weights.model_copy(update={"sync": "collective"})
    config = config.model_copy(update={"weights": weights, "eval": config.eval.model_copy(update={"num_tasks": 0})})
    run_dir, log = tmp_path / config.name, tmp_path / "loop.log"
    with started(command_of(config, tmp_path, "tests.rl.dying_sampler"), log) as loop:
        assert loop.wait(TIMEOUT_S) == 0, log.read_text()[-3000:]
    wait_until_gone(run_dir)
    assert (run_dir / "died").exists()
    said, sampled = (
        " ".join((Layout(run_dir).log / name).read_text().split()) for name in ("trainer.log", "sampler.log")
    )
    assert "the broadcast of version 1 failed" in said
    assert any(f"broadcast version {step} to 1 samplers" in said for step in range(2, NUM_STEPS + 1))
    per_step = config.curriculum.batch_groups * config.units_per_group
    assert trained_steps(config, run_dir) == [step for step in range(1, NUM_STEPS + 1) for _ in range(per_step)]
    assert f"policy version {config.name}, step {NUM_STEPS}" in sampled
