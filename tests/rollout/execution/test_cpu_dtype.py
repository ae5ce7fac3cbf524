"""A CPU holds weights in float32 where it decodes faster so, and says it."""

import logging
from pathlib import Path

import pytest
import torch

from m2forge.model.build import build
from m2forge.model.checkpoint import save_model
from m2forge.rollout.config import ServeConfig
from m2forge.rollout.execution import cpu_dtype as held_dtype
from m2forge.rollout.execution.cpu_dtype import decode_s, fastest_dtype, probe_config
from m2forge.rollout.server.model_server import make_core
from tests.model.draw import SMALL


def decoding_takes(monkeypatch: pytest.MonkeyPatch, stored_s: float, float_s: float) -> None:
    times_s = {torch.bfloat16: stored_s, torch.float32: float_s}
    monkeypatch.setattr(held_dtype, "decode_s", lambda config, dtype: times_s[dtype])


def test_faster_type_is_held_and_a_change_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(SMALL, dtype=torch.bfloat16)
    decoding_takes(monkeypatch, stored_s=1.0, float_s=2.0)
    assert fastest_dtype(model) == torch.bfloat16
    assert not caplog.records
    decoding_takes(monkeypatch, stored_s=3.0, float_s=2.0)
    with caplog.at_level(logging.WARNING):
        assert fastest_dtype(model) == torch.float32
    assert "1.5 times as fast in float32 as in bfloat16" in caplog.text


def test_float32_is_held_without_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(held_dtype, "decode_s")
    assert fastest_dtype(build(SMALL)) == torch.float32


def test_probe_decodes_in_both_types() -> None:
    assert decode_s(probe_config(SMALL), torch.bfloat16) > 0
    assert decode_s(probe_config(SMALL), torch.float32) > 0


def test_weights_that_would_not_fit_as_float32_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(SMALL, dtype=torch.bfloat16)
    num_bytes = 4 * sum(weight.numel() for weight in model.parameters())
    decoding_takes(monkeypatch, stored_s=3.0, float_s=2.0)
    for available, expected in ((2 * num_bytes - 2, torch.bfloat16), (2 * num_bytes, torch.float32)):
        monkeypatch.setattr(held_dtype, "available_bytes", lambda available=available: available)
        assert fastest_dtype(model) == expected


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("stored", torch.bfloat16)])
def test_a_server_holds_the_faster_type_unless_it_is_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, expected: torch.dtype
) -> None:
    save_model(build(SMALL, dtype=torch.bfloat16), tmp_path / "model")
    decoding_takes(monkeypatch, stored_s=3.0, float_s=2.0)
    config = ServeConfig.model_validate({"device": "cpu", "dtype": dtype})
    assert make_core(tmp_path / "model", config).model.embedding.weight.dtype == expected
