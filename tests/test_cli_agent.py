"""The tasks on files that a CLI agent learns: verifiers, demonstrations as the agent sends them, the configuration."""

import asyncio
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from m2forge import cli
from m2forge.agents.attempt import Job
from m2forge.agents.command import CommandAgent
from m2forge.agents.workspace import Workspace, Workspaces
from m2forge.config import build, load
from m2forge.model.build import build as build_model
from m2forge.model.checkpoint import save_model
from m2forge.protocols import Endpoint
from m2forge.records import Submission, Task
from m2forge.rl.config import CommandAgentConfig, RLConfig
from m2forge.rl.eval import EvalResult
from m2forge.tasks.task_file import JsonlFamily
from m2forge.tasks.task_set import split_by_hash
from tests.gateway.dialogue import chatml
from tests.gateway.live import check_recorded, live, num_new_tokens
from tests.model.draw import SMALL

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs/rl/smollm2-mini-swe.toml"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script cli_agent_tasks.py, whose folder is the first on the path as when it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import cli_agent_tasks

    return cli_agent_tasks


def families(generator: Any, folder: Path) -> list[JsonlFamily]:
    return [JsonlFamily(path) for path in generator.write_tasks(folder / "tasks", num=5)]


def perf(family: JsonlFamily, task: Task, workspace: Workspace) -> float:
    return family.verify(task, Submission("", str(workspace.path))).perf


def test_file_tasks_are_solved_by_their_commands_alone(generator: Any, tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "workspaces")
    for family in families(generator, tmp_path):
        first, other = family.tasks[:2]
        idle, wrong, right = (workspaces.open(name, first) for name in ("idle", "wrong", "right"))
        for task, workspace in ((other, wrong), (first, right)):
            subprocess.run(["sh", "-c", str(task.metadata["reference"])], cwd=workspace.path, capture_output=True)
        assert [perf(family, first, each) for each in (idle, wrong, right)] == [0.0, 0.0, 1.0], first.instruction


def test_there_are_enough_distinct_file_tasks(generator: Any) -> None:
    tasks = [(kind, task.instruction) for kind in generator.KINDS for task in generator.file_tasks(kind)]
    splits = [split_by_hash(kind, instruction) for kind, instruction in tasks]
    assert len({instruction for _, instruction in tasks}) == len(tasks)
    assert splits.count("held_out") >= 400
    assert splits.count("train") >= 1000
    assert tasks == [(kind, task.instruction) for kind in generator.KINDS for task in generator.file_tasks(kind)]


def test_its_configuration_draws_every_kind_of_file_task(
    generator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = generator.write_tasks(tmp_path / "runs/smollm2-files/tasks")
    save_model(build_model(SMALL), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["rl", str(CONFIG), "--dry-run", "--set", "model=model"]) == 0
    config = build(RLConfig, tomllib.loads(capsys.readouterr().out))
    assert [tmp_path / key.partition("#")[0] for key in config.curriculum.family_keys] == tasks
    assert config.agent.kind == "command"


@pytest.mark.slow
def test_mini_swe_agent_sends_what_demonstrations_hold(
    generator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of the configuration, unmodified; the model says what the demonstration says, in many more tokens, and
    each is recorded as the engine saw or drew it."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    agent = load(RLConfig, CONFIG).agent
    assert isinstance(agent, CommandAgentConfig)
    files = {path: text.replace("max_tokens: 128", "max_tokens: 1024") for path, text in agent.files.items()}
    agent = agent.model_copy(update={"files": files})
    family = families(generator, tmp_path)[0]
    task, format = family.tasks[0], chatml()
    shown = generator.demonstration(task)
    answers = [index for index, message in enumerate(shown) if message.role == "assistant"]
    workspace = Workspaces(tmp_path / "workspaces").open("attempt", task)
    with live(format, [shown[index] for index in answers], tools=[generator.BASH]) as gateway:
        episode, key = gateway.episode()
        job = Job("attempt", task, Endpoint(gateway.url, key), (), workspace)
        asyncio.run(CommandAgent(agent).attempt(job))
        sent = [format.tokenizer.decode(list(ids)) for ids, _ in gateway.engine.seen()]
        check_recorded(gateway, episode)
        assert gateway.counts.num_encoded == num_new_tokens(format, gateway.engine.seen())
        assert not any(episode.num_divergences.values())
    rendered = [format.render(shown[:index], [generator.BASH], generation=True).ids for index in answers]
    assert sent == [format.tokenizer.decode(list(ids)) for ids in rendered]
    assert perf(family, task, workspace) == 1.0


def test_minutes_of_training_leave_evaluations_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import cli_agent

    commands = [(100.0, 400.0), (500.0, 800.0)]
    done = [EvalResult(step, 4, 0.5, 0.1, {}, 0, 40.0, at_s) for step, at_s in ((0, 170.0), (4, 300.0), (8, 650.0))]
    # The first ends 30 s after the start of the attempts, the last 150 s into the second command.
    assert cli_agent.training_s(commands, done) == [0.0, 300 - 170 - 40, 400 - 170 - 40 + 150 - 40]
