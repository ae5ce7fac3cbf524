"""A run whose policy is scripted, so that an agent program of any kind does its task.

    python -m tests.rl.scripted_run rl CONFIG …             as `m2forge rl CONFIG …`

Asked to "Write the word WORD to answer.txt", the policy calls the shell tool that it is offered, by whatever name, and
answers `done` once it has seen the result. In every other attempt it writes another word. A prompt without a task or
without a tool is answered in one word.
"""

import asyncio
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import m2forge.rl.child_main as own
from m2forge.config import load_resolved
from m2forge.observe.log import set_up_logging
from m2forge.records import JsonValue
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.text.format import ChatFormat, make_format
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.tokenizer import load_tokenizer

MODULE = "tests.rl.scripted_run"
TASK = re.compile(r"Write the word (\w+) to answer\.txt")
SHELLS = {
    "exec_command": "cmd",
    "Bash": "command",
    "bash": "command",
    "run_shell_command": "command",
    "terminal": "command",
}
"""Names of shell tools, and of their argument."""
SEEN = "WROTE-2"
"""What the tool's result holds and the call does not."""
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent is told that a task is done."""


class Script:
    def __init__(self, format: ChatFormat) -> None:
        self._format, self._num_begun = format, 0

    def __call__(self, ids: tuple[int, ...]) -> Sequence[int]:
        text = self._format.tokenizer.decode(list(ids))
        tool = next((name for name in SHELLS if re.search(rf'"name": ?"{name}"|<{name}>|name="{name}"', text)), None)
        task = TASK.findall(text)
        if not task or tool is None:
            return self._written(Message("assistant", "Noted"))
        if SEEN in text and SUBMIT not in text:
            return self._written(Message("assistant", "done"))
        if SEEN in text:
            return self._called(tool, f"echo {SUBMIT}; echo done")
        self._num_begun += 1
        word = task[-1] if self._num_begun % 2 else "another"
        return self._called(tool, f"printf %s {word} > answer.txt; echo WROTE-$((1+1))")

    def _called(self, tool: str, command: str) -> list[int]:
        arguments: dict[str, JsonValue] = {SHELLS[tool]: command}
        if tool == "run_shell_command":
            arguments["is_background"] = False
        if tool.lower() == "bash":
            arguments["description"] = "Write the file"
        return self._written(Message("assistant", "", "Now.", (ToolCall(tool, arguments, ""),)))

    def _written(self, message: Message) -> list[int]:
        tools = [Tool(name, "", {"type": "object", "properties": {}}) for name in SHELLS]
        rendered = self._format.render([Message("user", "x"), message], tools)
        return [id for id, was_sampled in zip(rendered.ids, rendered.trained, strict=True) if was_sampled]


def run_sampler(run_dir: Path, descriptor: str, *_: str) -> None:
    (key,) = own.read_keys(1)
    from m2forge.rollout.config import ServerConfig
    from m2forge.rollout.server.app import make_app, make_server
    from m2forge.testing.scripted import ScriptedEngine
    from m2forge.train.run_dir import CONFIG_FILE

    config = load_resolved(RLConfig, run_dir / CONFIG_FILE)
    newest = Layout(run_dir).weight_store(config).newest()
    assert newest is not None, "the loop starts the sampler after the first version"
    tokenizer = load_tokenizer(Path(config.model))
    script = Script(make_format(config.gateway.format, tokenizer))
    engine = ScriptedEngine(tokenizer.vocab_size, version=newest[0], script=script, decode=tokenizer.decode_bytes)
    listener = socket.socket(fileno=int(descriptor))
    server = make_server(make_app(engine, ServerConfig(host=listener.getsockname()[0]), key))
    print("listening", flush=True)
    asyncio.run(server.serve(sockets=[listener]))


def main() -> int:
    kind, *arguments = sys.argv[1:]
    if kind == "rl":
        from tests.rl.other_children import run_loop

        return run_loop(MODULE)
    set_up_logging()
    processes = own.PROCESSES | {"sampler": run_sampler}
    processes[kind](Path(arguments[0]), *arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
