"""Distillation: task folders and teachers in, verified trajectories for `m2forge sft` out.

    folders ─▶ plan ─▶ attempt ─▶ verify ─▶ looping ─▶ leaked ─▶ dedup ─▶ select ─▶ write

    plan       each folder becomes `num_draws` attempts: a teacher, in turn, and a scaffold drawn from the variants
    attempt    the teacher works in a sandbox of the folder's image with one tool, a shell; a completion that is cut off
               or calls the tool wrongly rejects the attempt; then the folder's tests decide in a fresh sandbox
    looping    one command repeated too often, or no end within `max_turns`
    leaked     the attempt accessed files that only the verifier may see
    dedup      of attempts at one task with nearly the same commands the first stays
    select     at most `max_per_task` attempts at each task, the shortest

A model is any endpoint; a policy of ours is one behind `m2forge serve`. The teacher `solution` runs `solve.sh`. Written
are `trajectories.jsonl`, conversations in OpenAI's form as `m2forge sft` reads them, and `atif/`, the same as ATIF-v1.8
with the verdict's evidence.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Literal, cast

import m2forge
from m2forge.errors import ConfigError, NotFoundError
from m2forge.pipelines.config import SOLUTION, DistillConfig
from m2forge.pipelines.output import WriteFiles, WriteLines
from m2forge.pipelines.shared_stage import Dedup, Fields, Select, Verify
from m2forge.pipelines.shell_agent import (
    MAX_CHARACTERS,
    Malformed,
    Shell,
    call_message,
    calls_of,
    command_of,
    converse,
    result_message,
)
from m2forge.pipelines.stage import (
    Context,
    Item,
    Messages,
    Outcome,
    Passed,
    Pipeline,
    Rejection,
    Rule,
    SetStage,
    Source,
    Stage,
    stamp,
)
from m2forge.protocols import Sandbox
from m2forge.records import JsonValue, Task, Verdict
from m2forge.tasks.folders.folder import SOLVE_NAME
from m2forge.tasks.folders.folder_family import FOLDER_KEY, FolderFamily
from m2forge.tasks.folders.folder_host import FolderHost
from m2forge.tasks.task_set import split_of

ATIF_VERSION = "ATIF-v1.8"
HIDDEN = ("/tests", "/solution", "/logs/verifier", "reward.txt")
"""Paths that only the verifier may see."""
DONE = "Done."


def make_pipeline(config: DistillConfig) -> Pipeline:
    stages: tuple[Stage | SetStage, ...] = (
        _Plan(config),
        _Attempt(config),
        Verify(lambda item, _: Verdict.read(cast("Fields", item.data["verdict"])), least=config.least),
        Rule("looping", lambda item: _looping(item, config.max_repeats)),
        Rule("leaked", _leaked),
        _DedupTasks(Dedup(_commands_text, threshold=config.threshold)),
        Select(_task_id, lambda item: -float(len(_messages(item))), config.max_per_task),
        WriteLines("trajectories.jsonl", _line),
        WriteFiles("atif", atif_document),
    )
    return Pipeline(_Folders(config), stages)


# -- items -------------------------------------------------------------------------------------------------------------


def _task(item: Item) -> Task:
    return Task.read(cast("Fields", item.data["task"]))


def _task_id(item: Item) -> str:
    return str(cast("Fields", item.data["task"])["id"])


def _messages(item: Item) -> Messages:
    return cast("Messages", item.data["messages"])


def commands_of(messages: Messages) -> list[str]:
    """The commands that a conversation has run, in order."""
    return [command_of(call) for message in messages for call in calls_of(message)]


def _commands_text(item: Item) -> str:
    return "\n".join(commands_of(_messages(item)))


def _looping(item: Item, max_repeats: int) -> Passed | Rejection:
    if item.data["ended"] != "answer":
        return Rejection("no end", {"num_messages": len(_messages(item))})
    counts = Counter(" ".join(command.split()) for command in commands_of(_messages(item)))
    command, num = max(counts.items(), key=lambda pair: pair[1], default=("", 0))
    return Rejection("looping", {"command": command, "times": num}) if num > max_repeats else item


def _leaked(item: Item) -> Passed | Rejection:
    instruction = _task(item).instruction
    for message in _messages(item):
        if message["role"] in ("assistant", "tool"):
            text = json.dumps(message, ensure_ascii=False)
            for name in HIDDEN:
                if name in text and name not in instruction:
                    return Rejection("leaked", {"name": name, "role": message["role"]})
    return item


def _line(item: Item) -> dict[str, JsonValue]:
    metadata: Fields = {
        "task": _task_id(item),
        "teacher": item.data["teacher"],
        "draw": item.data["draw"],
        "verdict": item.data["verdict"],
    }
    return {"id": item.id, "messages": item.data["messages"], "tools": item.data["tools"], "metadata": metadata}


class _DedupTasks(SetStage):
    """Near-duplicates among the attempts at each task."""

    def __init__(self, dedup: Dedup) -> None:
        self.name, self._dedup = dedup.name, dedup

    def process_all(self, items: Iterable[Item], context: Context) -> Iterator[Outcome]:
        groups: dict[str, list[int]] = {}
        listed = list(items)
        for index, item in enumerate(listed):
            groups.setdefault(_task_id(item), []).append(index)
        outcomes: dict[int, Outcome] = {}
        for indices in groups.values():
            made = self._dedup.process_all([listed[index] for index in indices], context)
            outcomes |= dict(zip(indices, made, strict=True))
        yield from (outcomes[index] for index in range(len(listed)))


# -- source and plan ---------------------------------------------------------------------------------------------------


class _Folders(Source):
    name = "folders"

    def __init__(self, config: DistillConfig) -> None:
        self._config = config

    def fingerprint(self) -> str:
        path = Path(self._config.folders).absolute()
        if not path.is_dir():
            raise NotFoundError(
                f"distill.folders: {path}: no such folder; relative paths count from the working directory"
            )
        return f"{path} {stamp(path)}"

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        family = FolderFamily(Path(self._config.folders))
        for problem in family.rejected:
            yield Rejection("unusable folder", {"error": problem}, id=problem.split(":", 1)[0])
        chosen = [task for task in family.tasks if split_of(task) == self._config.split]
        if not chosen:
            raise ConfigError(f"distill.folders: no task folder of the split {self._config.split!r}; set another split")
        for task in chosen[: self._config.num]:
            yield Item(task.id, {"task": asdict(task)})


class _Plan(Stage):
    """Assigns each attempt its teacher and its scaffold."""

    name = "plan"

    def __init__(self, config: DistillConfig) -> None:
        self._config = config

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        config, variants = self._config, self._config.scaffold
        rng = context.random(item)
        start = rng.randrange(len(config.teachers))
        made = []
        for draw in range(config.num_draws):
            scaffold: Fields = {
                "tool": rng.choice(variants.tools),
                "description": rng.choice(variants.descriptions),
                "system": rng.choice(variants.systems),
                "prompt": rng.choice(variants.prompts),
                "env": rng.choice(variants.environments),
            }
            teacher = config.teachers[(start + draw) % len(config.teachers)]
            made.append(item.adding(teacher=teacher, draw=draw, scaffold=scaffold))
        return made


# -- the attempt -------------------------------------------------------------------------------------------------------


class _Attempt(Stage):
    name = "attempt"
    runs_in: ClassVar[Literal["main", "threads", "processes"]] = "threads"

    def __init__(self, config: DistillConfig) -> None:
        self._config = config
        self._host = FolderHost(config.base_image)

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        task = _task(item)
        environment = context.run(self._host.environment(task, self._config.sandbox))
        sandbox = context.run(environment.open())
        try:
            shell = self._shell(item, sandbox)
            messages, ended = self._work(item, task, shell, context)
            verdict = context.run(self._host.verify(task, sandbox))
        except Malformed as error:
            return Rejection(error.reason, {"received": error.received[:MAX_CHARACTERS]})
        finally:
            context.run(sandbox.close())
        shown = cast("Fields", json.loads(json.dumps(asdict(verdict))))
        return item.adding(messages=messages, ended=ended, verdict=shown, tools=[shell.tool])

    def _work(self, item: Item, task: Task, shell: Shell, context: Context) -> tuple[Messages, str]:
        """The conversation, and how it ended."""
        scaffold = _scaffold(item)
        messages: list[Fields] = []
        if scaffold["system"]:
            messages.append({"role": "system", "content": scaffold["system"]})
        prompt = str(scaffold["prompt"]).replace("{instruction}", task.instruction)
        messages.append({"role": "user", "content": prompt})
        if item.data["teacher"] == SOLUTION:
            message = call_message(shell.name, _solution(task))
            (call,) = calls_of(message)
            result = result_message(call, shell.run(command_of(call), context))
            return [*messages, message, result, {"role": "assistant", "content": DONE}], "answer"
        draw = cast("int", item.data["draw"])
        return converse(
            shell, item, context, item.text("teacher"), messages, draw=draw, max_turns=self._config.max_turns
        )

    def _shell(self, item: Item, sandbox: Sandbox) -> Shell:
        scaffold = _scaffold(item)
        name, description, env = str(scaffold["tool"]), str(scaffold["description"]), scaffold["env"]
        return Shell(sandbox, name, description, cast("dict[str, str]", env), self._config.command_s)


def _scaffold(item: Item) -> Fields:
    return cast("Fields", item.data["scaffold"])


def _solution(task: Task) -> str:
    """The solution as one command."""
    path = Path(str(task.metadata[FOLDER_KEY])) / "solution" / SOLVE_NAME
    if not path.is_file():
        raise Malformed("no solution", "")
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(lines[1:] if lines and lines[0].startswith("#!") else lines).strip()
    if "/solution" in text:
        raise Malformed("the solution needs files of its own", text)
    return text


# -- ATIF --------------------------------------------------------------------------------------------------------------


def atif_document(item: Item) -> dict[str, JsonValue]:
    """An attempt in Harbor's trajectory format."""
    steps: list[JsonValue] = []
    current: dict[str, JsonValue] | None = None
    """The agent step that results belong to."""
    for message in _messages(item):
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            assert current is not None
            observation = cast("dict[str, list[JsonValue]]", current.setdefault("observation", {"results": []}))
            observation["results"].append({"source_call_id": message["tool_call_id"], "content": content})
            continue
        step: dict[str, JsonValue] = {"step_id": len(steps) + 1, "message": content}
        step["source"] = "agent" if role == "assistant" else role
        if role == "assistant":
            current = step
            if thinking := message.get("reasoning_content"):
                step["reasoning_content"] = thinking
            if calls := calls_of(message):
                step["tool_calls"] = [_atif_call(call) for call in calls]
        steps.append(step)
    agent: Fields = {
        "name": "m2forge distill",
        "version": m2forge.__version__,
        "model_name": item.data["teacher"],
        "tool_definitions": item.data["tools"],
    }
    extra: Fields = {"task": _task_id(item), "draw": item.data["draw"], "scaffold": item.data["scaffold"]}
    return {
        "schema_version": ATIF_VERSION,
        "session_id": item.id,
        "trajectory_id": item.id,
        "agent": agent,
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": {**extra, "verdict": item.data["verdict"]},
    }


def _atif_call(call: Fields) -> Fields:
    function = cast("Fields", call["function"])
    arguments: Fields = json.loads(str(function["arguments"]))
    return {"tool_call_id": call["id"], "function_name": function["name"], "arguments": arguments}
