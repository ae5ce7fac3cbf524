"""What benchmarks compare with: the peer at its best."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script model.py, whose folder is the first on the path as when it is run."""
    monkeypatch.syspath_prepend(FOLDER)
    import model

    return model


def test_bars_of_training_speed_use_the_best_peer_for_each(benchmark: Any) -> None:
    whole, by_layer = benchmark.Measured(0.231, 33.8, 10.5780), benchmark.Measured(0.182, 42.2, 10.5980)
    mine = benchmark.Measured(0.142, 17.3, 10.5780)
    speed, memory, loss = benchmark.mini_bars(mine, {"whole": whole, "by layer": by_layer})
    assert (speed.value, speed.met) == (pytest.approx(0.182 / 0.142), False)
    assert (memory.value, memory.met) == (pytest.approx(17.3 / 33.8), True)
    assert (loss.value, loss.met) == (pytest.approx(0.02), False)


def test_the_peer_runs_with_our_networks_attention_backends(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    seen: list[int] = []

    @contextmanager
    def backends(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    class Peer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
            seen.append(len(entered))
            return SimpleNamespace(loss=(input_ids * self.weight).sum())

    monkeypatch.setattr(benchmark, "fastest_attention", backends)
    benchmark.peer_step(Peer(), torch.ones(2, 4))()
    assert seen == [1]


def test_bars_are_printed_with_the_processor(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import report

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name = report.processor()
    assert any(sign.isalpha() for sign in name)
    report.finish([report.Bar.at_least("some bar", 2.0, 1.0)], as_json=True)
    table, told = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert name.split()[0] in table
    assert json.loads(told)["hardware"].startswith(name)
