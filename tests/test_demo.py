"""What the demo says of its data: hundreds of held-out instructions, none trained on; a stated share of wrong ones."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from examples.demo import BARE, CONFIGS, COURSE, ROOT, SHARES, WHOLE, Demo, make_demonstrations
from m2forge.config import load
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import held_out_tasks
from m2forge.tasks.catalog import find_family
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.task_set import TaskSet


@pytest.fixture(scope="module")
def config() -> RLConfig:
    return load(RLConfig, CONFIGS / "rl" / "demo.toml")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_demonstrations(folder, 0, COURSE.lessons, lambda num: num)
    return folder


def instructions(path: Path) -> set[str]:
    items = [json.loads(line) for line in path.read_text().splitlines()]
    return {message["content"] for item in items for message in item["messages"] if message["role"] == "user"}


def test_no_held_out_instruction_is_trained_on(config: RLConfig, data: Path, tmp_path: Path) -> None:
    async def draw() -> list[str]:
        async with TaskRunner(config.verify, tmp_path) as runner:
            return [task.instruction for task in await held_out_tasks(config, runner)]

    held_out = asyncio.run(draw())
    assert len(set(held_out)) >= 400
    trained = instructions(data / BARE) | instructions(data / WHOLE)
    for key, _, family in config.curriculum.stages[-1].families():
        assert family.difficulty is not None
        stream = TaskSet(find_family(key), "train", config.curriculum.seed)
        trained |= {stream.next(*family.difficulty).instruction for _ in range(500)}
    assert len(trained) > 3000
    assert not trained & set(held_out)


def test_two_stages_mix_domains_with_and_without_tools(config: RLConfig) -> None:
    first, last = ([key for key, _, _ in stage.families()] for stage in config.curriculum.stages)
    assert set(first) < set(last) == {lesson.family for lesson in COURSE.lessons}
    assert len(config.curriculum.stages[-1].domains) == 3
    tasks = {key: TaskSet(find_family(key), "train", 0).next(1, 1) for key in last}
    assert {key for key, task in tasks.items() if find_family(key).tools(task)} == set(last) - set(first) == {"replies"}
    levels = {key: family.difficulty for stage in config.curriculum.stages for key, _, family in stage.families()}
    assert levels == {lesson.family: lesson.levels for lesson in COURSE.lessons}


def test_the_readme_and_the_report_state_how_many_are_wrong(data: Path, tmp_path: Path) -> None:
    shares = json.loads((data / SHARES).read_text())
    stated = re.search(
        r"(\d+)% of them have a wrong answer in `replies`\s.*?(\d+)% in `raises`\sand\s(\d+)% in `joins`",
        (ROOT / "README.md").read_text(),
        re.DOTALL,
    )
    assert stated is not None
    assert [round(100 * shares[name]) for name in ("replies", "raises", "joins")] == [int(n) for n in stated.groups()]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / SHARES).write_text((data / SHARES).read_text())
    note = Demo(tmp_path, 0).note()
    assert all(f"{share:.0%} of {name}" in note for name, share in shares.items())
