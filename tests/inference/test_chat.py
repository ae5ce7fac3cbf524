"""`m2forge chat`: what is shown, what the model is asked, tools that wait for the user, Ctrl-C."""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from m2forge import LLM, SamplingParams, cli
from m2forge.inference.chat import DENIED, Chat, WorkspaceTools, printable
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.parser import ContentDelta, Event
from tests.gateway.dialogue import minimax
from tests.gateway.live import CONTEXT
from tests.inference.folder import write_model
from tests.inference.scripted import LLMEngine, script_engine

HELLO = Message("assistant", "Hello there.", "A greeting.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chat") / "model", context=CONTEXT)


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[WorkspaceTools]:
    with WorkspaceTools(tmp_path / "work") as made:
        yield made


def offered(tools: WorkspaceTools) -> list[Tool]:
    tools.switch("on")
    try:
        return tools.offered
    finally:
        tools.switch("off")


def converse(
    folder: Path, tools: WorkspaceTools, lines: list[str], *, is_terminal: bool = False, system: str | None = None
) -> tuple[str, list[Message]]:
    """What is shown, and the conversation at the end."""
    left, shown = iter(lines), io.StringIO()
    console = Console(file=shown, highlight=False, soft_wrap=True, force_terminal=is_terminal, width=80)
    with LLM(folder) as llm:
        chat = Chat(llm, SamplingParams(), tools, lambda prompt: next(left, None), console, system=system)
        chat.run()
    return shown.getvalue(), chat.messages


def prompt_text(engine: LLMEngine, number: int) -> str:
    return minimax().tokenizer.decode(engine.prompts[number].ids.tolist())


def test_an_answer_is_shown_with_its_thinking_dim(
    folder: Path, tools: WorkspaceTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = script_engine(monkeypatch, [HELLO, HELLO, HELLO])
    shown, messages = converse(folder, tools, ["Hi.", "", "Again."], system="Be brief.")
    assert shown == "A greeting.\n\nHello there.\n" * 2
    assert [message.role for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "Be brief." in prompt_text(engines[0], 1)
    assert "Hello there." in prompt_text(engines[0], 1)
    shown, _ = converse(folder, tools, ["Hi."], is_terminal=True)
    dim = shown.split("\x1b[0m")
    assert "".join(part.removeprefix("\x1b[2m") for part in dim if part.startswith("\x1b[2m")).startswith("A greeting.")
    assert "\x1b[2m" not in shown[shown.index("Hello") :].partition("there.")[0]


def test_reset_forgets_the_conversation_but_not_the_system(
    folder: Path, tools: WorkspaceTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = script_engine(monkeypatch, [HELLO, HELLO])
    _, messages = converse(folder, tools, ["Hi.", "/reset", "Who?", "/exit", "not read"], system="Be brief.")
    assert [message.content for message in messages] == ["Be brief.", "Who?", "Hello there."]
    assert "Hi." not in prompt_text(engines[0], 1)


def test_tools_are_listed_and_switched_by_name(folder: Path, tools: WorkspaceTools) -> None:
    shown, _ = converse(folder, tools, ["/tools", "/tools shell", "/tools shel", "/tool", "/help"])
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines[:8]] == ["off"] * 4 + ["on"] + ["off"] * 3
    assert lines[8] == "there is no tool 'shel'; did you mean 'shell'?"
    assert lines[9] == "there is no command '/tool'; did you mean '/tools'?"
    assert lines[10].startswith("/tools ")
    assert [tool.name for tool in tools.offered] == ["shell"]


def test_a_call_runs_in_the_workspace_once_it_is_confirmed(
    folder: Path, tools: WorkspaceTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = (
        ToolCall("write_file", {"path": "a.txt", "content": "six"}),
        ToolCall("shell", {"command": "touch denied"}),
    )
    says = [
        Message("assistant", "", "Work.", calls),
        Message("assistant", "", "More.", (ToolCall("shell", {"command": "cat a.txt; pwd"}),)),
        Message("assistant", "Done."),
    ]
    engines = script_engine(monkeypatch, says, offered(tools))
    shown, messages = converse(folder, tools, ["/tools on", "Work.", "y", "n", "yes"])
    work = tmp_path / "work"
    assert (work / "a.txt").read_text() == "six"
    assert not (work / "denied").exists()
    results = [message.content for message in messages if message.role == "tool"]
    assert results == ["wrote 3 bytes", DENIED, f"six{work}\n"]
    assert 'shell {"command": "cat a.txt; pwd"}' in shown
    assert shown.endswith("Done.\n")
    assert DENIED in prompt_text(engines[0], 1)
    assert f"six{work}" in prompt_text(engines[0], 2)


def test_input_that_ends_at_a_question_runs_nothing(
    folder: Path, tools: WorkspaceTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = [Message("assistant", "", "Work.", (ToolCall("shell", {"command": "touch made"}),))]
    script_engine(monkeypatch, says, offered(tools))
    shown, messages = converse(folder, tools, ["/tools on", "Work."])
    assert shown.endswith("[stopped]\n")
    assert messages == []
    assert not (tmp_path / "work" / "made").exists()


def test_an_interrupt_stops_the_answer_and_keeps_its_content(
    folder: Path, tools: WorkspaceTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Message("assistant", "word " * 300, "Hm.")
    engines = script_engine(monkeypatch, [long, HELLO], delay_s=0.01)
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    show = Chat._show

    def show_and_interrupt(chat: Chat, event: Event, was_thinking: bool) -> bool:
        if isinstance(event, ContentDelta) and interrupt.ident is None:
            interrupt.start()
        return show(chat, event, was_thinking)

    monkeypatch.setattr(Chat, "_show", show_and_interrupt)
    shown, messages = converse(folder, tools, ["Talk.", "Hi."])
    assert "[stopped]" in shown
    assert [message.role for message in messages] == ["user", "assistant"] * 2
    assert 0 < len(messages[1].content) < len(long.content)
    assert long.content.startswith(messages[1].content)
    assert messages[3].content == "Hello there."
    assert engines[0].num_aborted == 1


def test_a_line_that_cannot_be_answered_is_taken_back(
    folder: Path, tools: WorkspaceTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_engine(monkeypatch, [HELLO])
    shown, messages = converse(folder, tools, ["word " * 2000, "Hi."])
    assert "leave no room in the context" in shown
    assert [message.content for message in messages] == ["Hi.", "Hello there."]


def test_a_model_cannot_operate_the_terminal() -> None:
    assert printable("a\x1b[2J\x9bb\r\n\tü👩‍🚀") == "a�[2J�b�\n\tü👩‍🚀"


def test_the_command_talks_through_a_pipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script_engine(monkeypatch, [HELLO])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi.\n/exit\nnot read\n"))
    options = ["--sampling", "temperature=0.5", "--set", "max_running=4"]
    assert cli.main(["chat", str(folder), *options]) == 0
    assert capsys.readouterr().out == "A greeting.\n\nHello there.\n"


def test_the_command_refuses_what_it_cannot_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["m2-nan"], "did you mean 'm2-nano'?"),
        ([str(folder), "--sampling", "temprature=1"], "did you mean 'temperature'?"),
        ([str(folder), "--sampling", "n=2"], "an answer is one completion"),
        ([str(folder), "--set", "num_block=1"], "did you mean 'num_blocks'?"),
        ([str(folder), "--set", "stale_cache=keep"], "chat never updates the weights"),
    ):
        assert cli.main(["chat", *arguments]) == 2
        assert message in capsys.readouterr().err
