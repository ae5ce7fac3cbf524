"""`m2forge init rl` writes examples/own, and these files work together: tasks, verifier, agent, model and configs."""

import asyncio
import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from m2forge.agents.attempt import Job
from m2forge.agents.command import CommandAgent
from m2forge.agents.workspace import Workspaces
from m2forge.cli import main
from m2forge.config import load
from m2forge.protocols import Endpoint
from m2forge.records import Domain, Submission, Task
from m2forge.rl.config import RLConfig
from m2forge.starter.rl.verifier import verify
from m2forge.text.message import Message
from tests.gateway.dialogue import FORMATS
from tests.gateway.live import check_recorded, live

OWN = Path(__file__).parent.parent / "examples" / "own"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starter") / "own"
    assert main(["init", "rl", str(folder)]) == 0
    return folder


def test_init_writes_exactly_the_example(written: Path) -> None:
    assert contents(written) == contents(OWN)
    assert contents(written).keys() == {"agent.py", "model.py", "rl.toml", "sft.toml", "tasks.jsonl", "verifier.py"}


def test_init_refuses_a_folder_that_is_not_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["init", "rl", str(tmp_path)]) == 2
    assert f"{tmp_path} exists and is not empty" in capsys.readouterr().err
    assert contents(tmp_path) == {"mine.txt": b"mine"}


@pytest.mark.slow
def test_the_tasks_pass_their_check(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(written)
    assert main(["tasks", "check", "tasks.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


@pytest.mark.slow
def test_the_configs_find_all_files(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(written)
    runpy.run_path("model.py", run_name="__main__")
    lines = Path("runs/demonstrations.jsonl").read_text().splitlines()
    shown = {json.loads(line)["messages"][0]["content"] for line in lines}
    tasks = {json.loads(line)["instruction"] for line in Path("tasks.jsonl").read_text().splitlines()}
    assert shown.isdisjoint(tasks)
    assert main(["sft", "sft.toml", "--dry-run"]) == 0
    # The fine-tuned model has the network and the tokenizer of the random one.
    assert main(["rl", "rl.toml", "--dry-run", "--set", "model=runs/random"]) == 0
    assert "100 held-out tasks before the first step and after the last" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "perf"),
    [
        ("200 20 10 5 2 1", 1.0),
        ("1 2 5 10 20 200", 1.0),
        ("200 20 10 5 1 1 1", 6 / 7),
        ("200 20 10 5 2", 0.0),
        ("200 20 10 8", 0.0),
        ("238", 0.0),
        ("", 0.0),
    ],
)
def test_the_verifier_wants_the_fewest_coins(answer: str, perf: float) -> None:
    assert verify(Task("238", Domain.AGENT, "Pay 238."), Submission(answer)).perf == perf


@pytest.mark.parametrize(
    ("said", "answer"), [(("20", "10", "2", "1"), "20 10 2 1\n"), (("20", "what?"), "20 what?\n"), (("50",), "50\n")]
)
def test_the_agent_pays_coin_by_coin(
    said: tuple[str, ...], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(OWN)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    task, format, config = Task("33", Domain.AGENT, "Pay 33."), FORMATS["minimax_m2"](), load(RLConfig, Path("rl.toml"))
    assert config.agent.kind == "command"
    with live(format, [Message("assistant", text) for text in said], tools=()) as gateway:
        episode, key = gateway.episode()
        job = Job("attempt", task, Endpoint(gateway.url, key), (), Workspaces(tmp_path).open("attempt", task))
        assert asyncio.run(CommandAgent(config.agent).attempt(job)).text == answer
        assert episode.num_calls == len(said)
        check_recorded(gateway, episode)
        assert not any(episode.num_divergences.values())
        assert ("13 left." in format.tokenizer.decode(list(gateway.engine.seen()[-1][0]))) == (len(said) > 1)
