"""A program per attempt: it is given the gateway and the task, and its end is judged by one rule."""

import asyncio
import json
from pathlib import Path

import pytest

from m2forge.agents.attempt import AgentError, Answer, ErrorKind, Job, WorkerDiedError
from m2forge.agents.command import CommandAgent
from m2forge.agents.config import CommandConfig
from m2forge.agents.program import require_program
from m2forge.agents.workspace import Workspaces
from m2forge.config import build
from m2forge.errors import ConfigError
from m2forge.protocols import Endpoint
from m2forge.records import Domain, Task
from tests.sandbox.places import require

ENDPOINT = Endpoint("http://127.0.0.1:8500/", "m2f-key", "nano")


def attempt(folder: Path, script: str, instruction: str = "Do ß\nit.", **fields: object) -> Answer:
    given = {"command": ["sh", "-c", script], "timeout_s": 20.0, "sandbox": {"backend": "process"}} | fields
    config = build(CommandConfig, given)  # type: ignore[arg-type]  # checked there
    task = Task("t", Domain.AGENT, instruction, metadata={"files": {"src/a.txt": "1\r\n"}})

    async def run() -> Answer:
        workspace = Workspaces(folder, config.sandbox).open("attempt", task)
        try:
            answer = await CommandAgent(config).attempt(Job("attempt", task, ENDPOINT, (), workspace))
            await workspace.collect()
        finally:
            await workspace.stop()
        return answer

    return asyncio.run(run())


CONFINED: dict[str, object] = {"backend": "namespace", "max_memory_bytes": 64 << 20}


def test_the_environment_names_gateway_task_and_own_folders(tmp_path: Path) -> None:
    script = 'cat "$M2FORGE_TASK_FILE"; echo; echo "$M2FORGE_TASK"; env > env.txt; pwd >> env.txt'
    assert attempt(tmp_path, script, env={"MORE": "1"}).text == "Do ß\nit.\nDo ß\nit.\n"
    lines = (tmp_path / "attempt/workspace/env.txt").read_text().split("\n")
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:8500/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8500"
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        assert variables[name] == "m2f-key"
    assert (variables["M2FORGE_MODEL"], variables["MORE"]) == ("nano", "1")
    for name in ("HOME", "PWD", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        assert variables[name].startswith(f"{tmp_path}/attempt/"), name
    assert variables["PWD"] == str(tmp_path / "attempt/workspace")
    assert str(tmp_path / "attempt/workspace") in lines


def test_placeholders_are_replaced_and_other_braces_stay(tmp_path: Path) -> None:
    answer = attempt(
        tmp_path,
        'cat; cat "$HOME/.config/tool.json" src/a.txt; echo "$WHERE {model} ${X:-{key}}"; cat made/deep.txt',
        instruction="say {model}",
        stdin="{instruction}\n",
        env={"WHERE": "{workspace}"},
        files={"~/.config/tool.json": '{"url": "{base_url}/v1", "mcp": "{mcp_url}"}\n', "made/deep.txt": "{other}{}"},
    )
    assert answer.text.splitlines() == [
        "say {model}",
        '{"url": "http://127.0.0.1:8500/v1", "mcp": "http://127.0.0.1:8500/v1/mcp"}',
        "1",
        f"{tmp_path}/attempt/workspace nano [key]",
        "{other}{}",
    ]


def test_a_confined_program_sees_its_attempt_alone(tmp_path: Path) -> None:
    """Its folders are its own, the task's files and the settings are there, and nothing of this machine's."""
    require("namespace")
    (tmp_path / "secret").write_text("s")
    script = (
        'pwd; echo "$HOME $TMPDIR $OPENAI_BASE_URL"; cat src/a.txt "$M2FORGE_TASK_FILE" ~/.tool; echo; '
        f"cat {tmp_path}/secret; env | grep -c SECRET; touch $TMPDIR/t; echo made > made.txt; echo home > ~/answer.txt"
    )
    answer = attempt(tmp_path, script, sandbox=CONFINED, files={"~/.tool": "{workspace} {home}"}, env={"A": "1"})
    assert answer.text.split("\n") == [
        *("/workspace", "/tmp/home /tmp http://127.0.0.1:8500/v1", "1\r", "Do ß", "it./workspace /tmp/home", "0", "")
    ]
    assert b"No such file" in answer.transcript["stderr.txt"]
    assert (tmp_path / "attempt/workspace/made.txt").read_text() == "made\n", "the verifier sees it"
    assert attempt(tmp_path, script, sandbox=CONFINED, answer={"file": "~/answer.txt"}).text == "home\n"
    assert attempt(tmp_path, script, sandbox=CONFINED, answer={"file": "none.txt"}).text == ""


def test_what_a_confined_program_leaves_running_changes_nothing(tmp_path: Path) -> None:
    require("namespace")
    script = "(sleep 0.05; while :; do echo late > answer.txt; done) & echo said > answer.txt"
    for _ in range(3):
        assert attempt(tmp_path, script, sandbox=CONFINED, answer={"file": "answer.txt"}).text == "said\n"
        assert (tmp_path / "attempt/workspace/answer.txt").read_text() == "said\n"


@pytest.mark.parametrize(
    ("script", "kind", "failure"),
    [
        ("echo no >&2; exit 3", None, "status 3: no"),
        ("exec tail /dev/zero", ErrorKind.POLICY, "limit: the program ended with status"),
        ("no-such-program", None, "status 127"),
        ("head -c 70M /dev/zero > answer.txt", ErrorKind.POLICY, "limit: the answer cannot be read"),
    ],
)
def test_a_confined_program_that_fails_is_an_error_of_its_kind(
    tmp_path: Path, script: str, kind: ErrorKind | None, failure: str
) -> None:
    require("namespace")
    memory = 64 << 20 if "zero" in script and "tail" in script else 1 << 40
    with pytest.raises(AgentError) as caught:
        attempt(
            tmp_path,
            script,
            sandbox={"backend": "namespace", "max_memory_bytes": memory},
            answer={"file": "answer.txt"},
        )
    assert caught.value.kind is kind
    assert failure in str(caught.value)


def test_an_instruction_that_no_variable_holds_is_in_the_file(tmp_path: Path) -> None:
    script = 'wc -c < "$M2FORGE_TASK_FILE"; echo ${M2FORGE_TASK-none}'
    assert attempt(tmp_path, script, "x" * 200_000).text == "200000\nnone\n"
    assert attempt(tmp_path, script, "a\0b").text == "3\nnone\n"


def test_the_answer_is_stdout_a_file_or_nothing(tmp_path: Path) -> None:
    script = "echo said; echo written > answer.txt; echo home > ~/answer.txt"
    assert attempt(tmp_path, script).text == "said\n"
    assert attempt(tmp_path, script, answer={"file": "answer.txt"}).text == "written\n"
    assert attempt(tmp_path, script, answer={"file": "~/answer.txt"}).text == "home\n"
    assert attempt(tmp_path, script, answer={"file": "none.txt"}).text == ""
    assert attempt(tmp_path, script, answer="none").text == ""


@pytest.mark.parametrize(
    ("script", "kind", "failure"),
    [
        ("echo no >&2; exit 3", None, "status 3: no"),
        ("kill -11 $$", None, "status -11"),
        ("yes", ErrorKind.POLICY, "limit: the program exceeded the output limit"),
        ("echo Cannot allocate memory >&2; exit 1", ErrorKind.POLICY, "limit: the program ended with status 1"),
        ("no-such-program", None, "status 127"),
    ],
)
def test_a_program_that_fails_is_an_error_of_its_kind(
    tmp_path: Path, script: str, kind: ErrorKind | None, failure: str
) -> None:
    with pytest.raises(AgentError) as caught:
        attempt(tmp_path, script, sandbox={"backend": "process", "max_output_bytes": 1000, "on_flood": "kill"})
    assert caught.value.kind is kind
    assert failure in str(caught.value)


def test_a_program_that_is_killed_or_late_is_no_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(WorkerDiedError):
        attempt(tmp_path, "kill -9 $$")
    with pytest.raises(TimeoutError):
        attempt(tmp_path, "sleep 60", timeout_s=0.3)


def test_the_transcript_tells_output_and_exit(tmp_path: Path) -> None:
    transcript = attempt(tmp_path, "echo out; echo err >&2").transcript
    assert (transcript["stdout.txt"], transcript["stderr.txt"]) == (b"out\n", b"err\n")
    ending = json.loads(transcript["exit.json"])
    assert (ending["reason"], ending["status"], ending["num_stdout_bytes"]) == ("exited", 0, 4)


def test_keys_are_not_shown(tmp_path: Path) -> None:
    assert "m2f-key" not in repr(ENDPOINT)
    answer = attempt(tmp_path, "echo $OPENAI_API_KEY; env >&2; echo $OPENAI_API_KEY > a")
    assert answer.text == "[key]\n"
    assert b"OPENAI_API_KEY=[key]\n" in answer.transcript["stderr.txt"]
    assert not any(b"m2f-key" in content for content in answer.transcript.values())
    assert attempt(tmp_path, "echo $OPENAI_API_KEY > a", answer={"file": "a"}).text == "[key]\n"
    with pytest.raises(AgentError) as caught:
        attempt(tmp_path, "echo $OPENAI_API_KEY >&2; exit 1")
    assert "m2f-key" not in str(caught.value)


def test_the_key_stands_in_no_command_line(tmp_path: Path) -> None:
    """Neither the program's own nor that of the process that keeps it."""
    attempt(tmp_path, "cat /proc/$$/cmdline /proc/$PPID/cmdline > lines.txt")
    shown = (tmp_path / "attempt/workspace/lines.txt").read_bytes()
    assert b"/proc/$PPID/cmdline" in shown
    assert b"m2f-key" not in shown


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": []}, "command"),
        ({"command": ["run", "{instructions}"]}, "no placeholder {instructions}; did you mean 'instruction'"),
        ({"command": ["run"], "env": {"A": "{baseurl}"}}, "env: there is no placeholder {baseurl}; did you mean"),
        ({"command": ["run"], "files": {"../x": ""}}, "received '../x'"),
        ({"command": ["run"], "files": {"/etc/x": ""}}, "received '/etc/x'"),
        ({"command": ["run"], "answer": "stderr"}, "answer"),
        ({"command": ["run"], "timeout_s": 9.0, "sandbox": {"timeout_s": 8.0}}, "timeout_s (9) exceeds"),
    ],
)
def test_a_wrong_command_is_refused_with_the_config(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(CommandConfig, fields)  # type: ignore[arg-type]  # checked there
    assert message in str(caught.value)


def test_words_in_braces_that_resemble_no_placeholder_stay() -> None:
    build(CommandConfig, {"command": ["sh", "-c", "echo ${KEY} {print} {a,b} {}"], "files": {"a": "{x} {{key}}"}})


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.command: 'no-such-agent' is not in PATH"):
        require_program(("no-such-agent",), {}, ("PATH",))
    with pytest.raises(ConfigError, match="is not an executable file"):
        require_program((f"{tmp_path}/agent",), {}, ("PATH",))
    (tmp_path / "agent").write_text("#!/bin/sh\n")
    (tmp_path / "agent").chmod(0o755)
    require_program(("agent",), {"PATH": str(tmp_path)}, ())
