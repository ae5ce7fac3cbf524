"""A program as an agent against a gateway on a socket, over an engine whose every token is known."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from m2forge.agents.attempt import Answer, Job
from m2forge.agents.command import CommandAgent
from m2forge.agents.config import CommandConfig
from m2forge.agents.workspace import Workspaces
from m2forge.protocols import Endpoint
from m2forge.records import Domain, JsonValue, Task
from m2forge.text.message import Message, Tool
from tests.gateway.dialogue import FORMATS, call
from tests.gateway.live import check_recorded, live, num_new_tokens

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "black_box"
TASK = Task("count", Domain.AGENT, "How many lines has the file?\n")


def says(tool: str, last: Message) -> list[Message]:
    """Two calls at once, then one that builds on them, then the end."""
    both = (call(tool, command="printf 'a\\nb\\n' > f"), call(tool, command="echo 'ß💥' > g; cat missing"))
    return [
        Message("assistant", "I make it.", "First the file.", both),
        Message("assistant", "", "Now count.", (call(tool, command="cat f g | wc -l"),)),
        last,
    ]


def tool(name: str, description: str) -> Tool:
    properties: dict[str, JsonValue] = {"command": {"type": "string"}}
    return Tool(name, description, {"type": "object", "properties": properties, "required": ["command"]})


def run_example(
    name: str,
    *arguments: str,
    format_name: str,
    folder: Path,
    script: Sequence[Message],
    tools: Sequence[Tool],
    env: Mapping[str, str] | None = None,
) -> Answer:
    """Its answer, after it was checked that each token is recorded as the engine saw or drew it, and none twice."""
    format = FORMATS[format_name]()
    config = CommandConfig(command=(sys.executable, str(EXAMPLES / name), *arguments), env=env or {}, timeout_s=300)
    with live(format, script, tools=tools) as gateway:
        episode, key = gateway.episode()
        job = Job("attempt", TASK, Endpoint(gateway.url, key), (), Workspaces(folder).open("attempt", TASK))
        answer = asyncio.run(CommandAgent(config).attempt(job))
        assert episode.num_calls == len(script)
        check_recorded(gateway, episode)
        assert gateway.counts.num_encoded == num_new_tokens(format, gateway.engine.seen())
        assert not any(episode.num_divergences.values())
        prompt = format.tokenizer.decode(list(gateway.engine.seen()[-1][0]))
        assert "No such file" in prompt, "the model was not shown what its tool said"
        assert "First the file." in prompt, "thinking is missing from the history"
    return answer
