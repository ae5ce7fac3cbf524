"""The pipeline from its command to proven folders, its repair by a model, and the selection by a solver."""

import asyncio
import json
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from m2forge.cli import main
from m2forge.pipelines.stage import Completion, Context, Item, Rejection
from m2forge.pipelines.terminal import pipeline
from m2forge.pipelines.terminal.build import Build
from m2forge.pipelines.terminal.config import SolverConfig, TerminalConfig
from m2forge.pipelines.terminal.pipeline import Select, check_grade, extract
from m2forge.pipelines.terminal.posts import PostsSource
from m2forge.pipelines.terminal.task_folder import instructions, task_files
from m2forge.tasks.folders.folder import read_folder
from m2forge.tasks.folders.lint import lint
from tests.pipelines.endpoint import completion, serving
from tests.pipelines.kills import check_kills
from tests.sandbox.places import require

T = TypeVar("T")
SAMPLE = Path(__file__).parent.parent.parent.parent / "examples" / "terminal" / "Posts.xml"
SOUND, DECOYS = ("101", "142"), ("202", "226")


@pytest.fixture(autouse=True)
def _can_run() -> None:
    require("namespace")


class ScriptedContext:
    """A context whose model gives these replies in turn."""

    seed = 0

    def __init__(self, run_dir: Path, replies: list[str]) -> None:
        self.run_dir, self._replies, self.prompts = run_dir, replies, list[str]()

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        return asyncio.run(coroutine)

    def ask(self, model: str, messages: list[dict[str, str]], *, draw: int = 0) -> Completion:
        self.prompts.append(messages[0]["content"])
        return Completion({"role": "assistant", "content": self._replies[draw % len(self._replies)]}, "stop", 1, 1)


def context(run_dir: Path, *replies: str) -> Context:
    return cast("Context", ScriptedContext(run_dir, list(replies)))


def config(**keys: Any) -> TerminalConfig:
    return TerminalConfig(posts=str(SAMPLE), **keys)


def question(id: str) -> Item:
    for found in PostsSource(SAMPLE, config()).questions():
        if isinstance(found, Item) and found.id == id:
            ready = extract(found, config())
            assert isinstance(ready, Item)
            graded = check_grade(ready)
            assert isinstance(graded, Item)
            return graded
    raise AssertionError(id)


def write_posts(path: Path, ids: tuple[str, ...]) -> None:
    chosen = re.compile(rf' (?:Id|ParentId)="(?:{"|".join(ids)})" (?:PostTypeId="1"|CreationDate)')
    lines = SAMPLE.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "<row" not in line or chosen.search(line)))


def test_the_command_writes_proven_folders_and_explains(tmp_path: Path) -> None:
    write_posts(tmp_path / "Posts.xml", SOUND + DECOYS)
    (tmp_path / "run.toml").write_text(f'name = "gym"\nworkers = 2\n[terminal]\nposts = "{tmp_path}/Posts.xml"\n')
    assert main(["pipeline", str(tmp_path / "run.toml"), "--runs", str(tmp_path / "runs")]) == 0
    run_dir = tmp_path / "runs" / "gym"
    folders = sorted((run_dir / "tasks").iterdir())
    assert [path.name for path in folders] == [f"terminal-{id}" for id in SOUND]
    for path in folders:
        assert lint(path) == []
        folder = read_folder(path)
        table = cast("dict[str, Any]", folder.table)["metadata"]["m2forge"]
        assert table["licence"] == "CC0 1.0"
        assert table["authors"]
        assert "A solution" not in folder.instruction()
    assert "awk" not in (folders[0] / "instruction.md").read_text()
    stages = {one["name"]: one for one in json.loads((run_dir / "yields.json").read_text())["stages"]}
    assert stages["posts"]["rejected"] == {}
    assert stages["gate"]["rejected"] == {"another system": 1}
    assert stages["extract"]["rejected"] == {"depends on the machine": 1}
    assert all(one["failed"] == {} for one in stages.values())


def test_a_killed_run_resumes_to_the_same_folders(tmp_path: Path) -> None:
    def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        repaired = {"fixture": "printf 'b,1\\na,2\\n' > sales.csv", "script": "sort sales.csv > sorted.csv"}
        return completion(json.dumps(repaired))

    write_posts(tmp_path / "Posts.xml", SOUND)
    text = (tmp_path / "Posts.xml").read_text()
    # Rules cannot repair an option that does not exist.
    (tmp_path / "Posts.xml").write_text(text.replace("awk -F", "awk --frobnicate -F"))
    with serving(respond) as endpoint:
        keys = f'[models.m]\nurl = "{endpoint.url}"\nmodel = "m"\n[terminal]\nposts = "{tmp_path}/Posts.xml"\n'
        (tmp_path / "run.toml").write_text(f'name = "gym"\n{keys}repair_model = "m"\n')
        assert main(["pipeline", str(tmp_path / "run.toml"), "--runs", str(tmp_path / "whole")]) == 0
        assert len(list((tmp_path / "whole" / "gym" / "tasks").iterdir())) == len(SOUND)
        assert len(endpoint.requests) == 1
        whole = tmp_path / "whole" / "gym"
        check_kills(tmp_path / "run.toml", whole, endpoint, tmp_path / "killed", seed=5)


def test_answers_without_effect_or_repeatability_are_rejected(tmp_path: Path) -> None:
    item = question("101")
    for script, reason in (
        ("true sales.csv", "no effect"),
        ("cat missing/$NAME.csv; cut -d, -f9- sales.csv >&2; exit 3", "answer fails"),
        ('awk \'BEGIN { printf "%s", ENVIRON["BASHPID"] } { print "constant"; exit }\' sales.csv', "result does not"),
        ("cat sales.csv; stat -c %z sales.csv", "not repeatable"),
    ):
        changed = item.adding(answer=f"<pre><code>{script.replace('<', '&lt;')}</code></pre>")
        found = Build(config()).process(changed, context(tmp_path))
        assert isinstance(found, Rejection)
        assert found.reason.startswith(reason), (script, found)


def test_a_missing_file_is_repaired_by_rule(tmp_path: Path) -> None:
    answer = '<pre><code>cat sales.csv "$(echo prices.csv)" | sort > all.csv</code></pre>'
    found = Build(config()).process(question("101").adding(answer=answer), context(tmp_path))
    assert isinstance(found, Item)
    assert "prices.csv" in cast("list[str]", found.data["inputs"])


def test_a_model_repairs_what_rules_cannot(tmp_path: Path) -> None:
    answer = "<pre><code>sort sales.csv | frobnicate</code></pre>"
    item = question("101").adding(answer=answer)
    assert isinstance(Build(config()).process(item, context(tmp_path)), Rejection)
    good = json.dumps({"fixture": "printf 'b,1\\na,2\\n' > sales.csv", "script": "sort sales.csv > sorted.csv"})
    scripted = ScriptedContext(tmp_path, ["no JSON", f"Here it is: {good}"])
    found = Build(config(repair_model="m")).process(item, cast("Context", scripted))
    assert isinstance(found, Item)
    assert found.data["solution"] == "sort sales.csv > sorted.csv"
    assert len(scripted.prompts) == 2
    assert "frobnicate" in scripted.prompts[0]
    bad = json.dumps({"fixture": "curl http://x > sales.csv", "script": "sort sales.csv > sorted.csv"})
    refused = Build(config(repair_model="m")).process(item, context(tmp_path, bad))
    assert isinstance(refused, Rejection)
    assert cast("list[dict[str, object]]", refused.evidence["tried"])[-1]["reason"] == "needs the network"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("ls -l --time-style=+%Y sales.csv", "not repeatable"),
        ("head -n 0 sales.csv; echo 42", "result does not depend on the files"),
        ("sort sales.csv > sorted.csv", None),
    ],
)
def test_a_models_repair_passes_the_same_gates(script: str, reason: str | None, tmp_path: Path) -> None:
    """The first prints the year in which the fixture ran, the second what it would print without the file."""
    item = question("101").adding(answer="<pre><code>sort sales.csv | frobnicate</code></pre>")
    reply = json.dumps({"fixture": "printf 'b,1\\na,2\\n' > sales.csv", "script": script})
    found = Build(config(repair_model="m", max_repairs=1)).process(item, context(tmp_path, reply))
    assert isinstance(found, Item) == (reason is None)
    if isinstance(found, Rejection):
        assert cast("list[dict[str, object]]", found.evidence["tried"])[-1]["reason"] == reason


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Item:
    found = Build(config()).process(question("101"), context(tmp_path_factory.mktemp("built")))
    assert isinstance(found, Item)
    return found


@pytest.mark.parametrize(
    ("condition", "decisions"),
    [
        ("[ $((M2FORGE_ATTEMPT % 4)) = 1 ]", ["selected"]),
        ("true", ["too easy"]),
        ("grep -q '`awk`'", ["never solved", "never solved", "too easy"]),
        ("false", ["never solved"] * 4),
    ],
)
def test_the_solvers_pass_rate_decides_on_the_variant(
    condition: str, decisions: list[str], built: Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "NUM_ATTEMPTS", (4,) if condition.startswith("[") else (2,))
    solver = SolverConfig(command=f"{condition} && {built.text('solution')} > output.txt")
    found = Select(config(solver=solver)).process(built, context(tmp_path))
    evidence = found.data if isinstance(found, Item) else found.evidence
    measured = cast("list[dict[str, object]]", evidence["measured"])
    assert [one["decision"] for one in measured] == decisions
    assert [one["hints"] for one in measured] == list(range(len(decisions)))
    assert isinstance(found, Item) == (decisions[-1] == "selected")
    if isinstance(found, Rejection):
        assert found.reason == decisions[-1]


def test_one_suite_verifies_all_variants(built: Item) -> None:
    folders = [task_files(built.adding(instruction=text, hints=n)) for n, text in enumerate(instructions(built))]
    assert len({folder["instruction.md"].content for folder in folders}) == 4
    for folder in folders:
        assert {name for name in folder if folder[name] != folders[0][name]} <= {"instruction.md", "task.toml"}


def test_a_model_is_a_solver_too(built: Item, tmp_path: Path) -> None:
    right = f"Like this:\n```bash\n{built.text('solution')} > output.txt\n```\nDone."
    found = Select(config(solver=SolverConfig(model="m"))).process(
        built, context(tmp_path, "true", right, "x", "false")
    )
    assert isinstance(found, Item)
    (measured,) = cast("list[dict[str, object]]", found.data["measured"])
    assert (measured["hints"], measured["passed"], measured["attempts"]) == (0, 1, 4)
