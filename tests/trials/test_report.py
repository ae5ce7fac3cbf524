"""The report of trials: pairs of policies, trials of the infrastructure apart, texts that are no markup."""

from pathlib import Path

import pytest

from m2forge.errors import DataError, NotFoundError
from m2forge.trials.config import Price
from m2forge.trials.run import LINES_FILE, PAGE_FILE, Trial, make_report, read_trials, write_report


def trials(**perfs: list[float | None]) -> list[Trial]:
    return [
        Trial(task, "family", number, perf, 1.0, infra="disk" if perf is None else None, num_tokens=10)
        for task, values in perfs.items()
        for number, perf in enumerate(values)
    ]


def test_two_policies_are_compared_task_by_task() -> None:
    ours = trials(a=[1.0, 1.0], b=[1.0, 0.0], c=[0.0, 0.5], d=[None, None], e=[1.0])
    theirs = trials(a=[0.0, 1.0], b=[1.0, 1.0], c=[0.0], d=[1.0], f=[0.0])
    found = make_report(ours, 2, other=theirs).comparison
    assert found is not None
    assert (found.num_tasks, found.num_better, found.num_worse) == (3, 1, 1)
    assert [found.solved, found.other_solved, found.difference] == pytest.approx([0.5, 0.5, 0.0])
    with pytest.raises(DataError, match="no task was tried by both"):
        make_report(ours, 2, other=trials(z=[1.0]))


def test_infra_is_apart_and_tokens_have_their_price() -> None:
    report = make_report(trials(a=[1.0, None], b=[0.5, 1.0]), 2, Price(completion=2.0))
    assert (report.all.num_trials, report.all.num_infra) == (3, 1)
    assert report.all.solved == pytest.approx(2 / 3)
    assert len(report.all.pass_all) == 2
    assert report.all.pass_all[1] == (0.0, None), "of one task with two trials"
    assert report.cost == pytest.approx(40 * 2e-6)
    assert make_report(trials(a=[1.0]), 1, Price()).cost is None


def test_names_of_tasks_are_text_on_the_page(tmp_path: Path) -> None:
    found = [Trial("<b>x</b>", "f", 0, 0.0, 1.0, reason="<script>")]
    write_report(tmp_path, make_report(found, 1), found, title="<i>")
    page = (tmp_path / PAGE_FILE).read_text()
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "<script>" not in page
    assert "<i>" not in page


def test_missing_trials_to_compare_with_are_named(tmp_path: Path) -> None:
    assert read_trials(tmp_path / LINES_FILE) == []
    with pytest.raises(NotFoundError, match="no trials; give the output folder"):
        read_trials(tmp_path / LINES_FILE, is_needed=True)
