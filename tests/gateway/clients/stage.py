"""A real client as a program against a gateway on a socket, over a scripted engine: what it does, what was recorded.

The clients are installed by `make test-agents`, which names their folder in M2FORGE_AGENTS; without it the tests are
skipped.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from m2forge.gateway.episodes.episode import Episode
from m2forge.records import JsonValue
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, ToolCall
from tests.gateway.live import Live, Scene, ToolScene, check_recorded, live, num_new_tokens, offers_tools

FOLDER = Path(os.environ.get("M2FORGE_AGENTS", "")).absolute()
NODE, PYTHON, OPENHANDS = FOLDER / "node", FOLDER / "python", FOLDER / "openhands"
IS_SKIPPED = "M2FORGE_AGENTS" not in os.environ
FIRST, SECOND = "How many lines has f?", "And now?"
CONTEXT = 1 << 20
"""Enough for the prompts of CLI agents in the small vocabularies of tests."""
MAX_S = 100

needs_clients = [pytest.mark.agents, pytest.mark.skipif(IS_SKIPPED, reason="real clients; run with make test-agents")]


@dataclass(frozen=True)
class Stage:
    gateway: Live
    format: ChatFormat
    episode: Episode
    key: str
    workspace: Path
    home: Path

    def run(self, *command: str, env: Mapping[str, str] | None = None, said: str = "") -> str:
        """Run a program in the workspace with a home of its own; returns its standard output. `said`: its input."""
        path = os.pathsep.join([str(NODE / "node_modules" / ".bin"), os.environ["PATH"]])
        done = subprocess.run(
            command,
            cwd=self.workspace,
            env={"PATH": path, "HOME": str(self.home), "LANG": "C.UTF-8"} | dict(env or {}),
            input=said,
            capture_output=True,
            text=True,
            timeout=MAX_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def write(self, path: str, text: str) -> None:
        """Write a file of the home folder."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def check(self, num_calls: int, *, num_side: int = 0, notices: Sequence[str] = ()) -> None:
        """Every sampled token is recorded; the conversation is one chain, each token encoded once; side calls are
        conversations of their own; the conversation's last call has these notices."""
        check_recorded(self.gateway, self.episode)
        seen = self.gateway.engine.seen()
        is_main = [num_side == 0 or offers_tools(self.format.tokenizer.decode(list(prompt))) for prompt, _ in seen]
        main = [pair for pair, is_one in zip(seen, is_main, strict=True) if is_one]
        side = [prompt for (prompt, _), is_one in zip(seen, is_main, strict=True) if not is_one]
        assert (len(main), len(side)) == (num_calls, num_side)
        num_encoded = num_new_tokens(self.format, main) + sum(map(len, side))
        assert self.gateway.counts.num_encoded == num_encoded
        assert sum(self.episode.num_divergences.values()) == num_side
        calls = self.gateway.run(self.episode.calls)
        assert [call.notices for call, is_one in zip(calls, is_main, strict=True) if is_one][-1] == tuple(notices)


@contextlib.contextmanager
def stage(format: ChatFormat, says: Sequence[Message], folder: Path, scene: type[Scene] = ToolScene) -> Iterator[Stage]:
    workspace, home = folder / "workspace", folder / "home"
    workspace.mkdir()
    home.mkdir()
    with live(format, says, tools=(), context=CONTEXT, scene=scene) as gateway:
        yield Stage(gateway, format, *gateway.episode(), workspace, home)


def says(tool: str, argument: str, *, last: Sequence[Message] = (), **others: JsonValue) -> list[Message]:
    """Two calls at once of which one fails, one that builds on them, the answer; and an answer to the second turn."""

    def call(command: str) -> ToolCall:
        return ToolCall(tool, {argument: command, **others})

    return [
        Message("assistant", "I make it.", "First the file.", (call("printf 'a\\nb\\n' > f"), call("cat missing"))),
        Message("assistant", "", "Now count.", (call("wc -l f"),)),
        *(last or (Message("assistant", "Two lines.", "Done."), Message("assistant", "Still two.", "Again."))),
    ]
