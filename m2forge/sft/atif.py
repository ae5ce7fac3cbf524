"""Trajectories from ATIF files, Harbor's Agent Trajectory Interchange Format, versions 1.0 to 1.8.

A step becomes messages: `system` and `user` steps one each, an `agent` step an assistant message (message, reasoning,
tool calls) and a tool message per observed result. Special cases:

- A step with `is_copied_context` is trained where it was first recorded; one with `llm_call_count` 0 was written by a
  program. Both are context without loss.
- A result without a call id answers the first call of its step that has no result; if there is none, agents return it
  in the user role, and so does this reader.
- A system step within the conversation becomes a user message, because chat templates have a system prompt only at the
  start. One that manages the context ends the trajectory: what follows a `replace` starts another, with the system
  prompt and the recorded replacement before it; after any other change the context is unknown.
- Trajectories of embedded sub-agents are ordinary trajectories. Images, audio and references to other files are
  skipped and noted. Metrics are ignored.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from m2forge.errors import FormatError
from m2forge.records import JsonValue
from m2forge.sft.compressed_file import READ_ERRORS, read_all
from m2forge.sft.report import Note, Problem, Rejection, Report, show
from m2forge.sft.row_file import parse_object, tools_from_openai
from m2forge.sft.trajectory import Trajectory, check_order, sort_results
from m2forge.text.message import Message, ToolCall
from m2forge.unpack import UnpackConfig, UnpackError

VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
_MEDIA = {"image": Note.IMAGE, "audio": Note.AUDIO}


def read_atif(
    path: Path, report: Report, config: UnpackConfig | None = None, *, foreign: bool = False
) -> Iterator[Trajectory]:
    """The trajectories of one file. `config`: limits on decompression. With `foreign`, a JSON file of another kind is
    noted instead of refused."""
    location = str(path)
    try:
        document = parse_object(read_all(path, config or UnpackConfig()), location)
    except UnpackError as error:
        report.add_problem(Rejection(Problem.TOO_LARGE, location, str(error)))
        return
    except READ_ERRORS as error:
        report.add_problem(Rejection(Problem.TRUNCATED, location, str(error)))
        return
    except Rejection as rejection:
        cause = rejection.__cause__
        if isinstance(cause, json.JSONDecodeError):
            rejection = Rejection(rejection.problem, f"{path}:{cause.lineno}", cause.msg)
        report.add_problem(rejection)
        return
    if foreign and "schema_version" not in document:
        report.add_note(Note.NOT_ATIF, location)
        return
    yield from trajectories_from_atif(document, location, report)


def trajectories_from_atif(document: Mapping[str, JsonValue], location: str, report: Report) -> Iterator[Trajectory]:
    """One document's trajectories: usually one, more if its context was replaced or sub-agents are embedded."""
    try:
        yield from _Reader(document, location).run(report)
    except Rejection as rejection:
        report.add_problem(rejection)
    embedded = document.get("subagent_trajectories")
    for index, item in enumerate(embedded if isinstance(embedded, list) else ()):
        if isinstance(item, Mapping):
            inherited = {"schema_version": document.get("schema_version")}
            yield from trajectories_from_atif(
                {**inherited, **item}, f"{location}: subagent_trajectories[{index}]", report
            )


@dataclass
class _Segment:
    """The messages between two context replacements, without the system prompt."""

    messages: list[Message] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

    def add(self, message: Message, trained: bool) -> None:
        self.messages.append(message)
        self.trained.append(trained)


class _Reader:
    """Converts one document to trajectories; reports nothing unless the whole document is valid."""

    def __init__(self, document: Mapping[str, JsonValue], location: str) -> None:
        self._document = document
        self._location = location
        self._prompts: list[str] = []
        self._segments = [_Segment()]
        self._notes: list[tuple[Note, str]] = []
        self._context_known = True

    def run(self, report: Report) -> list[Trajectory]:
        version = self._get(self._document, "schema_version", "")
        if version not in VERSIONS:
            known = f"{VERSIONS[0]} to {VERSIONS[-1]}"
            self._reject(Problem.UNKNOWN_VERSION, "", f"{show(version)}; this reader knows {known}")
        agent = self._object(self._get(self._document, "agent", ""), "agent")
        tools = tools_from_openai(agent.get("tool_definitions"), self._location, "agent.tool_definitions")
        steps = self._get(self._document, "steps", "")
        if not isinstance(steps, list) or not steps:
            self._reject(Problem.BAD_VALUE, "steps", f"expected a list with steps in it, received {show(steps)}")
        for index, step in enumerate(steps):
            self._add_step(self._object(step, f"steps[{index}]"), f"steps[{index}]", index)
        if self._document.get("continued_trajectory_ref"):
            self._notes.append((Note.CONTINUED, str(self._document["continued_trajectory_ref"])))
        head = [Message("system", "\n\n".join(self._prompts))] if self._prompts else []
        trajectories = []
        for number, segment in enumerate(self._segments):
            if number and not self._is_complete(segment):
                continue
            messages = sort_results([*head, *segment.messages])
            try:
                check_order(messages)
            except FormatError as error:
                raise Rejection(Problem.BAD_ORDER, self._location, str(error)) from error
            location = f"{self._location}#{number}" if number else self._location
            trajectories.append(Trajectory(messages, tools, (*(False for _ in head), *segment.trained), location))
        for note, what in self._notes:
            report.add_note(note, self._location, what)
        return trajectories

    def _is_complete(self, segment: _Segment) -> bool:
        """Whether a continuation's starting context is recorded and it has an assistant message."""
        if segment.messages and segment.messages[0].role != "user":
            self._notes.append((Note.UNKNOWN_CONTEXT, "replaced by nothing that is recorded"))
            return False
        return any(message.role == "assistant" for message in segment.messages)

    def _add_step(self, step: Mapping[str, JsonValue], name: str, index: int) -> None:
        step_id = self._get(step, "step_id", name)
        if step_id != index + 1:
            self._reject(Problem.BAD_ORDER, f"{name}.step_id", f"expected {index + 1}, received {show(step_id)}")
        source = self._get(step, "source", name)
        if source not in ("system", "user", "agent"):
            self._reject(Problem.BAD_ROLE, f"{name}.source", f"{show(source)}; use system, user or agent")
        text = self._text(self._get(step, "message", name), f"{name}.message")
        if not self._context_known:
            return
        if source == "agent":
            self._add_agent_step(step, name, text)
            return
        management = self._object(step.get("extra") or {}, f"{name}.extra").get("context_management")
        if source == "system" and isinstance(management, Mapping) and management.get("boundary") != "append":
            self._change_context(management, "\n\n".join(self._results(step, name).unlinked), name)
            return
        text = "\n\n".join(filter(None, (text, *self._results(step, name).unlinked)))
        if source == "system" and not self._segments[-1].messages and len(self._segments) == 1:
            self._prompts.append(text)
            return
        if source == "system":
            self._notes.append((Note.NOTICE, name))
        self._segments[-1].add(Message("user", text), False)

    def _change_context(self, management: Mapping[str, JsonValue], replacement: str, name: str) -> None:
        if management.get("boundary") != "replace":
            self._notes.append((Note.UNKNOWN_CONTEXT, f"{name}: {show(dict(management))}"))
            self._context_known = False
            return
        self._notes.append((Note.REPLACED, name))
        self._segments.append(_Segment())
        if replacement:
            self._segments[-1].add(Message("user", replacement), False)

    def _add_agent_step(self, step: Mapping[str, JsonValue], name: str, text: str) -> None:
        copied = step.get("is_copied_context") or False
        if not isinstance(copied, bool):
            self._reject(Problem.BAD_VALUE, f"{name}.is_copied_context", f"expected a boolean, received {show(copied)}")
        thinking = step.get("reasoning_content") or ""
        if not isinstance(thinking, str):
            self._reject(Problem.BAD_VALUE, f"{name}.reasoning_content", f"expected text, received {show(thinking)}")
        calls = self._calls(step, name)
        segment = self._segments[-1]
        if text or thinking or calls:
            trained = not copied and step.get("llm_call_count") != 0
            segment.add(Message("assistant", text, thinking=thinking, tool_calls=calls), trained)
        results = self._results(step, name, calls)
        for call_id, content in results.linked:
            segment.add(Message("tool", content, tool_call_id=call_id), False)
        if results.unlinked:
            segment.add(Message("user", "\n\n".join(results.unlinked)), False)

    def _calls(self, step: Mapping[str, JsonValue], name: str) -> tuple[ToolCall, ...]:
        items = step.get("tool_calls") or []
        if not isinstance(items, list):
            self._reject(Problem.BAD_VALUE, f"{name}.tool_calls", f"expected a list, received {show(items)}")
        calls = []
        for index, item in enumerate(items):
            where = f"{name}.tool_calls[{index}]"
            call = self._object(item, where)
            function, arguments = self._get(call, "function_name", where), self._get(call, "arguments", where)
            if not isinstance(function, str) or not function:
                self._reject(Problem.BAD_VALUE, f"{where}.function_name", f"expected a name, received {show(function)}")
            if not isinstance(arguments, Mapping):
                self._reject(Problem.BAD_ARGUMENTS, f"{where}.arguments", show(arguments))
            calls.append(ToolCall(function, arguments, str(self._get(call, "tool_call_id", where))))
        return tuple(calls)

    def _results(self, step: Mapping[str, JsonValue], name: str, calls: tuple[ToolCall, ...] = ()) -> "_Results":
        observation = self._object(step.get("observation") or {}, f"{name}.observation")
        items = observation.get("results") or []
        if not isinstance(items, list):
            self._reject(Problem.BAD_VALUE, f"{name}.observation.results", f"expected a list, received {show(items)}")
        waiting = [call.id for call in calls]
        results = _Results()
        for index, item in enumerate(items):
            where = f"{name}.observation.results[{index}]"
            result = self._object(item, where)
            if result.get("subagent_trajectory_ref"):
                self._notes.append((Note.SUBAGENT, where))
            content, call_id = self._text(result.get("content") or "", f"{where}.content"), result.get("source_call_id")
            if call_id is None and waiting:
                call_id = waiting[0]
            if call_id is None:
                results.unlinked += [content] if content else []
            elif str(call_id) in waiting:
                waiting.remove(str(call_id))
                results.linked.append((str(call_id), content))
            else:
                self._reject(Problem.BAD_ORDER, f"{where}.source_call_id", f"no call {show(call_id)} waits in the step")
        return results

    def _text(self, content: JsonValue, name: str) -> str:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            self._reject(Problem.BAD_VALUE, name, f"expected text or a list of parts, received {show(content)}")
        texts = []
        for index, item in enumerate(content):
            part = self._object(item, f"{name}[{index}]")
            kind, text = part.get("type"), part.get("text")
            if kind == "text" and isinstance(text, str):
                texts.append(text)
            elif isinstance(kind, str) and kind in _MEDIA:
                self._notes.append((_MEDIA[kind], f"{name}[{index}]"))
                texts.append(f"[{kind}]")
            else:
                self._reject(Problem.BAD_VALUE, f"{name}[{index}]", f"expected a content part, received {show(item)}")
        return "\n".join(texts)

    def _object(self, value: JsonValue, name: str) -> Mapping[str, JsonValue]:
        if not isinstance(value, Mapping):
            self._reject(Problem.BAD_VALUE, name, f"expected an object, received {show(value)}")
        return value

    def _get(self, data: Mapping[str, JsonValue], key: str, name: str) -> JsonValue:
        if key not in data:
            self._reject(Problem.MISSING_KEY, name, f"no {key!r} among the keys {', '.join(data) or '(none)'}")
        return data[key]

    def _reject(self, problem: Problem, name: str, what: str) -> NoReturn:
        raise Rejection(problem, f"{self._location}: {name}" if name else self._location, what)


@dataclass
class _Results:
    """Tool results linked to calls by id, and results without a call."""

    linked: list[tuple[str, str]] = field(default_factory=list)
    unlinked: list[str] = field(default_factory=list)
