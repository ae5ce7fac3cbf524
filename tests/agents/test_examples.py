"""The examples run as programs that know nothing of us, in a sandbox, through a gateway on a socket."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m2forge.text.message import Message
from tests.agents.program import EXAMPLES, run_example, says, tool

LAST = Message("assistant", "3", "Three lines.")
LONG = pytest.mark.long
CASES = [
    ("openai_sdk.py", ("--stream",), "minimax_m2"),
    ("anthropic_sdk.py", ("--stream",), "chatml"),
    ("openai_agents.py", ("--responses",), "chatml"),
    pytest.param("openai_agents.py", ("--stream",), "minimax_m2", marks=LONG),
    pytest.param("openai_sdk.py", ("--stream",), "chatml", marks=LONG),
    pytest.param("openai_sdk.py", (), "chatml", marks=LONG),
    pytest.param("openai_sdk.py", (), "minimax_m2", marks=LONG),
    pytest.param("anthropic_sdk.py", ("--stream",), "minimax_m2", marks=LONG),
    pytest.param("anthropic_sdk.py", (), "chatml", marks=LONG),
    pytest.param("anthropic_sdk.py", (), "minimax_m2", marks=LONG),
    pytest.param("openai_agents.py", ("--stream",), "chatml", marks=LONG),
    pytest.param("openai_agents.py", (), "minimax_m2", marks=LONG),
    pytest.param("openai_agents.py", ("--responses", "--stream"), "minimax_m2", marks=LONG),
    pytest.param("openai_agents.py", ("--responses", "--stream"), "chatml", marks=LONG),
]


@pytest.mark.parametrize(("name", "arguments", "format_name"), CASES)
def test_the_example_is_recorded_token_for_token(
    name: str, arguments: tuple[str, ...], format_name: str, tmp_path: Path
) -> None:
    answer = run_example(
        name,
        *arguments,
        format_name=format_name,
        folder=tmp_path,
        script=says("shell", LAST),
        tools=[tool("shell", "Run it.")],
    )
    assert answer.text == "3\n"
    assert (tmp_path / "attempt" / "workspace" / "g").read_text() == "ß💥\n"


def test_our_own_agent_is_rebuilt(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES.parent / "white_box.py"), str(tmp_path)]
    environment = {"PYTHONPATH": str(EXAMPLES.parent.parent), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "finished: There are 3 files."
    assert [line.split()[0] for line in lines[1:-1]] == ["main", "main", "main.0", "main.0", "main", "main"]
    assert lines[-2].endswith(": system user assistant tool")
    assert lines[-1] == "branches: {'truncated': 1, 'new_conversation': 1}"
