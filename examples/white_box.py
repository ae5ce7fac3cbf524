"""Our own agent through a gateway, and each of its contexts rebuilt and checked against what the gateway recorded.

The policy is a script, so that this runs anywhere in seconds: it counts files by a shell, hands a part to a sub-agent,
and forgets its oldest turns on the way. Another engine in its place makes it a rollout.

    python examples/white_box.py WORKSPACE
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from m2forge.agents.call_log import Called, read_log
from m2forge.agents.config import SlidingWindowConfig, SubAgentConfig, WhiteBoxConfig
from m2forge.agents.loop_agent import LOG_FILE, WhiteBoxAgent
from m2forge.agents.rebuild import rebuild
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.episodes.episode import Episode
from m2forge.gateway.server import GatewayServer
from m2forge.protocols import Endpoint
from m2forge.records import Call, Domain, Task
from m2forge.sandbox.process import ProcessSandbox
from m2forge.testing.scripted import ScriptedEngine
from m2forge.text.format import MINIMAX_M2_SPECIALS, ChatFormat, make_format
from m2forge.text.message import Message, ToolCall
from m2forge.text.tokenizer import train_tokenizer

CONTEXT = 16384


def say(thinking: str, *calls: ToolCall, content: str = "") -> Message:
    return Message("assistant", content, thinking, calls)


def shell(command: str) -> ToolCall:
    return ToolCall("shell", {"command": command})


SCRIPT = [
    say("Two files, at once.", shell("touch a.txt"), shell("touch b.txt")),
    say("Somebody else may make the third.", ToolCall("delegate", {"instruction": "Make c.txt."})),
    say("That is easy.", shell("touch c.txt")),
    say("It is there.", content="I made c.txt."),
    say("Now count.", shell("ls *.txt | wc -l")),
    say("Three.", content="There are 3 files."),
]


def engine_of(format: ChatFormat, script: Sequence[Message]) -> ScriptedEngine:
    """It says the script's messages one after the other, whatever it is asked."""
    lines = []
    for message in script:
        rendered = format.render([Message("user", ""), message])
        lines.append([id for id, is_sampled in zip(rendered.ids, rendered.trained, strict=True) if is_sampled])
    return ScriptedEngine(format.tokenizer.vocab_size, script=lambda ids: lines.pop(0))


def recorded(episode: Episode, ids: Sequence[str]) -> dict[str, Call]:
    """What the gateway recorded, by the ids of its answers."""
    requests, calls = episode.requests, episode.calls()
    found = {id: requests.named(id) for id in ids}
    return {id: calls[request.first_call] for id, request in found.items() if request is not None}


async def main(workspace: Path) -> None:
    format = make_format("minimax_m2", train_tokenizer(["the quick brown fox\n" * 9], 400, MINIMAX_M2_SPECIALS))
    config = WhiteBoxConfig(
        tools=("shell",),
        context_tokens=CONTEXT,
        operations=(SlidingWindowConfig(max_turns=2, keep_turns=1),),
        sub_agents=SubAgentConfig(),
    )
    engine = engine_of(format, SCRIPT)
    async with GatewayServer(engine, format, GatewayConfig(port=0), context=CONTEXT) as gateway:
        episode, key = gateway.episodes.create("count")
        task = Task("count", Domain.AGENT, "Make three text files and count them.")
        result = await WhiteBoxAgent(config).run(task, Endpoint(gateway.url, key), ProcessSandbox(workspace))
        log = read_log(result.transcript[LOG_FILE])
        calls = recorded(episode, [entry.id for entry in log if isinstance(entry, Called)])
        states = rebuild(log, format, calls)
        branches = {str(kind): number for kind, number in episode.num_divergences.items() if number}
    print(f"{result.end}: {result.answer}")
    for state in states:
        roles = " ".join(message.role for message in state.messages)
        print(f"{state.context:7} {calls[state.id].prompt_ids.size:5} tokens of prompt as recorded: {roles}")
    print(f"branches: {branches}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
