"""Task files: every field reaches the task, and a line that cannot be used is refused with its number."""

import json
import random
from pathlib import Path

import pytest

from m2forge.errors import DataError, M2ForgeError
from m2forge.records import Domain, Submission, Task
from m2forge.tasks.task_file import JsonlFamily
from m2forge.tasks.task_set import TaskSet, describe, split_of

LINE = {"instruction": "Name the capital of France.", "verifier": {"exact": "Paris"}}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "capitals.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def many(num: int, **fields: object) -> list[dict[str, object]]:
    return [LINE | {"id": f"t{index}", "instruction": f"Task {index}."} | fields for index in range(num)]


def test_a_line_becomes_a_task_that_needs_no_file(tmp_path: Path) -> None:
    line = LINE | {"id": "paris", "level": 2, "files": {"notes/a.txt": "x"}, "reference": "Paris.", "domain": "coding"}
    family = JsonlFamily(write(tmp_path, line))
    (task,) = family.tasks
    assert (family.name, family.domain, family.levels, family.has_levels) == ("capitals", "coding", range(2, 3), True)
    assert (task.id, task.domain, task.difficulty) == ("capitals-paris", Domain.CODING, 2.0)
    assert task.metadata["files"] == {"notes/a.txt": "x"}
    copied = Task.read(
        json.loads(
            json.dumps(
                {"id": task.id, "domain": task.domain, "instruction": task.instruction, "metadata": task.metadata}
            )
        )
    )
    assert family.verify(copied, Submission(" Paris.\n")).perf == 1
    assert family.verify(copied, Submission("paris")).perf == 0
    assert [message.content for message in family.demonstrate(task, random.Random(0))] == [task.instruction, "Paris."]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not valid JSON"),
        ("[]", "line 2: expected a JSON object"),
        ({"instruction": "x"}, "line 2: verifier: missing; this key is required"),
        (LINE | {"instuction": "x"}, "line 2: instuction: unknown key, value 'x'; did you mean 'instruction'"),
        (LINE | {"instruction": 3}, "line 2: instruction: expected a valid string, received 3"),
        (LINE | {"id": "first"}, "line 2: id 'first' is already that of line 1"),
        (LINE | {"files": {"../x": ""}}, "line 2: (.*)files: expected paths inside the workspace(.*)'../x'"),
        (LINE | {"files": {"/etc/x": ""}}, "line 2: (.*)files: expected paths inside the workspace(.*)'/etc/x'"),
        (LINE | {"level": 1}, "line 1: it has no level, but line 2 has; give all lines a level, or none"),
        (LINE | {"domain": "cooking"}, "line 2: domain: expected 'reasoning', 'coding', 'agent' or 'general'"),
        (LINE | {"verifier": {}}, "line 2: verifier: expected one of exact, numeric(.*)received none"),
        (LINE | {"verifier": {"exact": "a", "regex": "b"}}, "received exact, regex"),
        (LINE | {"verifier": {"exact": "a", "tolerance": 1.0}}, "tolerance belongs to numeric, not to exact"),
        (LINE | {"verifier": {"regex": "("}}, "line 2: verifier: regex: missing \\)"),
        (LINE | {"verifier": {"choice": "Z"}}, "choice: expected one of the options"),
        (LINE | {"verifier": {"command": []}}, "command: expected a value, received an empty one"),
        (LINE | {"verifier": {"python": "gone.py:f"}}, "line 2: verifier: (.*)gone.py: no such file"),
        (
            LINE | {"verifier": {"judge": ["x"]}},
            "line 2: verifier: a judge verifier needs a model: set verify.judge.url",
        ),
    ],
)
def test_a_broken_line_is_refused_with_its_number(tmp_path: Path, line: object, problem: str) -> None:
    with pytest.raises(M2ForgeError, match=f"capitals.jsonl(.*){problem}"):
        JsonlFamily(write(tmp_path, LINE | {"id": "first"}, line))


def test_an_empty_file_and_gaps_in_levels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tasks; write one JSON object a line"):
        JsonlFamily(write(tmp_path, "", " "))
    with pytest.raises(M2ForgeError, match="no task has level 2; number the levels from 1 on"):
        JsonlFamily(write(tmp_path, LINE | {"level": 1}, LINE | {"level": 3}))


def test_one_file_may_hold_several_domains(tmp_path: Path) -> None:
    path = write(tmp_path, *many(3, domain="coding"), LINE | {"domain": "agent"}, LINE | {"instruction": "Any."})
    with pytest.raises(M2ForgeError, match="several domains \\(agent, coding, general\\)"):
        JsonlFamily(path)
    coding = JsonlFamily(path, Domain.CODING)
    assert [task.instruction for task in coding.tasks] == ["Task 0.", "Task 1.", "Task 2.", "Any."]
    assert {task.domain for task in coding.tasks} == {Domain.CODING}
    with pytest.raises(M2ForgeError, match="none of its 3 tasks belongs to the domain reasoning"):
        JsonlFamily(write(tmp_path, *many(3, domain="coding")), Domain.REASONING)


def test_a_field_or_the_instruction_decides_the_split(tmp_path: Path) -> None:
    hashed = JsonlFamily(write(tmp_path, *many(200)))
    held_out = {task.id for task in hashed.tasks if split_of(task) == "held_out"}
    assert 20 < len(held_out) < 60
    chosen = JsonlFamily(write(tmp_path, *many(4, split="train"), LINE | {"split": "held_out"}))
    assert [split_of(task) for task in chosen.tasks] == ["train"] * 4 + ["held_out"]
    assert describe(chosen).counts == ((0, 4, 1),)
    with pytest.raises(DataError, match="none of its 4 tasks of difficulty 0 to 0 belongs to the split 'held_out'"):
        TaskSet(JsonlFamily(write(tmp_path, *many(4, split="train"))), "held_out", 0).next(0, 0)


def test_a_stream_gives_each_listed_task_once_a_cycle(tmp_path: Path) -> None:
    family = JsonlFamily(
        write(
            tmp_path,
            *many(10, split="train", level=1),
            *[line | {"id": f"u{i}"} for i, line in enumerate(many(5, split="train", level=2))],
        )
    )
    stream = TaskSet(family, "train", 0, key="capitals.jsonl#general")
    first, second = [[stream.next(1, 1).id for _ in range(10)] for _ in range(2)]
    assert len(set(first)) == 10
    assert set(first) == set(second)
    assert first != second
    task = TaskSet(family, "train", 0, position=3, key="capitals.jsonl#general").next(1, 1)
    assert (task.id, task.metadata["source"]) == (first[3], "capitals.jsonl#general")
    assert {stream.next(1, 2).difficulty for _ in range(15)} == {1.0, 2.0}
    assert stream.named("capitals-t3").instruction == "Task 3."
    with pytest.raises(DataError, match="no task 'gone'"):
        stream.named("gone")
