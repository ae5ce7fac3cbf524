"""ATIF documents: how steps become messages, what carries no loss, what is left out and said."""

import json
from pathlib import Path
from typing import Any

import pytest

from m2forge.sft.atif import VERSIONS, read_atif, trajectories_from_atif
from m2forge.sft.report import Note, Problem, Report
from m2forge.sft.trajectory import Trajectory
from m2forge.text.message import Message, ToolCall

DEFINITION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def document(*steps: dict[str, Any], **keys: object) -> dict[str, Any]:
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    agent = {"name": "harness", "version": "1", "tool_definitions": [DEFINITION]}
    return {"schema_version": "ATIF-v1.8", "agent": agent, "steps": numbered, **keys}


def system(message: object, **keys: object) -> dict[str, Any]:
    return {"source": "system", "message": message, **keys}


def user(message: object, **keys: object) -> dict[str, Any]:
    return {"source": "user", "message": message, **keys}


def agent(message: object = "", **keys: object) -> dict[str, Any]:
    return {"source": "agent", "message": message, **keys}


def calls(*ids: str) -> dict[str, Any]:
    return {"tool_calls": [{"tool_call_id": id, "function_name": "add", "arguments": {"a": 1}} for id in ids]}


def observed(*results: dict[str, Any]) -> dict[str, Any]:
    return {"observation": {"results": list(results)}}


def managed(**keys: str) -> dict[str, Any]:
    return {"extra": {"context_management": keys}}


def read(data: dict[str, Any]) -> tuple[list[Trajectory], Report]:
    report = Report()
    return list(trajectories_from_atif(data, "a.json", report)), report


@pytest.mark.parametrize("version", VERSIONS)
def test_steps_become_messages_in_every_version(version: str) -> None:
    data = document(
        system("Be brief."),
        user("1 + 2?"),
        agent("Sure.", reasoning_content="Add.", **calls("c1"), **observed({"source_call_id": "c1", "content": "3"})),
        agent("3", metrics={"prompt_tokens": 9}),
        schema_version=version,
        final_metrics={"total_steps": 4},
    )
    (trajectory,), report = read(data)
    assert trajectory.messages == (
        Message("system", "Be brief."),
        Message("user", "1 + 2?"),
        Message("assistant", "Sure.", thinking="Add.", tool_calls=(ToolCall("add", {"a": 1}, "c1"),)),
        Message("tool", "3", tool_call_id="c1"),
        Message("assistant", "3"),
    )
    assert [tool.name for tool in trajectory.tools] == ["add"]
    assert trajectory.source == "a.json"
    assert not report.problems
    assert not report.notes


def test_copied_context_and_steps_without_a_model_carry_no_loss() -> None:
    data = document(
        user("go"),
        agent("copied", is_copied_context=True),
        user("on"),
        agent("dispatched", llm_call_count=0),
        agent("fresh", llm_call_count=1, is_copied_context=False),
    )
    (trajectory,), _ = read(data)
    trained = {m.content: flag for m, flag in zip(trajectory.messages, trajectory.trained, strict=True)}
    assert trained == {"go": False, "copied": False, "on": False, "dispatched": False, "fresh": True}


def test_unmatched_results_answer_open_calls_or_are_the_users() -> None:
    data = document(
        user("go"),
        agent("a", **calls("c1", "c2"), **observed({"content": "to c1"}, {"content": "to c2"}, {"content": "more"})),
        agent("no calls", **observed({"content": "$ ls"}, {"content": "x"})),
        agent("end"),
    )
    (trajectory,), _ = read(data)
    assert trajectory.messages[2:6] == (
        Message("tool", "to c1", tool_call_id="c1"),
        Message("tool", "to c2", tool_call_id="c2"),
        Message("user", "more"),
        Message("assistant", "no calls"),
    )
    assert trajectory.messages[6] == Message("user", "$ ls\n\nx")


def test_ids_that_are_numbers_still_name_their_calls() -> None:
    call = {"tool_calls": [{"tool_call_id": 7, "function_name": "add", "arguments": {}}]}
    data = document(user("go"), agent(**call, **observed({"source_call_id": 7, "content": "3"})), agent("end"))
    (trajectory,), report = read(data)
    assert trajectory.messages[2] == Message("tool", "3", tool_call_id="7")
    assert not report.problems


def test_parts_other_than_text_are_left_out_and_counted() -> None:
    picture = {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}
    sound = {"type": "audio", "source": {"media_type": "audio/wav", "path": "a.wav"}}
    reference = [{"trajectory_id": "t2", "trajectory_path": "b.json"}]
    data = document(
        user([{"type": "text", "text": "look"}, picture, sound]),
        agent(**calls("c1"), **observed({"source_call_id": "c1", "subagent_trajectory_ref": reference})),
        agent("done"),
        continued_trajectory_ref="a.cont-1.json",
    )
    (trajectory,), report = read(data)
    assert trajectory.messages[0].content == "look\n[image]\n[audio]"
    assert trajectory.messages[2] == Message("tool", "", tool_call_id="c1")
    assert {note: finding.places for note, finding in report.notes.items()} == {
        Note.IMAGE: ["a.json: steps[0].message[1]"],
        Note.AUDIO: ["a.json: steps[0].message[2]"],
        Note.SUBAGENT: ["a.json: steps[1].observation.results[0]"],
        Note.CONTINUED: ["a.json: a.cont-1.json"],
    }
    assert not report.problems


def test_system_steps_within_the_conversation_come_from_the_user() -> None:
    data = document(system("A"), system("B"), user("go"), system("time is short"), agent("done"))
    (trajectory,), report = read(data)
    assert trajectory.messages[0] == Message("system", "A\n\nB")
    assert trajectory.messages[2] == Message("user", "time is short")
    assert report.count(Note.NOTICE) == 1


def test_a_replaced_context_begins_another_trajectory() -> None:
    replace = managed(type="compaction", boundary="replace")
    data = document(
        system("S"),
        user("go"),
        agent("one"),
        system("compacted", **replace, **observed({"content": "so far"})),
        agent("2"),
    )
    (first, second), report = read(data)
    assert [message.content for message in first.messages] == ["S", "go", "one"]
    assert second.messages == (Message("system", "S"), Message("user", "so far"), Message("assistant", "2"))
    assert second.trained == (False, False, True)
    assert second.source == "a.json#1"
    assert report.count(Note.REPLACED) == 1


@pytest.mark.parametrize("boundary", ["replace", "truncate", "other"])
def test_what_follows_a_context_that_is_not_recorded_is_left_out(boundary: str) -> None:
    data = document(user("go"), agent("one"), system("cut", **managed(type="pruning", boundary=boundary)), agent("two"))
    (trajectory,), report = read(data)
    assert [message.content for message in trajectory.messages] == ["go", "one"]
    assert report.count(Note.UNKNOWN_CONTEXT) == 1


def test_an_appended_context_is_a_message() -> None:
    data = document(user("go"), system("hint", **managed(type="injection", boundary="append")), agent("two"))
    (trajectory,), _ = read(data)
    assert [message.content for message in trajectory.messages] == ["go", "hint", "two"]


def test_embedded_agents_are_trajectories_and_fail_alone() -> None:
    child = document(user("sub"), agent("done"), trajectory_id="t2")
    del child["schema_version"]
    broken = document(user("sub"), {"source": "robot", "message": ""}, trajectory_id="t3")
    trajectories, report = read(document(user("go"), agent("done"), subagent_trajectories=[broken, child]))
    assert [trajectory.source for trajectory in trajectories] == ["a.json", "a.json: subagent_trajectories[1]"]
    assert (
        report.problems[Problem.BAD_ROLE]
        .places[0]
        .startswith('a.json: subagent_trajectories[0]: steps[1].source: "robot"')
    )


BROKEN: list[tuple[dict[str, Any], Problem, str]] = [
    (document(user("x"), schema_version="ATIF-v2.0"), Problem.UNKNOWN_VERSION, '"ATIF-v2.0"; this reader knows'),
    ({"steps": []}, Problem.MISSING_KEY, "no 'schema_version'"),
    ({"schema_version": "ATIF-v1.8", "steps": []}, Problem.MISSING_KEY, "no 'agent' among the keys"),
    (document(), Problem.BAD_VALUE, "steps: expected a list"),
    (document({"message": "x"}), Problem.MISSING_KEY, "steps[0]: no 'source'"),
    (document({"source": "agent"}), Problem.MISSING_KEY, "no 'message'"),
    (document(user("x"), {**agent("y"), "step_id": 7}), Problem.BAD_ORDER, "steps[1].step_id"),
    (document({"source": "robot", "message": ""}), Problem.BAD_ROLE, 'steps[0].source: "robot"'),
    (document(user(3)), Problem.BAD_VALUE, "steps[0].message"),
    (document(user([{"type": "video"}])), Problem.BAD_VALUE, "steps[0].message[0]"),
    (document(user("x"), agent(tool_calls=[{"tool_call_id": "c"}])), Problem.MISSING_KEY, "no 'function_name'"),
    (
        document(user("x"), agent(tool_calls=[{"tool_call_id": "c", "function_name": "f", "arguments": "{}"}])),
        Problem.BAD_ARGUMENTS,
        "steps[1].tool_calls[0].arguments",
    ),
    (document(user("x"), agent(**observed({"source_call_id": "c9"}))), Problem.BAD_ORDER, 'no call "c9" waits'),
    (document(user("x"), agent("y", is_copied_context="yes")), Problem.BAD_VALUE, "steps[1].is_copied_context"),
    (document(user("x"), agent("y", reasoning_content=1)), Problem.BAD_VALUE, "steps[1].reasoning_content"),
    (document(user("x")), Problem.BAD_ORDER, "none of the 1 messages"),
    (document(user("x"), agent("y"), agent=7), Problem.BAD_VALUE, "agent: expected an object"),
]


@pytest.mark.parametrize(("data", "problem", "what"), BROKEN)
def test_a_broken_document_is_reported_with_its_place(data: dict[str, Any], problem: Problem, what: str) -> None:
    trajectories, report = read(data)
    assert not trajectories
    assert report.num_problems == report.count(problem) == 1
    place = report.problems[problem].places[0]
    assert place.startswith("a.json")
    assert what in place


def test_broken_json_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n "schema_version": "ATIF-v1.8",\n "agent" 7\n}')
    report = Report()
    assert not list(read_atif(path, report))
    assert report.problems[Problem.BROKEN_JSON].places[0].startswith(f"{path}:3: ")


def test_other_json_is_skipped_in_folders_and_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"reward": 1}))
    report = Report()
    assert not list(read_atif(path, report, foreign=True))
    assert report.count(Note.NOT_ATIF) == 1
    assert not report.problems
    assert not list(read_atif(path, report))
    assert report.count(Problem.MISSING_KEY) == 1
