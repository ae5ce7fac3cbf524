"""The newest metrics of a run, against the curves that hold every row."""

import json
import random
from pathlib import Path

import pytest

from m2forge.page import latest as page_latest
from m2forge.page.latest import LatestMetrics
from m2forge.page.run_folder import Curves


def line(step: int, **values: float | str) -> str:
    return json.dumps({"step": step, "time_s": 100.0 + step, **values}) + "\n"


def test_the_last_step_is_that_of_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random appends, resumes, partial and foreign lines; blocks shorter than a line."""
    monkeypatch.setattr(page_latest, "BLOCK_BYTES", 50)
    path = tmp_path / "metrics.jsonl"
    draw, step = random.Random(3), 0
    curves, latest = Curves(path), LatestMetrics(path)
    with path.open("a") as file:
        for _ in range(200):
            step = max(1, step + draw.choice([0, 1, 1, 1, 1, -4]))
            loss: float | str = draw.random() if draw.random() < 0.5 else "NaN"
            values: dict[str, float | str] = {"loss": loss, "reward": draw.random()}
            if draw.random() < 0.1:
                values["eval/loss"] = draw.random()
            text = draw.choice([line(step, **values)] * 8 + ["not json\n", "{}\n"])
            cut = draw.randrange(len(text))
            file.write(text[:cut])
            file.flush()
            latest.read()
            file.write(text[cut:])
            file.flush()
            found, whole = latest.read(), curves.since(-1, 0)
            steps, series = whole["steps"], whole["series"]
            assert isinstance(steps, list)
            assert isinstance(series, dict)
            assert found.step == (steps[-1] if steps else 0)
            expected = {name: column[-1] for name, column in series.items() if column[-1] is not None}
            sparse = [value for value in series.get("eval/loss", []) if value is not None]
            expected |= {"eval/loss": sparse[-1]} if sparse else {}
            assert found.values == pytest.approx(expected, rel=1e-6)


def test_times_are_those_of_the_first_and_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    latest = LatestMetrics(path)
    assert (latest.read().started_s, latest.read().written_s, latest.read().step_s) == (None, None, None)
    path.write_text(line(1) + line(2) + line(4))
    assert (latest.read().started_s, latest.read().written_s, latest.read().step_s) == (101.0, 104.0, None)
    with path.open("a") as file:
        file.write(line(5))
    assert latest.read().step_s == 1.0
    path.write_text(line(9))
    assert (latest.read().step, latest.read().started_s, latest.read().step_s) == (9, 109.0, None)
