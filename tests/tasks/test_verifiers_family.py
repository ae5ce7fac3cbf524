"""Environments of the library verifiers: their tasks, their own rollouts, and what becomes a verdict."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from m2forge.errors import ConfigError, RecordError
from m2forge.records import ROLLOUT_KEY, Domain, Submission
from m2forge.tasks.catalog import find_family
from m2forge.tasks.family import Finite, UnavailableError
from m2forge.tasks.library_family import rollout_verdict
from m2forge.tasks.source import family_key, parse_source
from tests.tasks.judge_endpoint import serve

HAS_LIBRARY = importlib.util.find_spec("verifiers") is not None
ENVIRONMENT = '''
import sys
import verifiers.v1 as vf

__all__ = ["TinyHarness", "TinyTaskset"]
PROGRAM = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
body = json.dumps({"model": sys.argv[2], "messages": messages, "max_tokens": 20}).encode()
headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
request = urllib.request.Request(os.environ["URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""

class TinyData(vf.TaskData):
    word: str = ""

class TinyTask(vf.Task[TinyData]):
    @vf.reward(weight=1.0)
    async def says_it(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content.strip() == self.data.word)

class TinyTaskset(vf.Taskset[TinyTask, vf.TasksetConfig]):
    def load(self):
        for word in ("north", "south", "east", "west"):
            yield TinyTask(TinyData(prompt=f"Say {word}.", word=word), self.config.task)

class TinyHarnessConfig(vf.HarnessConfig):
    pass

class TinyHarness(vf.Harness[TinyHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        command = [sys.executable, "-c", PROGRAM, str(data.prompt), ctx.model]
        return await runtime.run(command, {"URL": endpoint, "KEY": secret})
'''


@pytest.mark.skipif(not HAS_LIBRARY, reason="the library verifiers is not installed: pip install 'm2forge[verifiers]'")
def test_an_environment_drives_its_own_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_env").mkdir()
    (tmp_path / "tiny_env" / "__init__.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    family = find_family("verifiers:tiny_env#agent")
    assert isinstance(family, Finite)
    assert [task.instruction for task in family.tasks] == ["Say north.", "Say south.", "Say east.", "Say west."]
    seen: list[tuple[object, str]] = []

    def respond(body: dict[str, object], key: str) -> tuple[int, object]:
        seen.append((body["messages"], key))
        message = {"role": "assistant", "content": "south"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        shared = {"id": "c", "object": "chat.completion", "created": 1, "model": "policy"}
        return 200, {**shared, "choices": [choice], "usage": usage}

    perfs = []
    with serve(respond) as url:
        own = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k-1", "M2FORGE_MODEL": "policy", "PYTHONPATH": str(tmp_path)}
        for task in family.tasks[:2]:
            command = task.metadata[ROLLOUT_KEY]
            assert isinstance(command, list)
            words = [str(word) for word in command]
            done = subprocess.run(words, env=os.environ | own, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr[-2000:]
            verdict = family.verify(task, Submission(done.stdout))
            perfs.append(verdict.perf)
            assert verdict.evidence["rewards"] == {"says_it": verdict.perf}
    assert perfs == [0.0, 1.0]
    assert {key for _, key in seen} == {"Bearer k-1"}


@pytest.mark.skipif(HAS_LIBRARY, reason="the library verifiers is installed")
def test_without_the_library_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'm2forge\[verifiers\]'"):
        find_family("verifiers:tiny_env")


def result(**fields: object) -> str:
    return (
        f"a log line\n{json.dumps({'ok': True, 'reward': 0.5, 'rewards': {}, 'metrics': {}, 'errors': []} | fields)}\n"
    )


def error(type: str, status: int | None = None) -> list[object]:
    return [{"type": type, "message": "m", "status": status}]


@pytest.mark.parametrize(
    ("fields", "perf"),
    [
        ({}, 0.5),
        ({"reward": 3.0}, 1.0),
        ({"reward": -1}, 0.0),
        ({"ok": False, "reward": 0.0, "errors": error("HarnessError")}, 0.0),
        ({"ok": False, "reward": 0.0, "errors": error("ProviderError", 400)}, 0.0),
    ],
)
def test_the_reward_is_perf_clamped_to_0_and_1(fields: dict[str, object], perf: float) -> None:
    assert rollout_verdict(result(**fields), "verifiers:x").perf == perf


@pytest.mark.parametrize("errors", [error("ProviderError", 502), error("SandboxError"), error("InterceptionError")])
def test_failures_of_the_infrastructure_give_no_verdict(errors: list[object]) -> None:
    with pytest.raises(UnavailableError, match="verifiers:x: "):
        rollout_verdict(result(ok=False, errors=errors), "verifiers:x")


@pytest.mark.parametrize("output", ["", "Traceback", "[1]", result(reward=None), result(reward="1")])
def test_output_without_a_reward_is_a_verifier_error(output: str) -> None:
    with pytest.raises(RecordError, match=r"printed no result|expected a finite number"):
        rollout_verdict(output, "verifiers:x")


def test_an_environment_takes_the_domain_of_its_table() -> None:
    key = family_key("verifiers:tiny-env", Domain.CODING)
    assert (key, parse_source(key).target, parse_source(key).domain) == (
        "verifiers:tiny-env#coding",
        "tiny-env",
        Domain.CODING,
    )


def test_the_rollout_program_needs_nothing_of_ours(tmp_path: Path) -> None:
    program = Path(importlib.util.find_spec("m2forge.tasks.verifiers_rollout").origin or "")  # type: ignore[union-attr]
    done = subprocess.run([sys.executable, "-P", "-S", str(program)], capture_output=True, text=True, cwd=tmp_path)
    assert "not enough values to unpack" in done.stderr
