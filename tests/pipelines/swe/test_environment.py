"""Runs of tests: what reports decide. The build model repairs what rules could not, by a scripted endpoint."""

import asyncio
import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from m2forge.errors import NotFoundError, RunError
from m2forge.pipelines.config import EndpointConfig, PipelineConfig
from m2forge.pipelines.run import run_stages
from m2forge.pipelines.stage import Pipeline
from m2forge.pipelines.store import StageYield
from m2forge.pipelines.swe import pipeline
from m2forge.pipelines.swe.config import BuildModelConfig, RepositoryConfig, SweConfig
from m2forge.pipelines.swe.environment import MutantLimit, Runner, read_report
from m2forge.pipelines.swe.toolchains import node, python
from m2forge.pipelines.swe.toolchains.table import TOOLCHAINS
from m2forge.pipelines.swe.toolchains.toolchain import Environment, Outcomes, TestRun, Toolchain
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.folders.task_image import TaskImage
from tests.pipelines.endpoint import Endpoint, completion, serving
from tests.pipelines.swe import projects, test_languages
from tests.pipelines.swe.test_pipeline import HISTORY
from tests.pipelines.swe.toolchains import test_debian

History = Sequence[tuple[str, Mapping[str, str]]]
FIX = "Fix the total"
HISTORIES: dict[str, History] = {
    "c": (("Begin", test_debian.C_OLD), (FIX, test_debian.C_NEW)),
    "node": (("Begin", test_debian.NODE_OLD), (FIX, test_debian.NODE_NEW)),
    "go": (("Begin", test_languages.GO), (FIX, test_languages.GO_FIXED)),
    "rust": (("Begin", test_languages.RUST), (FIX, test_languages.RUST_FIXED)),
}
ADD = json.dumps({"action": "add", "requirement": "sums-data"})
SET = json.dumps({"action": "set", "variable": "SUMS_MODE", "value": "plain"})


def test_a_report_gives_the_ids_of_the_files_that_were_run() -> None:
    report = b"""<testsuites><testsuite>
<testcase classname="tests.test_a.Case" name="test_x[a::b]" file="tests/base.py"/>
<testcase classname="tests.test_a" name="test_y"><failure message="assert 1 == 2">long</failure></testcase>
<testcase classname="tests.test_a" name="test_z"><skipped/></testcase>
<testcase classname="tests.test_a" name="twice"/>
<testcase classname="tests.test_a" name="twice"><error message="teardown"/></testcase>
<testcase classname="" name="tests.test_b"><error message="collection failure">ImportError: no</error></testcase>
</testsuite></testsuites>"""
    run = read_report(python.Python(), report, ["tests/test_a.py", "tests/test_b.py"])
    assert run.problem is None
    assert run.tests == {
        "tests/test_a.py::Case::test_x[a::b]": Outcomes.PASSED,
        "tests/test_a.py::test_y": Outcomes.FAILED,
        "tests/test_a.py::test_z": Outcomes.SKIPPED,
        "tests/test_a.py::twice": Outcomes.FAILED,
    }
    assert run.messages["tests/test_a.py::test_y"] == "assert 1 == 2"
    assert run.messages["tests.test_b"] == "collection failure"


@pytest.mark.parametrize("report", [b"", b"<testsuites/>", b"<!DOCTYPE a [<!ENTITY b 'c'>]><testsuites/>", b"<cut"])
def test_a_report_without_tests_decides_nothing(report: bytes) -> None:
    assert read_report(python.Python(), report, ["tests/test_a.py"]).problem is not None


class Looping(python.Python):
    """A child process that never ends, and a runner that reports something all the same."""

    def command(self, targets: Sequence[str], max_failures: int | None = None) -> tuple[str, ...]:
        script = 'sh -c "while :; do :; done"; echo "<testsuites/>" >"$TEST_REPORT"'
        return ("sh", "-c", script)


def test_a_mutant_that_never_ends_decides_nothing() -> None:
    async def run() -> TestRun:
        runner = Runner(SandboxConfig(), "host", 60.0)
        async with runner.opened(TaskImage("host")) as sandbox:
            return await runner.run_in(Looping(), sandbox, (), limit=MutantLimit(timeout_s=60.0, cpu_s=1))

    found = asyncio.run(run())
    assert found.problem == "unfinished: over 1 s of CPU time"
    assert 0.75 < found.cpu_s < 5


# -- repair by a model -------------------------------------------------------------------------------------------------


class ScriptedRunner:
    """Tests run only with the package sums-data, if their toolchain has any, and the variable SUMS_MODE."""

    async def version(self, toolchain: Toolchain) -> str:
        return "3.12"

    async def image(self, candidate: object, made: Environment) -> TaskImage:
        return TaskImage(",".join((*made.requirements, *made.variables)))

    async def run(
        self, toolchain: Toolchain, image: TaskImage, patches: Sequence[str], targets: Sequence[str]
    ) -> TestRun:
        for wanted in ("sums-data", "SUMS_MODE=plain")[toolchain.index is None :]:
            if wanted not in image.base:
                return TestRun(problem="no report", output=f"Collected in 0.1{len(image.base)}s: {wanted} is missing")
        return TestRun({"tests/test_sums.py::test_first": Outcomes.PASSED})


@pytest.fixture
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wheels and no sandboxes."""

    def resolve(requirements: Sequence[str], version: str) -> tuple[str, ...]:
        if "nowhere" in requirements:
            raise NotFoundError("pip download nowhere: no matching distribution")
        return ()

    monkeypatch.setattr(python, "resolve", resolve)
    monkeypatch.setattr(node, "download", lambda requirements: "modules.tar")
    monkeypatch.setattr(pipeline, "Runner", lambda *_: ScriptedRunner())


def run_build(
    tmp_path: Path, url: str, history: History = HISTORY, *, replay: bool = False, **keys: Any
) -> list[StageYield]:
    """The stages up to the last repair."""
    if not (tmp_path / "clone").exists():
        projects.write_history(tmp_path / "clone", *history)
        (tmp_path / "run").mkdir()
    repository = RepositoryConfig(path=str(tmp_path / "clone"), package="sums")
    swe = SweConfig(repositories=(repository,), build_model=BuildModelConfig(model="m", **keys))
    whole = pipeline.make_pipeline(swe)
    last = max(number for number, stage in enumerate(whole.stages) if stage.name.startswith("repair"))
    models = {"m": EndpointConfig(url=url, model="m", max_retries=0)}
    config = PipelineConfig(name="run", swe=swe, models=models, replay=replay)
    return run_stages(Pipeline(whole.source, whole.stages[: last + 1]), config, tmp_path / "run")


def evidence(run_dir: Path) -> dict[str, Any]:
    rows = sqlite3.connect(run_dir / "pipeline.db").execute("SELECT evidence FROM outcome WHERE reason = 'build'")
    found: dict[str, Any] = json.loads(next(rows)[0])
    return found


def prompts(endpoint: Endpoint) -> list[str]:
    return [request["messages"][1]["content"] for request in endpoint.requests]


@pytest.mark.usefixtures("_scripted")
def test_actions_build_up_until_tests_run(tmp_path: Path) -> None:
    replies = [f"It needs its data.\n```json\n{ADD}\n```", "no idea", SET]
    with serving(lambda body, number: completion(replies[number])) as endpoint:
        yields = {one.name: one for one in run_build(tmp_path, endpoint.url)}
    assert (yields["build"].num_passed, yields["repair-4"].num_made) == (1, 1)
    first, second, third = prompts(endpoint)
    assert "Name: sums" in first
    assert "<requirements>\npytest\n</requirements>" in first
    assert "sums-data is missing" in first
    assert "SUMS_MODE=plain is missing" in second
    assert "2. no action: no JSON" in third
    (data,) = sqlite3.connect(tmp_path / "run" / "pipeline.db").execute("SELECT data FROM item WHERE stage = 7")
    made = json.loads(data[0])["environment"]
    assert made["requirements"] == ["sums-data", "pytest"]
    assert made["variables"] == ["SUMS_MODE=plain"]


@pytest.mark.usefixtures("_scripted")
def test_garbage_is_counted_and_ends_in_a_rejection(tmp_path: Path) -> None:
    replies = [
        "<html>",
        '{"action": "add", "requirement": "x @ http://localhost/x"}',
        '{"action": "add", "requirement"',
    ]
    replies.append(json.dumps({"action": "add", "requirement": "nowhere"}))
    with serving(lambda body, number: completion(replies[number])) as endpoint:
        *_, last = run_build(tmp_path, endpoint.url)
    assert last.rejected == {"build": 1}
    found = evidence(tmp_path / "run")
    assert (found["unusable"], found["tokens"], found["rules"]) == (3, 40, "environment")
    assert "no matching distribution" in found["problem"]
    assert [line.partition(":")[0] for line in found["history"][:3]] == ["no action"] * 3


@pytest.mark.usefixtures("_scripted")
def test_no_round_begins_above_the_tokens(tmp_path: Path) -> None:
    with serving(lambda body, number: completion("no idea")) as endpoint:
        yields = run_build(tmp_path, endpoint.url, max_tokens=15, max_rounds=9)
    assert len(endpoint.requests) == 2
    assert [one.rejected for one in yields if one.rejected][-1] == {"build": 1}
    assert evidence(tmp_path / "run")["tokens"] == 20


@pytest.mark.usefixtures("_scripted")
def test_a_replay_needs_no_endpoint_and_refuses_a_miss(tmp_path: Path) -> None:
    replies = [ADD, SET]
    with serving(lambda body, number: completion(replies[number])) as endpoint:
        run_build(tmp_path, endpoint.url)
    database = tmp_path / "run" / "pipeline.db"
    with sqlite3.connect(database) as connection:
        connection.execute("DELETE FROM outcome WHERE stage > 1")
        connection.execute("DELETE FROM item WHERE stage > 2")
    yields = {one.name: one for one in run_build(tmp_path, "http://127.0.0.1:1", replay=True)}
    assert (yields["repair-1"].num_cached, yields["repair-2"].num_cached, yields["repair-4"].num_made) == (1, 1, 1)
    with sqlite3.connect(database) as connection:
        connection.execute("DELETE FROM outcome WHERE stage > 3")
        connection.execute("DELETE FROM item WHERE stage > 4")
        connection.execute("DELETE FROM completion WHERE stage = 'repair-2'")
    with pytest.raises(RunError, match=r"replay: stage repair-2 asks m for a completion that is not stored"):
        run_build(tmp_path, "http://127.0.0.1:1", replay=True)


@pytest.mark.usefixtures("_scripted")
@pytest.mark.parametrize("language", HISTORIES)
def test_every_language_is_repaired_by_the_actions_it_has(tmp_path: Path, language: str) -> None:
    replies = [ADD, SET]
    with serving(lambda body, number: completion(replies[number])) as endpoint:
        yields = {one.name: one for one in run_build(tmp_path, endpoint.url, HISTORIES[language])}
    assert yields["repair-4"].num_made == 1
    system = endpoint.requests[0]["messages"][0]["content"]
    assert ('"action": "add"' in system) is (language == "node")
    first, second = prompts(endpoint)
    assert {"c": "check: tests/check", "node": '"sums"', "go": "module", "rust": "edition"}[language] in first
    assert ("no action: expected an object with action: set" in second) is (language != "node")


@pytest.mark.usefixtures("_scripted")
def test_packages_that_no_index_has_are_not_asked_about(tmp_path: Path) -> None:
    needs = {"go.mod": test_languages.GO["go.mod"] + "\nrequire example.com/more v1.0.0\n"}
    history = [(message, {**files, **needs}) for message, files in HISTORIES["go"]]
    with serving(lambda body, number: completion(ADD)) as endpoint:
        yields = {one.name: one for one in run_build(tmp_path, endpoint.url, history)}
    assert endpoint.requests == []
    assert yields["build"].rejected == {"environment": 1}


@pytest.mark.parametrize("language", TOOLCHAINS)
def test_variables_of_the_model_are_in_the_dockerfile(language: str) -> None:
    toolchain = TOOLCHAINS[language]
    made = Environment(language, (), (), "1", ("SUMS_MODE=plain",))
    dockerfile = toolchain.files("sums", projects.release({}), made)["Dockerfile"].content.decode()
    assert 'ENV SUMS_MODE="plain"\n' in dockerfile
    assert dockerfile.index("SUMS_MODE") < dockerfile.rindex("RUN ")
