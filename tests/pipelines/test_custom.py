"""A pipeline of the user's own: the documentation's example, worker processes, and what is wrong with a file."""

import json
import re
from pathlib import Path

import pytest

from m2forge.cli import main

TEXT = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
NOTES = "a note of five words\nshort\na note of five words\nanother note with other words\n"
IN_PROCESSES = """
from m2forge.pipelines.output import WriteLines
from m2forge.pipelines.stage import Item, Pipeline, Source, Stage

class Two(Source):
    def fingerprint(self): return "two"
    def read(self, context): yield from (Item(name, {}) for name in "ab")

class Upper(Stage):
    name, runs_in = "upper", "processes"
    def __init__(self, extra): self.extra = extra
    def process(self, item, context): return item.adding(text=item.id.upper())

def make(options):
    return Pipeline(Two(), (Upper(options.get("extra")), WriteLines("lines.jsonl", lambda item: dict(item.data))))

def bad(options):
    return Pipeline(Two(), (Upper(lambda: 0),))

def no_pipeline(options): return 3
def raises(options): return options["missing"]
number = 3
"""


def run(folder: Path, reference: str, *options: str) -> int:
    (folder / "run.toml").write_text(f'name = "own"\n[custom]\npipeline = "{reference}"\n')
    return main(["pipeline", str(folder / "run.toml"), "--runs", str(folder / "runs"), *options])


def test_the_documentations_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = re.findall(r"```toml\n(name = \"notes\".*?)```", TEXT, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    for name, text in (("notes.toml", config), ("my_pipeline.py", code), ("notes.txt", NOTES)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", "notes.toml", "--dry-run"]) == 0
    assert not Path("runs").exists()
    assert main(["pipeline", "notes.toml"]) == 0
    lines = Path("runs/notes/notes.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == NOTES.splitlines()[::3]
    stages = {one["name"]: one for one in json.loads(Path("runs/notes/yields.json").read_text())["stages"]}
    assert (stages["length"]["rejected"], stages["dedup"]["rejected"]) == ({"short": 1}, {"near-duplicate": 1})
    assert main(["pipeline", "notes.toml", "--set", "custom.options.min_words=1"]) == 2


def test_own_stages_run_in_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(IN_PROCESSES)
    assert run(tmp_path, f"{tmp_path}/mine.py:make", "--set", "workers=1") == 0
    lines = (tmp_path / "runs" / "own" / "lines.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "A"}, {"text": "B"}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:mak", "it has no 'mak'; did you mean 'make'"),
        ("none.py:make", "none.py: no such file"),
        ("mine.py", "expected FILE.py:NAME or PACKAGE.MODULE:NAME"),
        ("mine.py:number", "expected a function that returns a Pipeline, received 3"),
        ("mine.py:no_pipeline", "expected a Pipeline"),
        ("mine.py:raises", "KeyError: 'missing'"),
        ("mine.py:bad", "stage upper: it runs in worker processes and cannot be pickled"),
        ("broken.py:make", "raised at import"),
    ],
)
def test_a_pipeline_that_cannot_be_made_is_one_message(
    name: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(IN_PROCESSES)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert run(tmp_path, f"{tmp_path}/{name}") == 2
    assert message in capsys.readouterr().err + caplog.text
