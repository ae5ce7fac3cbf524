"""Attempts written as ATIF: the texts are the conversation's, the tokens and logprobs are those of the pool."""

import importlib
import importlib.util
import json
import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from sqlalchemy import select

from m2forge.cli import main
from m2forge.page.atif import convert
from m2forge.page.pool_reader import PoolReader
from m2forge.page.run_folder import Run
from m2forge.pool.stored import CallWriter, StoredEpisode, read_units, role_artifacts
from m2forge.pool.tables import unit_table
from m2forge.records import Call
from m2forge.sft.atif import read_atif
from m2forge.sft.report import Report
from m2forge.tasks.catalog import family_of, find_family
from m2forge.text.message import Message
from tests.page.scene import Scene, conversation_calls, make_chat_format

Document = Mapping[str, Any]
T = TypeVar("T")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(tmp_path_factory.mktemp("run"), make_chat_format(), group_size=2, queue=6)
    scene.fill()
    scene.play()
    return scene


def stored_of(scene: Scene) -> dict[str, StoredEpisode]:
    with PoolReader(required(Run(scene.run_dir).pool_config())).read() as connection:
        ids = list(connection.execute(select(unit_table.c.id)).scalars())
        units = read_units(connection, ids, scene.pool.vocab_size)
    return {episode.name: episode for unit in units for episode in unit.episodes}


def required(value: T | None) -> T:
    assert value is not None
    return value


@pytest.fixture(scope="module")
def documents(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Document]:
    dest = tmp_path_factory.mktemp("atif") / "out"
    assert main(["atif", str(scene.run_dir), str(dest)]) == 0
    return {path.stem: json.loads(path.read_text()) for path in sorted(dest.iterdir())}


def test_tokens_and_logprobs_are_those_of_the_pool(scene: Scene, documents: dict[str, Document]) -> None:
    stored = stored_of(scene)
    assert documents.keys() == stored.keys()
    for name, document in documents.items():
        calls = list(stored[name].tree().calls())
        metrics = [step["metrics"] for step in document["steps"] if "metrics" in step]
        assert len(metrics) == len(calls)
        for found, call in zip(metrics, calls, strict=True):
            assert found["prompt_token_ids"] == call.prompt_ids.tolist()
            assert found["completion_token_ids"] == call.response_ids.tolist()
            assert np.array_equal(np.array(found["logprobs"], np.float32), call.logprobs)
            assert sum(num for _, num in found["extra"]["policy_versions"]) == call.response_ids.size
        assert document["extra"]["perf"] == required(stored[name].reward).perf
        assert document["final_metrics"]["total_completion_tokens"] == sum(call.response_ids.size for call in calls)


def test_texts_are_read_back_as_the_conversation(scene: Scene, documents: dict[str, Document], tmp_path: Path) -> None:
    tasks = {name: episode.task for name, episode in stored_of(scene).items()}
    num_tools = 0
    for name, document in documents.items():
        (tmp_path / "one.json").write_text(json.dumps(document))
        report = Report()
        (read,) = read_atif(tmp_path / "one.json", report)
        assert not report.problems
        user, *rest = [message for message in read.messages if message.role != "system"]
        assert user.content == tasks[name].instruction
        assert {tool.name for tool in read.tools} == {tool.name for tool in family_of(tasks[name]).tools(tasks[name])}
        answers = [message for message in rest if message.role == "assistant"]
        assert read.trained.count(True) == len(answers)
        for call, result in pairwise(rest):
            if call.tool_calls:
                num_tools += 1
                key = call.tool_calls[0].arguments
                assert result.content == family_of(tasks[name]).call(tasks[name], call.tool_calls[0].name, key)
                assert result.tool_call_id == call.tool_calls[0].id
        for step in document["steps"]:
            results = step.get("observation", {"results": []})["results"]
            assert [result["source_call_id"] for result in results] == [
                call["tool_call_id"] for call in step.get("tool_calls", ())
            ]
    assert num_tools


def test_branches_and_side_calls_are_trajectories_of_their_own(scene: Scene) -> None:
    format, task = scene.format, find_family("chain").draw(2, 3)
    messages = find_family("chain").demonstrate(task, random.Random(0))
    main_calls = conversation_calls(format, task, messages, 0, random.Random(0))
    other = [messages[0], Message("assistant", "a title")]
    side = conversation_calls(format, find_family("words").draw(1, 1), other, 0, random.Random(1))
    branch = [*messages[:3], Message("assistant", "another answer", "I stop.")]
    branched = conversation_calls(format, task, branch, 0, random.Random(2))[-1:]
    stored = episode_of(scene, [*main_calls, *side, *branched], ["main"] * len(main_calls) + ["side", "main"])
    document: Document = convert(stored, format, {"name": "a", "version": "1"}, "run")
    assert document["extra"]["calls"] == [len(main_calls) + 1]
    inner = document["subagent_trajectories"]
    assert [item["extra"]["role"] for item in inner] == ["main", "side"]
    assert [item["trajectory_id"] for item in inner] == ["e/0", f"e/{len(main_calls)}"]
    steps = document["steps"]
    assert [step.get("is_copied_context") for step in steps if step["source"] == "agent"] == [True, None]
    assert steps[-1]["message"] == "another answer"
    assert "metrics" not in steps[1]


def episode_of(scene: Scene, calls: list[Call], roles: list[str]) -> StoredEpisode:
    writer = CallWriter(scene.pool.vocab_size, 0)
    task = find_family("chain").draw(2, 3)
    data = tuple(writer.write(call).data for call in calls)
    return StoredEpisode("e", "finished", task, data, scene.pool.vocab_size, None, None, None, role_artifacts(roles), 1)


def test_fewer_attempts_can_be_asked_for(
    scene: Scene, documents: dict[str, Document], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["atif", str(scene.run_dir), str(tmp_path / "two"), "--num", "2"]) == 0
    assert len(list((tmp_path / "two").iterdir())) == 2
    assert main(["atif", str(scene.run_dir), str(tmp_path / "best"), "--least", "1"]) == 0
    solved = {name for name, document in documents.items() if document["extra"]["perf"] == 1}
    assert {path.stem for path in (tmp_path / "best").iterdir()} == solved
    assert main(["atif", str(scene.run_dir), str(tmp_path / "best")]) == 2
    assert main(["atif", str(scene.run_dir), str(tmp_path / "none"), "--least", "99"]) == 2
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    assert main(["atif", str(tmp_path / "empty"), str(tmp_path / "none")]) == 2
    assert "no run with a pool" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("harbor") is None, reason="harbor is not installed")
def test_the_models_of_harbor_take_every_document(documents: dict[str, Document]) -> None:
    harbor = importlib.import_module("harbor.models.trajectories")
    for document in documents.values():
        harbor.Trajectory.model_validate(document)
