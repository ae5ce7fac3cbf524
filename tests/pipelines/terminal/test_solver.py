"""The reference solver: policies of known pass rate behind an endpoint, with one script or with a shell."""

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from m2forge.errors import EngineError
from m2forge.pipelines.config import PipelineConfig
from m2forge.pipelines.run import run_stages
from m2forge.pipelines.stage import Context, Item, Pipeline, Rejection, Source
from m2forge.pipelines.store import StageYield
from m2forge.pipelines.terminal import pipeline
from m2forge.pipelines.terminal.pipeline import Select
from m2forge.protocols import Sandbox
from m2forge.tasks.folders.environment import FolderEnvironment
from tests.pipelines.endpoint import Respond, completion, serving
from tests.sandbox.places import require

Policy = Callable[[int, int, str], str | None]
"""The numbers of attempt and turn and the prompt in, a command out; None: the policy is done."""
RIGHT = "sort names.txt > sorted.txt"
UNLIKE = "date +%N; cat /proc/sys/kernel/random/uuid"
"""Prints something else each time."""


def _entry(content: bytes) -> dict[str, str]:
    return {"kind": "file", "mode": "0644", "sha256": hashlib.sha256(content).hexdigest()}


TASK = Item(
    "7",
    {
        "title": "How can I sort names?",
        "question": "<p>I want the lines of <code>names.txt</code> in order.</p>",
        "tags": ["bash"],
        "licence": "CC0 1.0",
        "authors": ["Ada", "Eve"],
        "grade": "good",
        "solution": RIGHT,
        "fixture": "printf 'b\\na\\n' > names.txt\n",
        "expected": {
            "entries": {"names.txt": _entry(b"b\na\n"), "sorted.txt": _entry(b"a\nb\n")},
            "optional": [],
            "compares_modes": False,
            "output": None,
            "is_ordered": True,
        },
        "prints": False,
        "example": "",
        "example_expected": [],
        "inputs": ["names.txt"],
        "changed": {"created": ["sorted.txt"], "removed": [], "changed": []},
    },
)


@pytest.fixture(autouse=True)
def _can_run() -> None:
    require("namespace")


class One(Source):
    def fingerprint(self) -> str:
        return "one"

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        yield TASK


def select(folder: Path, url: str, solver: dict[str, Any] | None = None, **keys: Any) -> StageYield:
    """Run the stage over the task, in a folder in which it may have run before."""
    table = {"posts": "x", "solver": {"model": "m", "form": "shell"} | (solver or {})}
    models = {"m": {"url": url, "model": "policy", "max_retries": 0}}
    config = PipelineConfig.model_validate({"name": "gym", "models": models, "terminal": table, **keys})
    assert config.terminal is not None
    return run_stages(Pipeline(One(), (Select(config.terminal),)), config, folder)[1]


def measured(folder: Path) -> list[tuple[int, str, int, int]]:
    """Hints, decision, passed and attempts of each variant."""
    with closing(sqlite3.connect(folder / "pipeline.db")) as store:
        rows = store.execute("SELECT data FROM item WHERE stage = 2").fetchall()
        rows = rows or store.execute("SELECT evidence FROM outcome WHERE stage = 1").fetchall()
    found = json.loads(rows[0][0])["measured"]
    return [(one["hints"], one["decision"], one["passed"], one["attempts"]) for one in found]


def called(command: str, id: str) -> tuple[int, bytes]:
    call = {"id": id, "type": "function", "function": {"name": "shell", "arguments": json.dumps({"command": command})}}
    return completion("", message={"role": "assistant", "content": None, "tool_calls": [call]})


def policy(act: Policy) -> Respond:
    """An endpoint that tells attempts apart by the id of their first call."""
    begun: Counter[str] = Counter()

    def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        messages = body["messages"]
        prompt, turn = messages[0]["content"], sum(one["role"] == "assistant" for one in messages)
        if turn == 0:
            attempt = begun[prompt]
            begun[prompt] += 1
        else:
            attempt = int(messages[1]["tool_calls"][0]["id"])
        command = act(attempt, turn, prompt)
        return completion("Done.") if command is None else called(command, str(attempt))

    return respond


def solves(*passing: int) -> Policy:
    """Looks around, then solves the task at these attempts."""
    return lambda attempt, turn, _: (UNLIKE, RIGHT if attempt in passing else "true", None)[turn]


@pytest.mark.parametrize(
    ("passing", "wanted"),
    [((2,), (0, "selected", 1, 4)), ((1, 3, 6), (0, "selected", 3, 8)), ((0, 1), (0, "too easy", 2, 2))],
)
def test_a_policy_with_a_shell_is_measured(
    passing: tuple[int, ...], wanted: tuple[int, str, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wanted[3] == 2:
        monkeypatch.setattr(pipeline, "NUM_ATTEMPTS", (2,))
    with serving(policy(solves(*passing))) as endpoint:
        found = select(tmp_path, endpoint.url)
    assert measured(tmp_path) == [wanted]
    assert found.num_passed == (wanted[1] == "selected")
    assert len(endpoint.requests) == 3 * wanted[3] == found.num_asked
    first, last = endpoint.requests[0], endpoint.requests[2]
    assert first["tools"][0]["function"]["name"] == "shell"
    assert "names.txt" in first["messages"][0]["content"]
    assert [one["role"] for one in last["messages"]] == ["user", "assistant", "tool", "assistant", "tool"]


def test_an_attempt_is_replayed_whatever_commands_print(tmp_path: Path) -> None:
    with serving(policy(solves(0))) as endpoint:
        select(tmp_path / "first", endpoint.url)
    stored = str(tmp_path / "first" / "pipeline.db")
    found = select(tmp_path / "second", "http://127.0.0.1:9/v1", replay=True, completions=(stored,))
    assert measured(tmp_path / "second") == [(0, "selected", 1, 4)]
    assert (found.num_asked, found.num_cached, found.num_failed) == (0, 12, 0)


def test_an_endpoint_that_fails_is_no_failed_attempt(tmp_path: Path) -> None:
    act = policy(solves(3))

    def failing(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        return (503, b"busy") if number == 7 else act(body, number)

    with serving(failing) as endpoint:
        found = select(tmp_path, endpoint.url)
        assert found.failed == {"status 503": 1}
        found = select(tmp_path, endpoint.url)
        assert (found.num_passed, found.num_failed) == (1, 0)
        assert len(endpoint.requests) == 3 * 4 + 1, "completions before the failure are not asked for again"
    assert measured(tmp_path) == [(0, "selected", 1, 4)]


def test_a_sandbox_that_fails_is_no_failed_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = FolderEnvironment.open
    num_opened, num_broken = 0, 1

    async def open_or_fail(environment: FolderEnvironment) -> Sandbox:
        nonlocal num_opened
        num_opened += 1
        if 2 <= num_opened < 2 + num_broken:
            raise EngineError("no room")
        return await opened(environment)

    monkeypatch.setattr(FolderEnvironment, "open", open_or_fail)
    with serving(policy(solves(1))) as endpoint:
        assert select(tmp_path / "once", endpoint.url).num_passed == 1
        assert measured(tmp_path / "once") == [(0, "selected", 1, 4)]
        num_opened, num_broken = 0, 1000
        assert select(tmp_path / "always", endpoint.url).failed == {"EngineError": 1}


def test_turns_and_output_of_a_shell_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "NUM_ATTEMPTS", (2,))
    endless = policy(lambda attempt, turn, prompt: "yes | head -c 50000; sleep 20")
    with serving(endless) as endpoint:
        select(tmp_path, endpoint.url, {"max_turns": 2, "max_output": 1000, "command_s": 0.5})
    assert {decision for _, decision, *_ in measured(tmp_path)} == {"never solved"}
    assert len(endpoint.requests) == 2 * 2 * len(measured(tmp_path))
    result = endpoint.requests[1]["messages"][2]["content"]
    assert "[49000 characters left out]" in result
    assert result.endswith("timeout\n")
    assert len(result) < 1100


def test_a_malformed_call_ends_an_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the calls before it have done is verified."""
    monkeypatch.setattr(pipeline, "NUM_ATTEMPTS", (1,))

    def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        return called(RIGHT, "0") if number % 2 == 0 else completion("<tool_call>ls</tool_call>")

    with serving(respond) as endpoint:
        select(tmp_path, endpoint.url)
    assert measured(tmp_path) == [(0, "too easy", 1, 1)]
    assert len(endpoint.requests) == 2


def test_variants_with_fewer_hints_are_measured_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants 0 and 1 have the same text, because the question has no format to show: it is measured once."""
    monkeypatch.setattr(pipeline, "NUM_ATTEMPTS", (4,))

    def act(attempt: int, turn: int, prompt: str) -> str | None:
        return None if turn else RIGHT if attempt == 0 and "A solution uses `sort`" in prompt else "true"

    with serving(policy(act)) as endpoint:
        assert select(tmp_path, endpoint.url).num_passed == 1
    assert measured(tmp_path) == [(0, "never solved", 0, 4), (2, "selected", 1, 4)]


@pytest.mark.parametrize(
    ("solver", "problem"),
    [
        ({"command": "true", "form": "shell"}, "form: of a model"),
        ({"model": "m", "max_turns": 3}, 'max_turns: of a model with a shell; set form = "shell"'),
        ({"command": "true", "max_output": 300}, "max_output: of a model with a shell"),
        ({"model": "m", "form": "agent"}, "form"),
        ({"model": "m", "form": "shell", "max_turns": 0}, "max_turns"),
    ],
)
def test_keys_of_a_solver_that_would_not_apply_are_refused(solver: dict[str, Any], problem: str) -> None:
    table = {"posts": "x", "solver": solver}
    models = {"m": {"url": "http://x", "model": "m"}}
    with pytest.raises(ValueError, match=problem):
        PipelineConfig.model_validate({"name": "n", "models": models, "terminal": table})
