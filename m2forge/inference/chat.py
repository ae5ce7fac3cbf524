"""`m2forge chat`: a conversation with a model in the terminal; lines in, streamed answers out.

Thinking is dim. With `/tools` the model may use a shell and files of the workspace; each call is shown, and runs only
if the user confirms it. Ctrl-C stops the current answer, whose content so far stays in the conversation. Without a
terminal it reads lines from standard input until it ends and writes plain text.
"""

import asyncio
import contextlib
import json
import sys
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from m2forge.agents.tool import EditTool, ReadTool, ShellTool, ToolRunner, WriteTool, answer_call
from m2forge.errors import EngineError, M2ForgeError, suggest
from m2forge.inference.config import LLMConfig, SamplingParams
from m2forge.inference.llm import LLM
from m2forge.loop_thread import LoopThread
from m2forge.sandbox.process import ProcessSandbox
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.parser import ContentDelta, Event, ThinkingDelta

TOOL_TIMEOUT_S = 120.0
MAX_RESULT_CHARS = 20_000
COMMANDS = {
    "/tools": "list the tools; `/tools on`, `/tools off` and `/tools NAME` switch them",
    "/reset": "forget the conversation",
    "/help": "show this list",
    "/exit": "end, as Ctrl-D does",
}
DENIED = "error: the user did not allow this call"

ReadLine: TypeAlias = Callable[[str], str | None]
"""Shows a prompt and reads a line, without its end; None: there are no more."""


def run_chat(
    model: str,
    config: LLMConfig,
    params: SamplingParams,
    *,
    system: str | None = None,
    workspace: Path | None = None,
    has_tools: bool = False,
    revision: str | None = None,
) -> None:
    """`workspace`: folder in which tools work, by default the current one; `has_tools`: whether they are on."""
    console, is_terminal = Console(highlight=False, soft_wrap=True), sys.stdin.isatty()
    with (
        LLM(model, revision=revision, **config.model_dump(mode="json", exclude_unset=True)) as llm,
        WorkspaceTools(workspace or Path.cwd()) as tools,
    ):
        if has_tools:
            tools.switch("on")
        if is_terminal:
            console.print(f"{model}: {', '.join(COMMANDS)}; Ctrl-C stops an answer", style="dim")
        Chat(llm, params, tools, read_terminal if is_terminal else read_pipe, console, system=system).run()


class WorkspaceTools:
    """The tools of the agents' loop in one folder; off until they are switched on."""

    def __init__(self, workspace: Path) -> None:
        sandbox, turn = ProcessSandbox(workspace), asyncio.Lock()
        runners: list[ToolRunner] = [ShellTool(sandbox, timeout_s=TOOL_TIMEOUT_S)]
        runners += [ReadTool(sandbox, turn), WriteTool(sandbox, turn), EditTool(sandbox, turn)]
        self._runners: Mapping[str, ToolRunner] = {runner.tool.name: runner for runner in runners}
        self._thread = LoopThread("m2forge-tools")
        self.active: set[str] = set()
        """Names of the tools that are on."""

    def __enter__(self) -> "WorkspaceTools":
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.close()

    @property
    def offered(self) -> list[Tool]:
        return [runner.tool for name, runner in self._runners.items() if name in self.active]

    def lines(self) -> list[str]:
        """One line per tool, for the user."""
        return [
            f"{'on ' if name in self.active else 'off'}  {name}: {runner.tool.description}"
            for name, runner in self._runners.items()
        ]

    def switch(self, what: str) -> str | None:
        """Switch all tools `on` or `off`, or one by its name; returns what is wrong with `what`, if anything."""
        if what in ("on", "off"):
            self.active = {*self._runners} if what == "on" else set()
        elif what in self._runners:
            self.active ^= {what}
        else:
            return f"there is no tool {what!r}; {suggest(what, self._runners)}"
        return None

    def call(self, call: ToolCall) -> Message:
        """Run a call; its failure is part of the result."""
        runners = {name: runner for name, runner in self._runners.items() if name in self.active}
        return self._thread.run(answer_call(call, runners, timeout_s=TOOL_TIMEOUT_S, max_chars=MAX_RESULT_CHARS))


class _NoReplyError(Exception):
    """The input ended where the user was asked something."""


class Chat:
    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        tools: WorkspaceTools,
        read_line: ReadLine,
        console: Console,
        *,
        system: str | None = None,
    ) -> None:
        self._llm, self._params, self._tools = llm, params, tools
        self._read_line, self._console = read_line, console
        self._beginning = [] if system is None else [Message("system", system)]
        self.messages = [*self._beginning]

    def run(self) -> None:
        """Converse until the user ends it."""
        while True:
            try:
                line = self._read_line("> ")
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self._console.print("\n/exit or Ctrl-D ends the conversation", style="dim")
                continue
            if line is None or line.strip() == "/exit":
                return
            if line.startswith("/"):
                self._command(*line.split(maxsplit=1))
            elif line.strip():
                self._converse(line)

    def _command(self, name: str, argument: str = "") -> None:
        if name == "/reset":
            self.messages = [*self._beginning]
        elif name == "/tools":
            problem = self._tools.switch(argument.strip()) if argument else None
            self._console.print("\n".join(self._tools.lines()) if problem is None else problem, markup=False)
        elif name == "/help":
            self._console.print("\n".join(f"{name}  {text}" for name, text in COMMANDS.items()), markup=False)
        else:
            self._console.print(f"there is no command {name!r}; {suggest(name, COMMANDS)}", markup=False)

    def _converse(self, text: str) -> None:
        """Answer one line, with as many tool calls as the model makes and the user allows."""
        before = [*self.messages]
        self.messages.append(Message("user", text))
        try:
            while calls := self._answer().tool_calls:
                self.messages += [self._act(call) for call in calls]
        except (KeyboardInterrupt, _NoReplyError):
            self._console.print("\n[stopped]", style="dim", markup=False)
            self._settle(before)
        except EngineError:
            raise
        except M2ForgeError as error:
            self._console.print(f"\nerror: {error}", style="red", markup=False)
            self._console.print("the line is taken back; /reset clears the conversation", style="dim")
            self.messages = before

    def _settle(self, before: list[Message]) -> None:
        """Leave a conversation that can go on: a stopped turn ends with an answer, or is taken back."""
        if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
            self.messages = before

    def _answer(self) -> Message:
        """Stream the next answer and add it to the conversation."""
        stream = self._llm.stream_chat(self.messages, self._params, tools=self._tools.offered)
        content, is_thinking = "", False
        try:
            for event in stream:
                is_thinking = self._show(event, is_thinking)
                content += event.text if isinstance(event, ContentDelta) else ""
        except KeyboardInterrupt:
            if content:
                self.messages.append(Message("assistant", content))
            raise
        message = stream.output.message
        self._console.print("" if message.content or message.thinking else "[no answer]", style="dim", markup=False)
        self.messages.append(message)
        return message

    def _show(self, event: Event, was_thinking: bool) -> bool:
        """Print a piece of the answer; returns whether it is thinking."""
        is_thinking = isinstance(event, ThinkingDelta)
        if isinstance(event, ContentDelta) and was_thinking:
            self._console.print("\n")
        if isinstance(event, ThinkingDelta | ContentDelta):
            style = "dim" if is_thinking else None
            self._console.print(printable(event.text), end="", style=style, markup=False)
            self._console.file.flush()
        return is_thinking

    def _act(self, call: ToolCall) -> Message:
        """Run a tool call if the user confirms it."""
        shown = printable(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
        self._console.print(shown, style="bold", markup=False)
        reply = self._read_line("run it? [y/N] ")
        if reply is None:
            raise _NoReplyError
        if reply.strip().lower() not in ("y", "yes"):
            return Message("tool", DENIED, tool_call_id=call.id)
        result = self._tools.call(call)
        self._console.print(printable(result.content), style="dim", markup=False)
        return result


def printable(text: str) -> str:
    """Without control characters, with which a model could operate the terminal."""
    return "".join("�" if unicodedata.category(sign) == "Cc" and sign not in "\n\t" else sign for sign in text)


def read_terminal(prompt: str) -> str | None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history of `input`)
    try:
        return input(prompt)
    except EOFError:
        return None


def read_pipe(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None
