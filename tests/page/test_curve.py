"""Metrics read while they are written: half lines, steps that go back, lines that are none."""

import json
from pathlib import Path

from m2forge.observe.metrics import read_metrics
from m2forge.page.run_folder import MAX_POINTS, Curves


def line(step: int, **values: float | str) -> str:
    return json.dumps({"step": step, "time_s": 100.0 + step, **values}) + "\n"


def test_what_is_appended_is_read_and_only_that_is_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curves = Curves(path)
    assert curves.since(-1, 0)["steps"] == []
    path.write_text(line(1, loss=3.0) + line(2, loss=2.0))
    first = curves.since(-1, 0)
    assert (first["steps"], first["series"], first["is_whole"]) == ([1, 2], {"loss": [3.0, 2.0]}, True)
    with path.open("a") as file:
        file.write(line(3, loss=1.0)[:-10])
    assert curves.since(0, 2)["steps"] == [2]
    with path.open("a") as file:
        file.write(line(3, loss=1.0)[-10:])
    then = curves.since(0, 2)
    assert (then["steps"], then["is_whole"]) == ([2, 3], False)


def test_a_step_that_goes_back_replaces_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, loss=3.0) + line(2, loss=2.0) + line(3, loss=1.0))
    curves = Curves(path)
    revision = curves.since(-1, 0)["revision"]
    with path.open("a") as file:
        file.write(line(2, loss=9.0) + line(2, reward=0.5))
    found = curves.since(int(str(revision)), 3)
    assert found["is_whole"] is True
    assert found["revision"] != revision
    assert found["series"] == {"loss": [3.0, 9.0], "reward": [None, 0.5]}
    assert [step.values for step in read_metrics(path)] == [{"loss": 3.0}, {"loss": 9.0, "reward": 0.5}]


def test_lines_that_are_no_metrics_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "[1]\n{}\nnot json\n" + line(1, loss="NaN") + line(2, loss="Infinity", reward=1.0) + '{"step": 3, "ti'
    )
    found = Curves(path).since(-1, 0)
    assert (found["steps"], found["num_unread"]) == ([1, 2], 3)
    assert found["series"] == {"loss": [None, None], "reward": [None, 1.0]}


def test_a_file_that_became_shorter_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    curves = Curves(path)
    curves.since(-1, 0)
    path.write_text(line(1))
    assert curves.since(0, 0)["steps"] == [1]


def test_many_steps_are_thinned_and_the_ends_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, loss=1.0) for step in range(1, 4001)))
    steps = Curves(path).since(-1, 0)["steps"]
    assert isinstance(steps, list)
    assert len(steps) == MAX_POINTS
    assert (steps[0], steps[-1]) == (1, 4000)


def test_tokens_are_counted_over_steps_that_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, loss=1.0))
    assert Curves(path).since(-1, 0)["tokens"] is None
    path.write_text("".join(line(step, tokens_computed=10.0) for step in range(1, 4001)))
    curves = Curves(path)
    found = curves.since(-1, 0)
    steps, tokens = found["steps"], found["tokens"]
    assert isinstance(steps, list)
    assert tokens == [10.0 * step for step in steps]
    assert curves.since(curves.revision, 4000)["tokens"] == [40000.0]
    path.write_text(line(1, num_tokens=7.0, tokens_computed=1.0) + line(2, num_tokens=9.0))
    assert Curves(path).since(-1, 0)["tokens"] == [7.0, 9.0]


def test_released_rows_are_read_again_as_a_new_revision(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, loss=3.0) + line(2, loss=2.0))
    curves = Curves(path)
    first = curves.since(-1, 0)
    curves.release()
    again = curves.since(int(str(first["revision"])), 2)
    assert again["is_whole"] is True
    assert again["series"] == first["series"]
