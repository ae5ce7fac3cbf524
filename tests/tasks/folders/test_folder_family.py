"""`folders:PATH` as a source: what becomes a task, what is held out, and what a run reports."""

import asyncio
import logging
from pathlib import Path

import pytest

from m2forge.config import TomlValue, build
from m2forge.errors import ConfigError, DataError, NotFoundError
from m2forge.records import Domain, Submission
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import CurriculumConfig, VerifyConfig
from m2forge.tasks.family import family_key_of
from m2forge.tasks.folders.folder_family import FOLDER_KEY, FolderFamily
from m2forge.tasks.survey import survey
from m2forge.tasks.task_set import TaskSet, describe, split_of
from tests.tasks.folders.scene import table, write, write_raw


def origin(**values: TomlValue) -> dict[str, TomlValue]:
    return table(metadata={"m2forge": values})


def test_folders_become_tasks_without_levels(tmp_path: Path) -> None:
    write(tmp_path / "set" / "a" / "one", origin(domain="coding"))
    write(tmp_path / "set" / "two", instruction_dot_md="Second.\n")
    family = FolderFamily(tmp_path / "set", Domain.CODING)
    (task,) = family.tasks
    assert (task.id, task.domain, task.instruction[:5]) == ("set-a/one", Domain.CODING, "Write")
    assert task.metadata[FOLDER_KEY] == str(tmp_path / "set" / "a" / "one")
    info = describe(family)
    assert info.measured == tuple(task.id for task in family.tasks if split_of(task) == "train")
    assert family.draw(0, 7) == task
    with pytest.raises(DataError, match="run in a sandbox"):
        family.verify(task, Submission(""))
    with pytest.raises(ConfigError, match=r"several domains \(coding, general\); name one: .*set#coding"):
        FolderFamily(tmp_path / "set")


def test_a_single_folder_is_a_set_of_one(tmp_path: Path) -> None:
    write(tmp_path / "one")
    family = find_family(f"folders:{tmp_path / 'one'}")
    assert isinstance(family, FolderFamily)
    assert [task.id for task in family.tasks] == ["one"]
    key = f"folders:{tmp_path / 'one'}#general"
    drawn = TaskSet(family, split_of(family.tasks[0]), 0, key=key).next(0, 0)
    assert family_key_of(drawn) == key
    assert find_family(key).domain is Domain.GENERAL


def test_packages_are_held_out_as_a_whole(tmp_path: Path) -> None:
    for package in range(20):
        for task in range(3):
            write(tmp_path / "set" / f"{package}-{task}", origin(package=f"package {package}", source="repository"))
    splits: dict[str, set[str]] = {}
    for task_ in FolderFamily(tmp_path / "set").tasks:
        splits.setdefault(Path(str(task_.metadata[FOLDER_KEY])).name.split("-")[0], set()).add(split_of(task_))
    assert all(len(found) == 1 for found in splits.values())
    num_held_out = sum(found == {"held_out"} for found in splits.values())
    assert 1 <= num_held_out <= 9
    write(tmp_path / "other" / "x", origin(package="package 3"))
    (other,) = FolderFamily(tmp_path / "other").tasks
    assert {split_of(other)} == splits["3"]


def test_a_folder_may_decide_its_split(tmp_path: Path) -> None:
    for split in ("train", "held_out"):
        for number in range(3):
            write(tmp_path / split / str(number), origin(split=split))
        assert {split_of(task) for task in FolderFamily(tmp_path / split).tasks} == {split}


def test_broken_folders_are_reported_and_the_rest_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "set" / "good", origin(split="train"))
    write(tmp_path / "set" / "held", origin(split="held_out"))
    write(tmp_path / "set" / "stepped", table(steps=[{"name": "a"}]), steps__a__instruction_dot_md="Do it.")
    write(tmp_path / "set" / "gpu", table(environment={"gpus": 8}))
    for number in range(9):
        write_raw(tmp_path / "set" / f"broken-{number}", "x =")
    domain: dict[str, TomlValue] = {
        "ratio": 1.0,
        "context": 64,
        "families": [{"source": f"folders:{tmp_path / 'set'}"}],
    }
    config = build(CurriculumConfig, {"batch_groups": 1, "stages": [{"name": "all", "domains": {"coding": domain}}]})
    with caplog.at_level(logging.WARNING):
        known = asyncio.run(survey(config, VerifyConfig(), 1, 0))
    (info,) = known.values()
    assert (info.num_rejected, info.counts) == (11, ((0, 1, 1),))
    assert "broken-0/task.toml: not valid TOML" in caplog.text
    assert "1 more tasks are left out" in caplog.text


def test_a_set_without_a_usable_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "set" / "gpu", table(environment={"gpus": 8}))
    with pytest.raises(ConfigError, match=r"1 are rejected, the first: .*not offered here: environment\.gpus"):
        FolderFamily(tmp_path / "set")
    with pytest.raises(NotFoundError, match="is not a folder"):
        FolderFamily(tmp_path / "none")
