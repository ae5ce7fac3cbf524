"""Demonstrations as files: what fine-tuning reads is what the family showed."""

from pathlib import Path

from m2forge.records import Submission
from m2forge.sft.report import Report
from m2forge.sft.row_file import read_jsonl
from m2forge.tasks.catalog import EMBEDDED, family_of
from m2forge.tasks.demonstration import demonstrations, write_demonstrations
from m2forge.tasks.task_set import TaskSet
from m2forge.text.message import Message


def test_fine_tuning_reads_what_was_written(tmp_path: Path) -> None:
    tasks = [TaskSet(family, "train", seed).next(1, 4) for family in EMBEDDED for seed in range(8)]
    path = tmp_path / "train.jsonl"
    write_demonstrations(path, tasks, seed=5, system="Use the tools.")
    report = Report()
    trajectories = list(read_jsonl(path, report))
    assert report.num_problems == 0
    assert len(trajectories) == len(tasks)
    for task, trajectory in zip(tasks, trajectories, strict=True):
        family = family_of(task)
        assert trajectory.messages[0] == Message("system", "Use the tools.")
        assert trajectory.messages[1] == Message("user", task.instruction)
        assert trajectory.tools == family.tools(task)
        assert family.verify(task, Submission(trajectory.messages[-1].content)).perf == 1


def test_they_repeat_exactly_and_differ_for_another_seed() -> None:
    tasks = [TaskSet(EMBEDDED[3], "train", seed).next(4, 4) for seed in range(10)]
    assert list(demonstrations(tasks, 1)) == list(demonstrations(tasks, 1))
    assert list(demonstrations(tasks, 1)) != list(demonstrations(tasks, 2))
    assert "system" not in str(list(demonstrations(tasks, 1)))
