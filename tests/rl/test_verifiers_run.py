"""`m2forge rl` on an environment of the library verifiers, which drives its own rollouts through the gateway."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.rl.killed_run import run_with_kills, trained_artifacts
from tests.rl.scene import make_config, make_model
from tests.tasks.test_verifiers_family import ENVIRONMENT

LIMIT_S = 300.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None,
        reason="the library verifiers is not installed: pip install 'm2forge[verifiers]'",
    ),
]


def test_an_environments_rubric_rewards_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The scripted policy answers a prompt without tools by "Noted".
    (tmp_path / "tiny_env.py").write_text(ENVIRONMENT.replace('"north", "south", "east", "west"', '"Noted", "south"'))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    domain = {"ratio": 1.0, "context": 2048, "families": [{"source": "verifiers:tiny_env"}]}
    config = make_config(
        make_model(tmp_path / "scene"),
        num_steps=2,
        curriculum={"batch_groups": 2, "stages": [{"name": "only", "domains": {"agent": domain}}]},
        # The environment's own program takes the place of this one.
        agent={
            "kind": "command",
            "command": [sys.executable, "-c", "raise SystemExit('the agent was run')"],
            "timeout_s": 120.0,
            "max_concurrent": 2,
            "sandbox": {"inherits": ["PATH", "PYTHONPATH"], "timeout_s": 200.0, "max_memory_bytes": 1 << 40},
        },
        verify={"timeout_s": 10.0, "max_memory_bytes": 1 << 32},
        pool={"window": {"queue": 4, "no_signal": "train"}},
        eval={"num_tasks": 0},
    )
    run_with_kills(config, tmp_path, LIMIT_S)
    verdicts = [json.loads(each["verdict"]) for each in trained_artifacts(config, tmp_path / "run")]
    assert len(verdicts) == 8
    assert {verdict["perf"] for verdict in verdicts} == {0.0, 1.0}
    assert all(verdict["evidence"]["rewards"] == {"says_it": verdict["perf"]} for verdict in verdicts)
