"""A program is told whom to ask and what to do by its environment; how it ended and what it said is kept."""

import asyncio
import json
from pathlib import Path

import pytest

from m2forge.agents.black_box import BlackBoxAgent, write_transcript
from m2forge.agents.config import BlackBoxConfig
from m2forge.config import build
from m2forge.errors import ConfigError, ExistsError
from m2forge.protocols import Agent, AgentEnd, AgentResult, Endpoint
from m2forge.records import Domain, Task
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.process import ProcessSandbox

ENDPOINT = Endpoint("http://127.0.0.1:8500/", "m2f-key", "nano")


def attempt(folder: Path, script: str, instruction: str = "Do ß\nit.", **limits: object) -> AgentResult:
    agent: Agent = BlackBoxAgent(BlackBoxConfig(command=("sh", "-c", script), env={"MORE": "1"}, timeout_s=5))
    sandbox = ProcessSandbox(folder, build(SandboxConfig, limits))  # type: ignore[arg-type]  # any field of it
    return asyncio.run(agent.run(Task("t", Domain.AGENT, instruction), ENDPOINT, sandbox))


def test_the_environment_names_gateway_and_task(tmp_path: Path) -> None:
    result = attempt(tmp_path, 'cat "$M2FORGE_TASK_FILE"; echo; echo "$M2FORGE_TASK"; env > env.txt')
    assert result.answer == "Do ß\nit.\nDo ß\nit.\n"
    lines = (tmp_path / "env.txt").read_text().split("\n")
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:8500/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8500"
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        assert variables[name] == "m2f-key"
    assert (variables["M2FORGE_MODEL"], variables["MORE"], variables["HOME"]) == ("nano", "1", str(tmp_path))


def test_an_instruction_that_no_variable_holds_is_in_the_file(tmp_path: Path) -> None:
    script = 'wc -c < "$M2FORGE_TASK_FILE"; echo ${M2FORGE_TASK-none}'
    assert attempt(tmp_path, script, "x" * 200_000).answer == "200000\nnone\n"
    assert attempt(tmp_path, script, "a\0b").answer == "3\nnone\n"


@pytest.mark.parametrize(
    ("script", "end", "failure"),
    [
        ("exit 0", AgentEnd.FINISHED, None),
        ("exit 3", AgentEnd.FAILED, "exit status 3"),
        ("kill -9 $$", AgentEnd.FAILED, "killed by signal 9"),
        ("yes", AgentEnd.FAILED, "exceeded the output limit"),
        ("sleep 60", AgentEnd.TIMEOUT, "time ran out after"),
    ],
)
def test_every_end_is_told(tmp_path: Path, script: str, end: AgentEnd, failure: str | None) -> None:
    timeout_s = 0.3 if end is AgentEnd.TIMEOUT else 20.0
    result = attempt(tmp_path, script, timeout_s=timeout_s, max_output_bytes=1000, on_flood="kill")
    assert result.end is end
    assert result.failure == failure or (failure is not None and str(result.failure).startswith(failure))


def test_the_transcript_is_written_whole(tmp_path: Path) -> None:
    result = attempt(tmp_path / "work", "echo out; echo err >&2; exit 2")
    write_transcript(result, tmp_path / "kept")
    assert (tmp_path / "kept" / "stdout.txt").read_text() == "out\n"
    assert (tmp_path / "kept" / "stderr.txt").read_text() == "err\n"
    received = json.loads((tmp_path / "kept" / "exit.json").read_text())
    assert (received["reason"], received["status"], received["num_stdout_bytes"]) == ("exited", 2, 4)
    with pytest.raises(ExistsError):
        write_transcript(result, tmp_path / "kept")


def test_keys_are_not_shown(tmp_path: Path) -> None:
    assert "m2f-key" not in repr(ENDPOINT)
    result = attempt(tmp_path, "echo $OPENAI_API_KEY; env >&2")
    assert result.answer == "[key]\n"
    assert b"OPENAI_API_KEY=[key]\n" in result.transcript["stderr.txt"]
    assert not any(b"m2f-key" in content for content in result.transcript.values())


def test_the_key_stands_in_no_command_line(tmp_path: Path) -> None:
    """Neither the program's own nor that of the process that keeps it."""
    result = attempt(tmp_path, "cat /proc/$$/cmdline /proc/$PPID/cmdline > lines.txt")
    assert result.end == AgentEnd.FINISHED
    shown = (tmp_path / "lines.txt").read_bytes()
    assert b"/proc/$PPID/cmdline" in shown
    assert b"m2f-key" not in shown


def test_a_program_must_be_named() -> None:
    with pytest.raises(ConfigError, match="command"):
        build(BlackBoxConfig, {"command": []})
