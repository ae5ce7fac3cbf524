"""A CPU holds weights in float32 where it decodes faster so, and says it."""

import logging

import pytest
import torch

from m2forge.model.build import build
from m2forge.rollout import held_dtype
from m2forge.rollout.held_dtype import decode_s, fastest_dtype
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
    assert decode_s(SMALL, torch.bfloat16) > 0
    assert decode_s(SMALL, torch.float32) > 0
