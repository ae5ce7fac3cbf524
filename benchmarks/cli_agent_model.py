"""The model that starts to learn the file tasks: SmolLM2-135M-Instruct, fine-tuned on few demonstrations of them.

It is fine-tuned on demonstrations of training tasks, more of them each time, until it solves `ENOUGH` of other training
tasks. Their attempts run in this process: its commands run in a temporary folder each, without mini-swe-agent. Held-out
tasks have no part in this.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli_agent_tasks import BASH, KINDS, SUBMIT, demonstration, prompt, write_file_demonstrations
from forge_model import fine_tune_on, make_base, random_network
from forge_probe import Attempt, Probe

from m2forge.agents.workspace import task_files
from m2forge.records import Submission, Task
from m2forge.tasks.task_file import JsonlFamily
from m2forge.tasks.task_set import TaskSet
from m2forge.text.message import Message, Tool
from m2forge.text.parser import Completion

SIZES = (3, 4, 5, 6, 8, 10, 12, 14, 17, 20, 25, 30)
"""Demonstrations of each kind on which the model as it comes is fine-tuned, two of them in a step."""
ENOUGH = 0.18
NUM_PROBED = 48
"""Tasks of each kind."""
MAX_TURNS, COMMAND_S = 4, 5
"""As configs/rl/smollm2-mini-swe.toml has them."""


@dataclass
class FileAttempt(Attempt):
    family: JsonlFamily = field(kw_only=True)
    folder: Path = field(kw_only=True)
    """The workspace."""

    @property
    def tools(self) -> Sequence[Tool]:
        return (BASH,)

    def take(self, completion: Completion) -> None:
        """As mini-swe-agent: commands are run, and one of them ends the attempt."""
        message = completion.message()
        self.messages.append(message)
        commands = [(call.id, call.arguments.get("command")) for call in message.tool_calls if call.name == "bash"]
        if not commands:
            self.messages.append(Message("user", "Call the tool bash once."))
        for id, command in commands:
            self.is_over = self.is_over or command == SUBMIT
            self.messages.append(Message("tool", self._run(str(command)), tool_call_id=id))
        self.is_solved = self.family.verify(self.task, Submission("", str(self.folder))).perf == 1

    def _run(self, command: str) -> str:
        try:
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=self.folder,
                timeout=COMMAND_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except (subprocess.TimeoutExpired, ValueError):
            return "status -1"
        return f"{done.stdout.decode(errors='replace')}status {done.returncode}"


def make_file_model(gguf: Sequence[Path], folder: Path, tasks: Sequence[Path], sizes: Sequence[int]) -> Path:
    """The model that solves enough, in `folder/model`; one that is there is taken. `tasks`: the task files."""
    dest = folder / "model"
    if dest.is_dir():
        return dest
    base, families = make_base(gguf, folder), [JsonlFamily(path) for path in tasks]
    probe = Probe(base)
    for num in sizes or SIZES:
        made = _fine_tune(base, folder / f"sft-{num}", families, num)
        probe.load(made, num)
        success = _success(probe, families)
        mean = sum(success.values()) / len(success)
        shown = ", ".join(f"{name} {value:.1%}" for name, value in success.items())
        print(f"{num} demonstrations of each kind: {mean:.1%} of training tasks ({shown})", flush=True)
        if mean >= ENOUGH:
            break
    made.rename(dest)
    return dest


def make_random_model(folder: Path, tasks: Sequence[Path]) -> Path:
    """A network that has learnt nothing, with a tokenizer of the demonstrations."""
    messages = [message for path in tasks for task in JsonlFamily(path).tasks[:20] for message in demonstration(task)]
    return random_network(folder, [message.content for message in messages])


def _fine_tune(base: Path, folder: Path, families: Sequence[JsonlFamily], num: int) -> Path:
    streams = [TaskSet(family, "train", seed=0) for family in families]
    shown = [stream.next(0, 0) for _ in range(num) for stream in streams]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "demonstrations.jsonl"
    write_file_demonstrations(path, shown)
    return fine_tune_on(path, base, folder)


def _success(probe: Probe, families: Sequence[JsonlFamily]) -> dict[str, float]:
    assert [family.name for family in families] == list(KINDS)
    with tempfile.TemporaryDirectory() as name:
        attempts: list[Attempt] = []
        for family in families:
            stream = TaskSet(family, "train", seed=1)
            attempts += [_attempt(family, stream.next(0, 0), Path(name) / str(at)) for at in range(NUM_PROBED)]
        return probe.share_solved(attempts, MAX_TURNS)


def _attempt(family: JsonlFamily, task: Task, folder: Path) -> FileAttempt:
    workspace = folder / family.name
    for path, text in task_files(task).items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text(text, encoding="utf-8")
    workspace.mkdir(parents=True, exist_ok=True)
    return FileAttempt(task, prompt(task.instruction), family=family, folder=workspace)
