"""Claude Code, Codex and OpenCode, unmodified, train for two steps with every process killed in between.

`make test-agents` installs them and names their folder in M2FORGE_AGENTS. The policy is scripted, the tasks come from a
JSONL file, and a command in the workspace verifies them.
"""

import asyncio
import inspect
import json
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from m2forge.agents.attempt import AttemptResult, AttemptRunner
from m2forge.agents.preset import preset_names
from m2forge.agents.workspace import Workspaces
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.server import GatewayServer
from m2forge.model.build import build as build_model
from m2forge.model.checkpoint import save_model
from m2forge.model.preset import preset
from m2forge.protocols import Sandbox
from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.rl.attempts import attempt_sandbox, open_agent, require_agent
from m2forge.rl.config import AgentConfig
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.sandbox.config import SandboxConfig
from m2forge.testing.scripted import ScriptedEngine
from m2forge.text.format import MINIMAX_M2_SPECIALS, make_format
from m2forge.text.message import Tool
from m2forge.text.tokenizer import Tokenizer, train_tokenizer
from tests.rl.killed_run import run_with_kills, trained_artifacts
from tests.rl.scene import make_config
from tests.rl.scripted_run import Script
from tests.sandbox.places import problem

CONTEXT = 1 << 17
"""Enough for the prompts of these agents in a small vocabulary."""
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron")
LIMIT_S = 1200.0

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif("M2FORGE_AGENTS" not in os.environ, reason="real agents; run with make test-agents"),
]


def make_tokenizer() -> Tokenizer:
    sources = [inspect.getsource(module) for module in (inspect, textwrap, json, os, pytest)]
    return train_tokenizer(sources, 4096, MINIMAX_M2_SPECIALS)


def make_model(folder: Path) -> Path:
    """A network that is quick over long prompts, with a vocabulary of English and code."""
    tokenizer = make_tokenizer()
    tokenizer.save(folder / "tokenizer")
    sizes = {"vocab_size": tokenizer.vocab_size, "num_mtp": 0, "max_context": CONTEXT}
    config = preset("m2-nano").with_layers(1).model_copy(update=sizes)
    torch.manual_seed(0)
    model = build_model(config, torch.device("cpu"), torch.float32)
    save_model(model, folder / "model", companions=tuple((folder / "tokenizer").iterdir()))
    return folder / "model"


def write_tasks(path: Path) -> Path:
    lines = [
        {
            "id": word,
            "instruction": f"Write the word {word} to answer.txt",
            "files": {"README.md": "Nothing to see.\n"},
            "level": 0,
            "split": "train",
            "verifier": {"command": ["sh", "-c", f'test "$(cat answer.txt)" = {word}']},
        }
        for word in WORDS
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_does_a_task(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is written, its answer given, its calls recorded, and the family's tools are offered."""
    monkeypatch.setenv("PATH", path_of(name))
    sandbox = {"backend": "process" if problem("namespace") else "namespace"}
    agent = make_config(tmp_path, agent={"preset": name, "timeout_s": 120.0, "sandbox": sandbox}).agent
    asyncio.run(require_agent(agent))
    result, seen = asyncio.run(attempt(agent, tmp_path))
    assert (result.failure, result.verdict.perf) == (None, 1.0)
    assert "done" in result.answer or name == "mini-swe-agent"
    assert [step["role"] for step in result.steps if step["role"] != "side"] == ["main", "main"]
    assert ("side" in [step["role"] for step in result.steps]) == (name == "opencode")
    assert (LOOK in seen) == (name != "mini-swe-agent"), "it takes no MCP servers"


LOOK = "look_it_up"
"""A tool of the family, which the agent finds by MCP."""


class Host:
    """See `ToolHost` and `TaskHost`."""

    async def tools(self, task: Task) -> Sequence[Mapping[str, JsonValue]]:
        return [{"type": "function", "function": {"name": LOOK, "description": "Look.", "parameters": {}}}]

    async def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        return "seen"


class Tasks:
    """See `TaskHost`."""

    async def tools(self, task: Task) -> tuple[Tool, ...]:
        return ()

    async def sandbox(self, task: Task, config: SandboxConfig) -> tuple[SandboxConfig, Mapping[str, str]]:
        return config, {}

    async def verify(self, task: Task, submission: Submission, sandbox: Sandbox | None = None) -> Verdict:
        assert submission.workspace is not None
        return Verdict(float((Path(submission.workspace) / "answer.txt").read_text() == "amber"))


async def attempt(config: AgentConfig, folder: Path) -> tuple[AttemptResult, str]:
    """The result, and the text of the last prompt."""
    tokenizer = make_tokenizer()
    format = make_format("minimax_m2", tokenizer)
    prompts: list[tuple[int, ...]] = []
    script = Script(format)

    def answer(ids: tuple[int, ...]) -> Sequence[int]:
        prompts.append(ids)
        return script(ids)

    engine = ScriptedEngine(tokenizer.vocab_size, context=CONTEXT, script=answer, decode=tokenizer.decode_bytes)
    gateway = GatewayServer(engine, format, GatewayConfig(port=0), context=CONTEXT, admin_key="admin", tool_host=Host())
    task = Task("t", Domain.AGENT, "Write the word amber to answer.txt")
    async with (
        gateway,
        GatewayAdmin(gateway.url, "admin", budget=config.budget) as admin,
        open_agent(config, folder / "agents", format) as agent,
    ):
        workspaces = Workspaces(folder / "workspaces", attempt_sandbox(config))
        runner = AttemptRunner(agent, admin, Tasks(), workspaces)
        result = await runner.attempt("g0-0-1", task, "g0")
    return result, tokenizer.decode(list(prompts[-1]))


def path_of(name: str) -> str:
    """PATH in which the program of a preset is found."""
    clients = Path(os.environ["M2FORGE_AGENTS"]).absolute()
    python = Path(sys.executable).parent
    if name == "openhands":
        python = clients / "openhands" / "bin"
        if not python.exists():
            pytest.skip("OpenHands needs Python 3.12 or later")
    return f"{clients / 'node' / 'node_modules' / '.bin'}:{python}:{os.environ['PATH']}"


@pytest.mark.parametrize("name", ["claude-code", "codex", "opencode"])
def test_a_public_agent_trains_through_kills(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_of(name))
    domain = {"ratio": 1.0, "context": CONTEXT, "families": [{"source": str(write_tasks(tmp_path / "words.jsonl"))}]}
    config = make_config(
        make_model(tmp_path / "scene"),
        num_steps=2,
        curriculum={"batch_groups": 1, "stages": [{"name": "only", "domains": {"agent": domain}}]},
        agent={"preset": name, "max_concurrent": 2, "timeout_s": 240.0},
        policy={"pack_tokens": CONTEXT},
        engine={"rollout": {"max_context": CONTEXT}},
        pool={"window": {"queue": 2}},
        eval={"num_tasks": 0},
    )
    run_with_kills(config, tmp_path, LIMIT_S, alone=("agent", "gateway", "sampler", "trainer"))
    ended = Counter(re.findall(r"the (\w+) process ended with status -9", (tmp_path / "loop.log").read_text()))
    assert min(ended[name] for name in ("gateway", "sampler", "trainer")) >= 2, ended
    perfs = [json.loads(each["verdict"])["perf"] for each in trained_artifacts(config, tmp_path / "run")]
    assert sorted(perfs) == [0.0, 0.0, 1.0, 1.0], "in every other attempt the policy writes the right word"
