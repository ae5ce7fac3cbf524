"""Agents of Python libraries and of the AI SDK, unmodified: plain and structured answers, streamed and not."""

import json
import shutil
from pathlib import Path

import pytest

from m2forge.gateway.dialects.types import Notice
from m2forge.text.message import Message, ToolCall
from tests.gateway.clients.stage import NODE, OPENHANDS, PYTHON, Stage, needs_clients, says, stage
from tests.gateway.dialogue import FORMATS, minimax
from tests.gateway.live import Scene

pytestmark = needs_clients
PROGRAMS = Path(__file__).parent / "programs"
COUNTS = [{"lines": 2}, {"lines": 3}]


def counts_by(tool: str) -> list[Message]:
    return [Message("assistant", "", "Done.", (ToolCall(tool, count),)) for count in COUNTS]


def written(count: dict[str, int]) -> Message:
    return Message("assistant", json.dumps(count), "Done.")


def check_work(on_stage: Stage) -> None:
    assert (on_stage.workspace / "f").read_text() == "a\nb\n"
    assert "No such file" in on_stage.format.tokenizer.decode(list(on_stage.gateway.engine.seen()[-1][0]))


def library(on_stage: Stage, *arguments: str) -> object:
    program = str(PROGRAMS / "libraries.py")
    url, key = on_stage.gateway.url, on_stage.key
    return json.loads(on_stage.run(str(PYTHON / "bin" / "python"), program, *arguments, url, key))


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    ("name", "output", "api", "notices"),
    [
        ("pydantic_ai", "text", "chat", []),
        ("pydantic_ai", "text", "responses", []),
        ("langchain", "text", "chat", []),
        ("langchain", "text", "responses", []),
        ("langchain", "text", "anthropic", []),
        ("langgraph", "text", "chat", [Notice.PARALLEL_TOOL_CALLS]),
        ("langgraph", "text", "anthropic", []),
        ("autogen", "text", "chat", []),
        ("autogen", "stream", "chat", []),
    ],
)
def test_a_library_answers_in_text(
    name: str, output: str, api: str, notices: list[str], format_name: str, tmp_path: Path
) -> None:
    with stage(FORMATS[format_name](), says("run", "command"), tmp_path) as on_stage:
        assert library(on_stage, name, output, api) == ["Two lines.", "Still two."]
        check_work(on_stage)
        on_stage.check(4, notices=notices)


@pytest.mark.parametrize(
    ("name", "output", "api", "tool", "notices"),
    [
        ("pydantic_ai", "tool", "chat", "final_result", [Notice.TOOL_CHOICE]),
        ("pydantic_ai", "native", "chat", None, [Notice.RESPONSE_FORMAT]),
        ("pydantic_ai", "native", "responses", None, [Notice.TEXT_FORMAT]),
        ("langchain", "tool", "chat", "Count", [Notice.TOOL_CHOICE]),
        ("langchain", "native", "chat", None, [Notice.RESPONSE_FORMAT]),
        ("langchain", "native", "responses", None, [Notice.TEXT_FORMAT]),
        ("langchain", "native", "anthropic", None, [Notice.OUTPUT_FORMAT]),
    ],
)
def test_a_library_answers_in_structure(
    name: str, output: str, api: str, tool: str | None, notices: list[str], tmp_path: Path
) -> None:
    last = [written(count) for count in COUNTS] if tool is None else counts_by(tool)
    with stage(minimax(), says("run", "command", last=last), tmp_path) as on_stage:
        assert library(on_stage, name, output, api) == COUNTS
        check_work(on_stage)
        on_stage.check(4, notices=notices)


@pytest.mark.parametrize(
    ("api", "notices", "last_notice"),
    [
        ("chat", [Notice.PARALLEL_TOOL_CALLS], Notice.RESPONSE_FORMAT),
        ("anthropic", [], Notice.OUTPUT_FORMAT),
    ],
)
def test_langgraph_asks_for_structure_after_its_graph(
    api: str, notices: list[str], last_notice: str, tmp_path: Path
) -> None:
    """Its last question is a conversation of its own, without tools."""
    last = [Message("assistant", "Two lines.", "Done."), Message("assistant", "Still two."), written(COUNTS[0])]
    with stage(minimax(), says("run", "command", last=last), tmp_path, Scene) as on_stage:
        assert library(on_stage, "langgraph", "native", api) == ["Two lines.", "Still two.", COUNTS[0]]
        assert (on_stage.workspace / "f").read_text() == "a\nb\n"
        on_stage.check(4, num_side=1, notices=notices)
        assert on_stage.gateway.run(on_stage.episode.calls)[-1].notices == (last_notice,)


@pytest.mark.parametrize(("output", "notice"), [("tool", Notice.TOOL_CHOICE), ("native", Notice.RESPONSE_FORMAT)])
def test_instructor_asks_again_after_a_wrong_answer(output: str, notice: str, tmp_path: Path) -> None:
    wrong, right = {"lines": 12}, {"lines": 2}
    script = [
        written(count) if output == "native" else Message("assistant", "", "Done.", (ToolCall("Count", count),))
        for count in (wrong, right)
    ]
    with stage(minimax(), script, tmp_path, Scene) as on_stage:
        assert library(on_stage, "instructor", output, "chat") == [right]
        on_stage.check(2, notices=[notice])


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_vercels_ai_sdk_answers_in_text(api: str, mode: str, format_name: str, tmp_path: Path) -> None:
    with stage(FORMATS[format_name](), says("run", "command"), tmp_path) as on_stage:
        assert vercel(on_stage, api, mode) == ["Two lines.", "Still two."]
        check_work(on_stage)
        on_stage.check(4)


@pytest.mark.parametrize(("api", "notice"), [("chat", Notice.RESPONSE_FORMAT), ("responses", Notice.TEXT_FORMAT)])
def test_vercels_ai_sdk_answers_in_structure(api: str, notice: str, tmp_path: Path) -> None:
    last = [written(count) for count in COUNTS]
    with stage(minimax(), says("run", "command", last=last), tmp_path) as on_stage:
        assert vercel(on_stage, api, "object") == COUNTS
        check_work(on_stage)
        on_stage.check(4, notices=[notice])


def vercel(on_stage: Stage, api: str, mode: str) -> object:
    # Node looks for packages beside the program.
    program = shutil.copy(PROGRAMS / "vercel.mjs", NODE)
    return json.loads(on_stage.run("node", str(program), api, mode, on_stage.gateway.url, on_stage.key))


@pytest.mark.skipif(not OPENHANDS.exists(), reason="OpenHands needs Python 3.12 or later")
def test_openhands(tmp_path: Path) -> None:
    with stage(minimax(), says("terminal", "command"), tmp_path) as on_stage:
        program = str(PROGRAMS / "openhands_agent.py")
        python = str(OPENHANDS / "bin" / "python")
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}
        answers = on_stage.run(python, program, on_stage.gateway.url, on_stage.key, env=env)
        assert json.loads(answers) == ["Two lines.", "Still two."]
        check_work(on_stage)
        on_stage.check(4, notices=[Notice.REASONING_EFFORT])
