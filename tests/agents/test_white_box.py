"""The loop against a gateway on a socket: every context that it makes is recorded, and rebuilt token for token."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from m2forge.agents.call_log import Applied, read_log
from m2forge.agents.config import DropToolOutputConfig, SlidingWindowConfig, SubAgentConfig, SummariseConfig
from m2forge.agents.config import WhiteBoxConfig as Settings
from m2forge.agents.loop_agent import CUT_OFF, LOG_FILE, NOTHING, WhiteBoxAgent
from m2forge.agents.operation import NOTES_HEAD, SlidingWindow, View
from m2forge.agents.rebuild import CallState, rebuild
from m2forge.agents.tool import ToolRunner, function_tool
from m2forge.errors import ConfigError
from m2forge.gateway.config import Budget
from m2forge.gateway.episodes.episode import Episode
from m2forge.protocols import Agent, AgentEnd, AgentResult, Endpoint
from m2forge.records import Call, Domain, JsonValue, Task
from m2forge.sandbox.process import ProcessSandbox
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool
from tests.gateway.dialogue import FORMATS, call, minimax
from tests.gateway.live import Live, check_recorded, live, num_new_tokens

TASK = Task("t", Domain.AGENT, "Do it.")
DONE = Message("assistant", "done", "Enough.")


@function_tool
async def echo(text: str, wait_s: float = 0.0) -> str:
    """Says it again."""
    await asyncio.sleep(wait_s)
    return text * 3


def say(*calls: Any, content: str = "", thinking: str = "Hm.") -> Message:
    return Message("assistant", content, thinking, calls)


class Scene:
    """One attempt over a script, with what came of it."""

    def __init__(self, gateway: Live, episode: Episode, result: AgentResult, format: ChatFormat) -> None:
        self.gateway, self.episode, self.result, self.format = gateway, episode, result, format
        self.log = read_log(result.transcript[LOG_FILE])

    def recorded(self) -> dict[str, Call]:
        """By the ids of the answers."""
        requests, calls = self.episode.requests, self.episode.calls()
        ids = [entry.id for entry in self.log if hasattr(entry, "id")]
        found = {id: requests.named(id) for id in ids}
        return {id: calls[request.first_call] for id, request in found.items() if request is not None}

    def states(self) -> list[CallState]:
        """Of each call, after they were checked against what the gateway recorded, and that against the engine."""
        check_recorded(self.gateway, self.episode)
        states = rebuild(self.log, self.format, self.gateway.run(self.recorded))
        assert len(states) == self.episode.num_calls
        return states

    def shown(self) -> list[str]:
        """The messages of the last call, in short."""
        return [f"{message.role}: {message.content}" for message in self.states()[-1].messages]

    def divergences(self) -> dict[str, int]:
        return {str(kind): number for kind, number in self.episode.num_divergences.items() if number}


@contextlib.contextmanager
def attempt(
    folder: Path,
    says: Sequence[Message],
    runners: Sequence[ToolRunner] = (echo,),
    *,
    name: str = "minimax_m2",
    budget: Budget | None = None,
    delay_s: float = 0.0,
    **settings: Any,
) -> Iterator[Scene]:
    format = FORMATS[name]()
    agent: Agent = WhiteBoxAgent(Settings(system="Work.", **({"tools": ()} | settings)), runners)
    offered = [Tool("any", "", {}), *(runner.tool for runner in runners)]
    with live(format, says, tools=offered, delay_s=delay_s) as gateway:
        episode, key = gateway.episode(budget=budget)
        result = asyncio.run(agent.run(TASK, Endpoint(gateway.url, key), ProcessSandbox(folder)))
        yield Scene(gateway, episode, result, format)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_one_turn_run_at_once_and_are_told_in_order(name: str, tmp_path: Path) -> None:
    waiting: list[asyncio.Event] = []

    @function_tool
    async def meet(text: str) -> str:
        """Waits for three; the last to come is the first to go."""
        waiting.append(asyncio.Event())
        mine = len(waiting)
        if mine == 3:
            waiting[1].set()
        else:
            await waiting[mine - 1].wait()
            waiting[mine - 2].set()
        return text * 3

    said = [say(*(call("meet", text=letter) for letter in "abc")), say(call("echo", text="d")), DONE]
    with attempt(tmp_path, said, [meet, echo], name=name, tool_timeout_s=60) as scene:
        assert (scene.result.end, scene.result.answer, scene.result.failure) == (AgentEnd.FINISHED, "done", None)
        assert scene.shown() == [
            "system: Work.",
            "user: Do it.",
            "assistant: ",
            "tool: aaa",
            "tool: bbb",
            "tool: ccc",
            "assistant: ",
            "tool: ddd",
        ]
        assert scene.states()[-1].messages[2].thinking == "Hm."
        assert scene.gateway.counts.num_encoded == num_new_tokens(scene.format, scene.gateway.engine.seen())
        assert scene.divergences() == {}


def test_no_more_calls_run_at_once_than_may(tmp_path: Path) -> None:
    running: list[int] = []
    num_running = 0

    @function_tool
    async def count(text: str) -> str:
        """Counts those that run."""
        nonlocal num_running
        num_running += 1
        running.append(num_running)
        await asyncio.sleep(0.01)
        num_running -= 1
        return text

    said = [say(*(call("count", text=letter) for letter in "abcdefg")), DONE]
    with attempt(tmp_path, said, [count], max_parallel_calls=3) as scene:
        assert [line[-1] for line in scene.shown()[3:]] == list("abcdefg")
    assert max(running) == 3


@pytest.mark.slow
def test_what_goes_wrong_is_told_to_the_model(tmp_path: Path) -> None:
    @function_tool
    def fail(number: int) -> None:
        """Fails."""
        raise ValueError(f"not {number}") if number == 7 else TimeoutError("the server's")

    calls = [
        call("ecko", text="a"),
        call("echo"),
        call("echo", text="a", more=1),
        call("fail", number=7),
        call("fail", number=8),
        call("echo", text="slow", wait_s=60),
        call("echo", text="x" * 200),
    ]
    said = [say(*calls), say(thinking="Nothing to say."), DONE]
    with attempt(tmp_path, said, [echo, fail], tool_timeout_s=1.5, max_tool_chars=100) as scene:
        assert scene.shown()[3:] == [
            "tool: error: there is no tool 'ecko'; did you mean 'echo'?",
            *[line for line in scene.shown()[4:6] if "error: echo was not called: " in line and "text" in line],
            "tool: error: ValueError: not 7",
            "tool: error: TimeoutError: the server's",
            "tool: error: echo did not end within 1.5 s",
            f"tool: {'x' * 50}\n[500 characters left out]\n{'x' * 50}",
            "assistant: ",
            f"user: {NOTHING}",
        ]
        assert scene.result.end is AgentEnd.FINISHED


def test_an_answer_that_is_cut_off_is_told_and_goes_on(tmp_path: Path) -> None:
    with attempt(tmp_path, [Message("assistant", "long " * 50, "Hm."), DONE], max_tokens=40) as scene:
        assert scene.shown()[-1] == f"user: {CUT_OFF}"
        assert scene.result.answer == "done"


def test_edits_of_one_turn_are_all_made(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("echo a b c d\n")
    (tmp_path / "run.sh").chmod(0o755)
    edits = [call("edit_file", path="run.sh", old=letter, new=letter.upper()) for letter in "abd"]
    said = [say(*edits, call("read_file", path="run.sh")), say(call("shell", command="./run.sh")), DONE]
    with attempt(tmp_path, said, (), tools=("shell", "files")) as scene:
        assert scene.shown()[3:7] == [*["tool: edited"] * 3, "tool: echo A B c D\n"]
        assert scene.shown()[-1] == "tool: A B c D\n", "it is a program no more"


@pytest.mark.slow
def test_tools_work_in_the_sandbox(tmp_path: Path) -> None:
    said = [
        say(call("write_file", path="a/b.txt", content="one two")),
        say(call("edit_file", path="a/b.txt", old="two", new="three"), call("read_file", path="none")),
        say(call("edit_file", path="a/b.txt", old="e", new="x"), call("read_file", path="../up")),
        say(call("read_file", path="a/b.txt"), call("shell", command="cat a/b.txt; exit 3")),
        say(call("shell", command="echo begun; sleep 60")),
        DONE,
    ]
    with attempt(tmp_path, said, (), tools=("shell", "files"), tool_timeout_s=2.5) as scene:
        results = [line for line in scene.shown() if line.startswith("tool: ")]
        assert results[:2] == ["tool: wrote 7 bytes", "tool: edited"]
        assert "none is not a file" in results[2]
        assert "found it 3 times" in results[3]
        assert "not a file inside the workspace" in results[4]
        assert results[5:7] == ["tool: one three", "tool: one three\n[exit status 3]"]
        assert results[7] == "tool: begun\n\n[ended after 2.5 s, the most a command may take]"


@pytest.mark.parametrize("name", FORMATS)
def test_a_sliding_window_is_rebuilt(name: str, tmp_path: Path) -> None:
    said = [*(say(call("echo", text=str(number))) for number in range(7)), DONE]
    window = SlidingWindowConfig(max_turns=3, keep_turns=2)
    with attempt(tmp_path, said, name=name, operations=(window,)) as scene:
        assert scene.shown()[2:] == ["assistant: ", "tool: 444", "assistant: ", "tool: 555", "assistant: ", "tool: 666"]
        assert scene.divergences() == {"truncated": 2}


@pytest.mark.parametrize("name", FORMATS)
def test_notes_by_the_model_are_rebuilt(name: str, tmp_path: Path) -> None:
    said = [
        *(say(call("echo", text=letter * 200)) for letter in "ab"),
        Message("assistant", "Seen a and b.", "What did I see?"),
        say(call("echo", text="c")),
        DONE,
    ]
    summarise = SummariseConfig(threshold=0.5, keep_turns=1, request="Notes!")
    with attempt(tmp_path, said, name=name, operations=(summarise,), context_tokens=3000) as scene:
        states = scene.states()
        assert states[2].messages[-1] == Message("user", "Notes!")
        assert scene.shown()[:3] == ["system: Work.", "user: Do it.", f"user: {NOTES_HEAD}Seen a and b."]
        assert scene.shown()[3:] == ["assistant: ", f"tool: {'b' * 600}", "assistant: ", "tool: ccc"]
        assert scene.divergences().keys() <= {"summarised", "template"}
        assert sum(isinstance(entry, Applied) for entry in scene.log) == 1


@pytest.mark.slow
def test_dropped_output_is_rebuilt(tmp_path: Path) -> None:
    said = [*(say(call("echo", text=letter * 100)) for letter in "abcd"), DONE]
    drop = DropToolOutputConfig(max_share=0.3, keep_share=0.2)
    with attempt(tmp_path, said, operations=(drop,), context_tokens=4300) as scene:
        tools = [line for line in scene.shown() if line.startswith("tool: ")]
        assert "tool: [300 characters of output dropped]" in tools
        assert tools[-1] == f"tool: {'d' * 300}"
        assert scene.divergences() == {"edited_text": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_sub_agents_have_conversations_of_their_own(name: str, tmp_path: Path) -> None:
    said = [
        say(call("delegate", instruction="Find a."), call("delegate", instruction="Find b.")),
        *(say(call("echo", text="x", wait_s=0.2)) for _ in range(2)),
        *(Message("assistant", "found it", "Good.") for _ in range(2)),
        DONE,
    ]
    with attempt(tmp_path, said, name=name, sub_agents=SubAgentConfig(system="Part.")) as scene:
        assert scene.shown() == [
            "system: Work.",
            "user: Do it.",
            "assistant: ",
            "tool: found it",
            "tool: found it",
        ]
        states = scene.states()
        assert sorted(state.context for state in states) == ["main", "main", *["main.0"] * 2, *["main.1"] * 2]
        inner = next(state for state in states if state.context == "main.1")
        assert [message.content for message in inner.messages] == ["Part.", "Find b."]
        assert "delegate" not in [tool.name for tool in inner.tools]
        assert scene.divergences() == {"new_conversation": 2}


def test_a_sub_agent_without_turns_says_so(tmp_path: Path) -> None:
    said = [say(call("delegate", instruction="Go.")), say(call("echo", text="x")), DONE]
    with attempt(tmp_path, said, sub_agents=SubAgentConfig(max_turns=1)) as scene:
        assert scene.shown()[-1] == "tool: [the sub-agent had no turns left before it was done]"


@pytest.mark.slow
def test_the_model_may_change_its_own_context(tmp_path: Path) -> None:
    said = [
        *(say(call("echo", text=letter * 30)) for letter in "abc"),
        say(call("echo", text="d" * 30), call("drop_tool_output", keep_results=1)),
        say(call("forget_old_turns", keep_turns=2), call("forget_old_turns", keep_turns="x")),
        say(call("summarise_context", summary="I know all.")),
        DONE,
    ]
    operations = (SlidingWindowConfig(), DropToolOutputConfig(), SummariseConfig())
    with attempt(tmp_path, said, operations=operations, offers_operations=True) as scene:
        states = scene.states()
        contents = [[message.content for message in state.messages if message.role == "tool"] for state in states]
        assert contents[4][:2] == ["[90 characters of output dropped]"] * 2
        assert contents[4][2:] == ["c" * 90, "d" * 90, "It is done after this turn."]
        assert contents[5][-1].startswith("error: forget_old_turns was not called")
        assert len([message for message in states[5].messages if message.role == "assistant"]) == 2
        assert scene.shown()[2:] == [
            f"user: {NOTES_HEAD}I know all.",
            "assistant: ",
            "tool: It is done after this turn.",
        ]


@pytest.mark.slow
def test_turns_and_time_and_budget_have_an_end(tmp_path: Path) -> None:
    endless = [say(call("echo", text="x"), content="going") for _ in range(9)]
    with attempt(tmp_path, endless, max_turns=3) as scene:
        assert (scene.result.end, scene.result.answer) == (AgentEnd.OUT_OF_TURNS, "going")
        assert len(scene.states()) == 3
    with attempt(tmp_path, endless, budget=Budget(max_calls=2)) as scene:
        assert scene.result.end is AgentEnd.FAILED
        assert "429" in str(scene.result.failure)
        assert len(scene.states()) == 2
    with attempt(tmp_path, endless, max_s=0.5, delay_s=0.05) as scene:
        assert (scene.result.end, scene.result.failure) == (AgentEnd.TIMEOUT, "time ran out after 0.5 s")
        scene.gateway.wait_until(lambda: scene.gateway.engine.num_aborted == 1)


def test_an_operation_that_fails_ends_the_attempt_with_its_log(tmp_path: Path) -> None:
    class Broken(SlidingWindow):
        def is_due(self, view: View) -> bool:
            return len(view.messages) > 2 and bool(1 / 0)

    task = Task("t", Domain.AGENT, "Do \ud800 it.")  # half a character, as JSON may hold it
    agent = WhiteBoxAgent(Settings(tools=()), [echo], [Broken(SlidingWindowConfig())])
    with live(minimax(), [say(call("echo", text="x"))], tools=[echo.tool]) as gateway:
        _, key = gateway.episode()
        result = asyncio.run(agent.run(task, Endpoint(gateway.url, key), ProcessSandbox(tmp_path)))
    assert (result.end, result.failure) == (AgentEnd.FAILED, "ZeroDivisionError: division by zero")
    messages = [
        message for entry in read_log(result.transcript[LOG_FILE]) for message in getattr(entry, "messages", ())
    ]
    assert [message.content for message in messages[1:]] == ["Do ? it.", "xxx"]


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.agents.client.RETRY_S", 0.001)
    agent = WhiteBoxAgent(Settings(tools=()))
    result = asyncio.run(agent.run(TASK, Endpoint("http://127.0.0.1:9", "key"), ProcessSandbox(tmp_path)))
    assert result.end is AgentEnd.FAILED
    assert "did not respond in 5 attempts" in str(result.failure)


def test_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    class Twin:
        tool, is_timed = echo.tool, True

        async def run(self, arguments: Mapping[str, JsonValue]) -> str:
            return ""

    with live(minimax()) as gateway:
        _, key = gateway.episode()
        agent = WhiteBoxAgent(Settings(), [echo, Twin()])
        result = asyncio.run(agent.run(TASK, Endpoint(gateway.url, key), ProcessSandbox(tmp_path)))
    assert ConfigError.__name__ in str(result.failure)
