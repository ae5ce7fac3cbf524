"""CLI agents, unmodified: a task with tool calls in parallel, one of which fails, and a resumed conversation."""

import json
from dataclasses import replace
from pathlib import Path

from m2forge.gateway.dialects.types import Notice
from m2forge.text.message import ToolCall
from tests.gateway.clients.stage import FIRST, SECOND, Stage, needs_clients, says, stage
from tests.gateway.dialogue import minimax

pytestmark = needs_clients


def check_work(on_stage: Stage) -> None:
    """The file was written, and the model was shown what its failed call said."""
    assert (on_stage.workspace / "f").read_text() == "a\nb\n"
    prompt = on_stage.format.tokenizer.decode(list(on_stage.gateway.engine.seen()[-1][0]))
    assert "No such file" in prompt
    assert "First the file." in prompt


def test_claude_code(tmp_path: Path) -> None:
    with stage(minimax(), says("Bash", "command", description="x"), tmp_path) as on_stage:
        env = {
            "ANTHROPIC_BASE_URL": on_stage.gateway.url,
            "ANTHROPIC_API_KEY": on_stage.key,
            "ANTHROPIC_MODEL": "policy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        }
        allow = "--dangerously-skip-permissions"
        assert on_stage.run("claude", "-p", FIRST, allow, env=env) == "Two lines.\n"
        assert on_stage.run("claude", "-c", "-p", SECOND, allow, env=env) == "Still two.\n"
        check_work(on_stage)
        on_stage.check(4, notices=[Notice.SYSTEM_TURN])


CODEX = """
model = "{model}"
model_provider = "m2forge"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.m2forge]
name = "m2forge"
base_url = "{url}/v1"
env_key = "M2FORGE_KEY"
wire_api = "responses"
"""


def run_codex(on_stage: Stage, model: str) -> None:
    on_stage.write(".codex/config.toml", CODEX.format(model=model, url=on_stage.gateway.url))
    env = {"M2FORGE_KEY": on_stage.key}
    run = ("codex", "exec", "--skip-git-repo-check")
    assert on_stage.run(*run, FIRST, env=env) == "Two lines.\n"
    assert on_stage.run(*run, "resume", "--last", SECOND, env=env) == "Still two.\n"
    check_work(on_stage)


def test_codex(tmp_path: Path) -> None:
    with stage(minimax(), says("exec_command", "cmd"), tmp_path) as on_stage:
        run_codex(on_stage, "policy")
        on_stage.check(4, notices=[Notice.VENDOR_TOOL])


def test_codex_with_a_model_that_has_custom_tools(tmp_path: Path) -> None:
    first, *others = says("exec_command", "cmd")
    patch = ToolCall("apply_patch", {"input": "*** Begin Patch\n*** Add File: f\n+a\n+b\n*** End Patch\n"})
    script = [replace(first, tool_calls=(patch, *first.tool_calls[1:])), *others]
    with stage(minimax(), script, tmp_path) as on_stage:
        run_codex(on_stage, "gpt-5.5")
        on_stage.check(4, notices=[Notice.VENDOR_TOOL, Notice.TEXT_VERBOSITY, Notice.RESPONSES_EFFORT])


def test_opencode(tmp_path: Path) -> None:
    with stage(minimax(), says("bash", "command", description="x"), tmp_path) as on_stage:
        options = {"baseURL": f"{on_stage.gateway.url}/v1", "apiKey": on_stage.key}
        model = {"name": "policy", "limit": {"context": 200_000, "output": 8000}}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": model}}
        config = {
            "autoupdate": False,
            "share": "disabled",
            "model": "m2forge/policy",
            "small_model": "m2forge/policy",
            "permission": {"*": "allow"},
            "provider": {"m2forge": provider},
        }
        (on_stage.workspace / "opencode.json").write_text(json.dumps(config))
        env = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
        assert on_stage.run("opencode", "run", FIRST, env=env).endswith("Two lines.\n")
        assert on_stage.run("opencode", "run", "-c", SECOND, env=env).endswith("Still two.\n")
        check_work(on_stage)
        on_stage.check(4, num_side=1)


QWEN = {
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
}


def test_qwen_code(tmp_path: Path) -> None:
    """Both turns in one process: resumed by another, it leaves the date out of the first message."""
    with stage(minimax(), says("run_shell_command", "command", is_background=False), tmp_path) as on_stage:
        on_stage.write(".qwen/settings.json", json.dumps(QWEN))
        env = {
            "OPENAI_API_KEY": on_stage.key,
            "OPENAI_BASE_URL": f"{on_stage.gateway.url}/v1",
            "OPENAI_MODEL": "policy",
        }
        turns = [
            {
                "type": "user",
                "message": {"role": "user", "content": text},
                "parent_tool_use_id": None,
                "session_id": "s",
            }
            for text in (FIRST, SECOND)
        ]
        run = (
            "qwen",
            "--yolo",
            "--auth-type",
            "openai",
            "--input-format",
            "stream-json",
            "--output-format",
            "stream-json",
        )
        said = "".join(f"{json.dumps(turn)}\n" for turn in turns)
        events = [json.loads(line) for line in on_stage.run(*run, env=env, said=said).splitlines()]
        assert [event["result"] for event in events if event["type"] == "result"] == ["Two lines.", "Still two."]
        check_work(on_stage)
        on_stage.check(4)
