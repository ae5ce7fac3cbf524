"""Distillation: what each rule rejects, what is written, and that teachers and scaffolds rotate."""

import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.table_tasks import Question, questions, write_folders
from m2forge import cli
from m2forge.config import build
from m2forge.errors import ConfigError
from m2forge.observe.metrics import read_metrics
from m2forge.pipelines.config import PipelineConfig
from m2forge.pipelines.run import run_pipeline
from m2forge.pipelines.shell_agent import Malformed, clean_message
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import run_sft
from tests.pipelines.endpoint import completion, serving
from tests.rl.scene import make_model
from tests.sandbox.places import require


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Question]]:
    require("namespace")
    found: dict[str, Question] = {}
    for question in itertools.islice(questions(5, 1)[1], 100):
        if question.mistakes():
            found.setdefault(question.instruction(), question)
    chosen = list(found.values())[:7]
    folder = tmp_path_factory.mktemp("distill") / "tables"
    write_folders(folder, [(question, "train") for question in chosen], 5)
    return folder, chosen


def configured(folder: Path, url: str | None = None, **fields: object) -> PipelineConfig:
    distill: dict[str, Any] = {"folders": str(folder), "base_image": "host", **fields}
    models: dict[str, Any] = {} if url is None else {"teacher": {"url": url, "model": "m", "max_retries": 0}}
    return build(PipelineConfig, {"name": "run", "workers": 2, "models": models, "distill": distill})


def called(command: str, name: str = "shell", **more: object) -> tuple[int, bytes]:
    function = {"name": name, "arguments": json.dumps({"command": command, **more})}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    return 200, json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode()


def reasons(run: Path) -> Counter[str]:
    yields = json.loads((run / "yields.json").read_text())
    return Counter({reason: num for stage in yields["stages"] for reason, num in stage["rejected"].items()})


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]


def test_every_rule_rejects_its_own(asked: tuple[Path, list[Question]], tmp_path: Path) -> None:
    folder, chosen = asked
    by_instruction = {question.instruction(): index for index, question in enumerate(chosen)}

    def respond(body: Mapping[str, Any], number: int) -> tuple[int, bytes]:
        instruction = body["messages"][0]["content"].strip()
        index, turn = by_instruction[instruction], sum(message["role"] == "assistant" for message in body["messages"])
        right = chosen[index].command(chosen[index].steps())
        if index == 0:
            return called("true", name="other")
        if index == 1:
            return completion("so", finish_reason="length")
        if index == 2:
            return called("true") if turn < 3 else called(right) if turn == 3 else completion("Done.")
        if index == 3:
            return called("ls /tests 2> /dev/null; " + right) if turn == 0 else completion("Done.")
        if index == 4:
            return called(chosen[index].command(chosen[index].mistakes()[0])) if turn == 0 else completion("Done.")
        return called(right) if turn == 0 else completion("Done.")

    with serving(respond) as endpoint:
        config = configured(folder, endpoint.url, teachers=["teacher"], num_draws=2)
        run = run_pipeline(config, tmp_path)
        num_asked = len(endpoint.requests)
        assert run_pipeline(config, tmp_path) == run
        assert len(endpoint.requests) == num_asked, "nothing is asked again"
    assert reasons(run) == {
        "malformed tool call": 2,
        "cut off": 2,
        "looping": 2,
        "leaked": 2,
        "verdict: judged": 2,
        "near-duplicate": 2,
    }
    written = lines(run)
    assert [by_instruction[line["messages"][0]["content"].strip()] for line in written] == [5, 6]
    assert [message["role"] for message in written[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    documents = [json.loads(path.read_text()) for path in sorted((run / "atif").iterdir())]
    assert [document["extra"]["verdict"]["perf"] for document in documents] == [1.0, 1.0]
    assert [step["source"] for step in documents[0]["steps"]] == ["user", "agent", "agent"]
    call, result = documents[0]["steps"][1]["tool_calls"][0], documents[0]["steps"][1]["observation"]["results"][0]
    assert call["tool_call_id"] == result["source_call_id"]


def test_a_policy_of_ours_is_served_to_the_run(asked: tuple[Path, list[Question]], tmp_path: Path) -> None:
    """A network with random weights: its text is no tool call, and so no trajectory."""
    policy: dict[str, Any] = {
        "folder": str(make_model(tmp_path)),
        "model": "policy",
        "max_tokens": 8,
        "serve": ["dtype=float32"],
    }
    distill: dict[str, Any] = {"folders": str(asked[0]), "num": 2, "teachers": ["policy"], "base_image": "host"}
    config = build(PipelineConfig, {"name": "run", "models": {"policy": policy}, "distill": distill})
    run = run_pipeline(config, tmp_path / "runs")
    assert lines(run) == []
    assert json.loads((run / "yields.json").read_text())["stages"][2]["num_asked"] >= 2
    assert reasons(run).total() == 2


def test_solutions_are_replayed_under_every_scaffold(asked: tuple[Path, list[Question]], tmp_path: Path) -> None:
    folder, chosen = asked
    scaffold = {
        "tools": ["shell", "bash"],
        "descriptions": ["Run a command.", "A terminal."],
        "systems": ["", "You work in a shell."],
        "prompts": ["{instruction}", "Task: {instruction}"],
        "environments": [{}, {"LC_ALL": "C"}],
    }
    config = configured(folder, num_draws=4, max_per_task=4, threshold=1.0, scaffold=scaffold)
    config = config.model_copy(update={"name": "solutions"})
    run = run_pipeline(config, tmp_path)
    written = lines(run)
    assert {line["metadata"]["task"] for line in written} == {f"tables-table-{n:03d}" for n in range(len(chosen))}
    assert all(line["metadata"]["verdict"]["perf"] == 1 for line in written)
    names = {line["tools"][0]["function"]["name"] for line in written}
    assert names == {"shell", "bash"}
    assert all(
        line["messages"][-3]["tool_calls"][0]["function"]["name"] == line["tools"][0]["function"]["name"]
        for line in written
    )
    assert {line["messages"][0]["role"] for line in written} == {"system", "user"}
    documents = [json.loads(path.read_text()) for path in (run / "atif").iterdir()]
    assert {document["extra"]["verdict"]["perf"] for document in documents} == {1.0}
    assert {document["session_id"] for document in documents} == {line["id"] for line in written}
    check_corpus(run / "trajectories.jsonl", tmp_path)


def check_corpus(corpus: Path, folder: Path) -> None:
    """Trajectories of the pipeline go through fine-tuning, one step."""
    lines = corpus.read_text().splitlines(keepends=True)[:3]
    (folder / "corpus.jsonl").write_text("".join(lines))
    data: dict[str, Any] = {
        "name": "sft",
        "model": str(make_model(folder)),
        "num_epochs": 1,
        "pack_tokens": 8192,
        "lr": {"start": 1e-3},
        "data": {"context": 4096, "sources": [{"path": str(folder / "corpus.jsonl")}]},
        "train": {"machine": {"device": "cpu", "num_threads": 1}},
    }
    run_sft(build(SFTConfig, data), folder)
    (step,) = read_metrics(folder / "sft" / "metrics.jsonl")
    assert step.values["loss"] > 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "<tool_call>{}"}, "markup in the text"),
        ({"content": ""}, "empty message"),
        ({"content": None, "tool_calls": [{"function": {"name": "shell", "arguments": "{"}}]}, "malformed tool call"),
        ({"content": None, "tool_calls": ["x"]}, "malformed tool call"),
        (
            {"tool_calls": [{"function": {"name": "shell", "arguments": '{"command": 3}'}}]},
            "malformed tool call",
        ),
    ],
)
def test_malformed_messages_are_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(Malformed, match=f"^{re.escape(reason)}$"):
        clean_message(message, "shell")


def test_thinking_stays_in_the_corpus() -> None:
    cleaned = clean_message({"role": "assistant", "content": "a", "reasoning_content": "why", "refusal": None}, "shell")
    assert cleaned == {"role": "assistant", "content": "a", "reasoning_content": "why"}


def test_a_folder_that_is_missing_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "distill.toml"
    path.write_text(f'name = "d"\n[distill]\nfolders = "{tmp_path}/none"\n')
    assert cli.main(["pipeline", str(path), "--runs", str(tmp_path / "runs")]) == 2
    assert "none: no such folder" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_changed_folders_are_refused_as_other_input(asked: tuple[Path, list[Question]], tmp_path: Path) -> None:
    folder = shutil.copytree(asked[0], tmp_path / "tables")
    config = configured(folder, teachers=["solution"], num=1, num_draws=1)
    run_pipeline(config, tmp_path / "run")
    next(folder.rglob("instruction.md")).write_text("Another question.\n")
    with pytest.raises(ConfigError, match="other input"):
        run_pipeline(config, tmp_path / "run")
