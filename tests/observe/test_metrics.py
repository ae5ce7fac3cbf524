"""Metrics survive death, NaN and resumption."""

import json
import math
from pathlib import Path

import pytest

from m2forge.errors import NotFoundError, RecordError
from m2forge.observe.metrics import MetricsWriter, StepMetrics, read_metrics


def written(folder: Path) -> list[tuple[int, dict[str, float]]]:
    return [(item.step, item.values) for item in read_metrics(folder / "metrics.jsonl")]


def test_each_step_is_one_json_line_and_a_tensorboard_event(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(1, {"loss": 2.5, "tokens": 7})
        writer.write(2, {"loss": 2.0})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.pop("time_s") > 1e9 for line in lines] == [True, True]
    assert lines == [{"step": 1, "loss": 2.5, "tokens": 7.0}, {"step": 2, "loss": 2.0}]
    events = b"".join(path.read_bytes() for path in (tmp_path / "run" / "tensorboard").iterdir())
    assert events.count(b"loss") == 2
    assert events.count(b"tokens") == 1


def test_a_line_is_on_disk_before_the_writer_closes(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 2.5})
        assert written(tmp_path) == [(1, {"loss": 2.5})]


def test_non_finite_values_stay_valid_json_and_read_back(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert '"a": "NaN", "b": "Infinity", "c": "-Infinity"' in line
    ((_, values),) = written(tmp_path)
    assert math.isnan(values["a"])
    assert (values["b"], values["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("whole", [0, 1, 3])
@pytest.mark.parametrize("torn", [b'{"step": 9, "ti', b"x" * 200_000])
def test_torn_last_line_is_cut_when_opened_again(tmp_path: Path, whole: int, torn: bytes) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(whole):
            writer.write(step, {"loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(torn)
    assert [step for step, _ in written(tmp_path)] == list(range(whole))
    with MetricsWriter(tmp_path) as writer:
        writer.write(whole, {"loss": 1.0})
    assert path.read_bytes().count(b"\n") == whole + 1
    assert [step for step, _ in written(tmp_path)] == list(range(whole + 1))


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3, 4):
            writer.write(step, {"loss": float(step)})
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, {"loss": 20.0})
        writer.write(2, {"eval/loss": 21.0})
        writer.write(3, {"loss": 30.0})
    assert written(tmp_path) == [(1, {"loss": 1.0}), (2, {"loss": 20.0, "eval/loss": 21.0}), (3, {"loss": 30.0})]


def test_reserved_name_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer, pytest.raises(RecordError, match="metrics of step 3: 'time_s' is"):
        writer.write(3, {"loss": 1.0, "time_s": 2.0})
    assert written(tmp_path) == []


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"step": 1}', '{"step": 1, "time_s": 2, "loss": null}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time_s": 2.0, "loss": 3.0}\n' + line + "\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl, line 2: not a metrics record"):
        read_metrics(path)


def test_missing_metrics_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no metrics here"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_time_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time_s": 2.0, "loss": 3.0}\n')
    assert read_metrics(path) == [StepMetrics(1, 2.0, {"loss": 3.0})]
