"""The list of a folder's runs: what is listed, in which state, and what is refused over HTTP."""

import fcntl
import json
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from m2forge.config import TomlValue
from m2forge.errors import NotFoundError, TrainingError
from m2forge.evaluate import run as evaluate_run
from m2forge.page import run_list
from m2forge.page.run_list import RunList, id_of, work_folder
from m2forge.page.serve import make_page
from m2forge.pretrain.stage import run_pretrain
from m2forge.text.format import ChatFormat
from tests.page.conftest import serving_app
from tests.page.run_folder import make_demo, metrics_line, write_corpus, write_evaluation, write_run
from tests.page.scene import Scene
from tests.page.test_app import ROOT, get, status
from tests.pretrain import small

HOSTILE = 'a <img src=x onerror=window.pwned=1> & "b"\':~%2e..é'


def listed(runs: RunList) -> list[dict[str, Any]]:
    """The rows as a browser receives them."""
    rows: list[dict[str, Any]] = json.loads(json.dumps(runs.describe()))["runs"]
    return rows


def rows_of(root: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in listed(RunList(root))}


def figures_of(row: dict[str, Any]) -> dict[str, float]:
    return {figure["label"]: figure["value"] for figure in row["figures"]}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo(tmp_path_factory.mktemp("folder") / "runs")


@pytest.fixture(scope="module")
def url(demo: Path) -> Iterator[str]:
    with serving_app(make_page(demo)) as found:
        yield found


# -- rows --------------------------------------------------------------------------------------------------------------


def test_every_stage_is_listed_with_its_figures(demo: Path) -> None:
    rows = rows_of(demo)
    assert {name: row["stage"] for name, row in rows.items()} == {
        "demo/pretrain": "pretrain",
        "demo/sft": "sft",
        "demo/rl": "rl",
        "demo/pretrain/eval": "eval",
        "pages": "corpus",
    }
    assert {row["state"] for row in rows.values()} == {"finished"}
    assert (rows["demo/pretrain"]["step"], rows["demo/pretrain"]["num_steps"]) == (10, 10)
    assert figures_of(rows["demo/pretrain"]) == {"loss": 0.8, "tokens/s": 5000.0, "tokens": 1000.0}
    assert figures_of(rows["demo/sft"])["held-out loss"] == 1.5
    assert figures_of(rows["demo/rl"]) == {
        "held-out success": 0.75,
        "reward": 0.5,
        "pass rate": 0.25,
        "tokens/s": 250.0,
    }
    assert rows["demo/rl"]["figures"][0]["first"] == 0.25
    assert figures_of(rows["demo/pretrain/eval"]) == {"held-out loss": 2.5, "bits/byte": 1.25, "needle": 0.75}
    assert figures_of(rows["pages"]) == {"tokens": 2000.0, "documents": 6.0, "domains": 2.0}
    assert (rows["demo/pretrain"]["model"], rows["demo/sft"]["model"]) == ("m2-nano", "demo/pretrain/model")
    assert rows["demo/sft"]["started_s"] == 1_790_000_002.0
    assert [name for name, row in rows.items() if row["has_page"]] == ["demo/pretrain", "demo/rl", "demo/sft"]


def test_real_runs_are_listed_as_they_ended(tmp_path: Path) -> None:
    pages = small.write_corpus(tmp_path / "pages")
    for name, lr, num_steps in (("good", 1e-3, 2), ("diverged", 1e30, 14)):
        phase: dict[str, TomlValue] = {"name": "a", "pack_tokens": 32, "context": 32, "steps": num_steps}
        config = small.make_config(pages, name=name, phases=[phase | {"lr": {"start": lr}}])
        with pytest.raises(TrainingError) if name == "diverged" else nullcontext():
            run_pretrain(config, tmp_path / "runs")
    rows = rows_of(tmp_path)
    assert [(name, row["stage"], row["state"]) for name, row in rows.items()] == [
        ("pages", "corpus", "finished"),
        ("runs/diverged", "pretrain", "failed"),
        ("runs/good", "pretrain", "finished"),
    ]
    assert "had no finite gradient" in rows["runs/diverged"]["failure"]
    assert "loss" not in figures_of(rows["runs/diverged"])
    assert (rows["runs/good"]["step"], rows["runs/good"]["model"]) == (2, "m2-nano")
    assert set(figures_of(rows["runs/good"])) == {"loss", "tokens/s", "tokens"}


def test_the_file_of_an_evaluation_is_the_one_that_it_writes() -> None:
    assert evaluate_run.CONFIG_FILE in run_list.EVAL_FILES


def test_runs_that_are_being_written_are_listed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "now", num_steps=2, is_finished=False)
    runs = RunList(tmp_path)

    def row() -> dict[str, Any]:
        return listed(runs)[0]

    assert (row()["state"], row()["step"]) == ("running", 2)
    with (folder / "metrics.jsonl").open("a") as file:
        text = metrics_line(3, "pretrain")
        file.write(text[:20])
        file.flush()
        assert row()["step"] == 2
        file.write(text[20:])
    assert row()["step"] == 3
    os.utime(folder / "metrics.jsonl", (1e9, 1e9))
    assert row()["state"] == "stopped"
    (folder / "failure.txt").write_text("out of memory\n")
    assert (row()["state"], row()["failure"]) == ("failed", "out of memory")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert row()["state"] == "running"
    (folder / "config.toml").write_text("name = [")
    assert "config.toml" in row()["problem"]


def test_a_corpus_that_is_being_built_is_listed(tmp_path: Path) -> None:
    work = work_folder(tmp_path / "pages")
    work.mkdir()
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert (rows_of(tmp_path)["pages"]["stage"], rows_of(tmp_path)["pages"]["state"]) == ("corpus", "running")
    assert rows_of(tmp_path)["pages"]["state"] == "stopped"
    write_corpus(tmp_path / "pages")
    assert rows_of(tmp_path)["pages"]["state"] == "finished"


def test_foreign_folders_and_what_agents_write_are_ignored(tmp_path: Path) -> None:
    for name, file, text in (
        ("rust", "config.toml", "[build]\njobs = 2\n"),
        ("other", "metrics.jsonl", '{"epoch": 1, "accuracy": 0.5}\n'),
        ("web", "manifest.json", '{"name": "site", "icons": []}'),
        ("judge", "eval.json", "{}"),
        (".hidden", "config.toml", 'corpus = "c"'),
        ("empty", "notes.txt", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    outside = write_run(tmp_path.parent / f"{tmp_path.name}-outside", "secret")
    (tmp_path / "link").symlink_to(outside)
    write_run(tmp_path, "real/agents/fake")
    assert set(rows_of(tmp_path)) == {"real/agents/fake"}
    (tmp_path / "real" / "config.toml").write_text('corpus = "c"')
    assert set(rows_of(tmp_path)) == {"real"}


def test_an_evaluation_of_another_version_says_so(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "eval")
    (tmp_path / "eval" / "eval.json").write_text('{"model": "m", "from_the_future": 1}')
    assert "another version" in rows_of(tmp_path)["eval"]["problem"]


def test_only_so_many_folders_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "MAX_FOLDERS", 3)
    for index in range(5):
        write_run(tmp_path, f"run-{index}", num_steps=1)
    runs = RunList(tmp_path)
    assert [row["name"] for row in listed(runs)] == ["run-0", "run-1"]
    assert "only 3 folders" in str(runs.describe()["problems"])


def test_ids_are_plain_and_differ(tmp_path: Path) -> None:
    names = ["a", "a/b", "a:b", "a~2Fb", "a b", "..", "é", os.fsdecode(b"\xff"), ""]
    ids = [id_of(name) for name in names]
    assert len(set(ids)) == len(names)
    assert id_of("demo/rl") == "demo:rl"
    assert all(id.isascii() and "/" not in id and "%" not in id for id in ids)


def test_a_hundred_runs_are_listed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "WALK_SHARE", 1.0)
    config = (ROOT / "configs" / "rl" / "demo.toml").read_text()
    for index in range(100):
        folder = write_run(tmp_path, f"sweep/run-{index}", "rl", num_steps=300)
        (folder / "config.toml").write_text(config)
    runs = RunList(tmp_path)
    assert len(listed(runs)) == 100
    times_s = []
    for _ in range(5):
        before_s = time.process_time()
        assert len(listed(runs)) == 100
        times_s.append(time.process_time() - before_s)
    print(f"100 runs are listed in {min(times_s):.3f} s")
    # Time of the processor: other programs on the machine do not count.
    assert min(times_s) < 0.3


def test_metrics_of_runs_shown_long_ago_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "MAX_OPEN", 1)
    for name in ("a", "b"):
        write_run(tmp_path, name, num_steps=3)
    runs = RunList(tmp_path)
    first = runs.find("a")
    assert first is not None
    revision = first.curves.since(-1, 0)["revision"]
    assert runs.find("a") is first
    assert first.curves.since(int(str(revision)), 3)["is_whole"] is False
    runs.find("b")
    assert first.curves.since(int(str(revision)), 3)["is_whole"] is True


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def test_each_run_has_its_page_below_the_list(url: str, demo: Path) -> None:
    listed = get(f"{url}/api/runs")
    assert (listed["name"], len(listed["runs"]), listed["problems"]) == ("runs", 5, [])
    code, body = status(f"{url}/")
    assert code == 200
    for path in [part.split('"')[0] for part in body.split('"static/')[1:]]:
        assert status(f"{url}/static/{path}")[0] == 200, path
    page = f"{url}/runs/demo:rl"
    assert status(page)[1] == status(f"{page}/")[1]
    for path in [part.split('"')[0] for part in status(f"{page}/")[1].split('"static/')[1:]]:
        assert status(f"{page}/static/{path}")[0] == 200, path
    about = get(f"{page}/api/run")
    assert (about["name"], about["state"], about["list_url"]) == ("rl", "finished", "../../")
    curves = get(f"{page}/api/curves")
    assert curves["tokens"] == [500.0 * step for step in range(1, 11)]
    assert get(f"{page}/api/curves?revision={curves['revision']}&step=10")["steps"] == [10]


def test_the_pages_of_listed_runs_show_their_pools(done: Path, format: ChatFormat, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "runs" / "a b" / "rl", format, num_steps=6, group_size=2, queue=8, window=6)
    scene.run(2)
    scene.pool.close()
    with serving_app(make_page(tmp_path / "runs")) as url:
        page = f"{url}/runs/{get(f'{url}/api/runs')['runs'][0]['id']}"
        episodes = get(f"{page}/api/episodes?limit=3")["episodes"]
        assert len(episodes) == 3
        assert get(f"{page}/api/episodes/{episodes[0]['id']}/outline")["num_calls"] >= 0
        assert get(f"{page}/api/queue")["queue"] == 8
        assert status(f"{page}/api/episodes/99999")[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "/runs/none/",
        "/runs/none/api/run",
        "/runs/../api/curves",
        "/runs/..%2f..%2fetc/api/run",
        "/runs/demo%2frl/api/run",
        "/runs/demo/rl/api/run",
        "/runs/%2e%2e/api/run",
        "/runs/~2e~2e/api/run",
        "/runs/demo:rl:..:sft/api/run",
        "/runs/pages/api/run",
        "/runs/demo:rl/static/..%2f..%2fapp.py",
        "/runs/demo:rl/config.toml",
        "/runs/~/api/run",
        "/static/..%2frun_list.py",
        "/api/run",
    ],
)
def test_what_is_no_listed_run_is_refused(url: str, path: str) -> None:
    code, body = status(url + path)
    assert code == 404
    assert json.loads(body)["error"]


def test_names_with_odd_characters_are_served(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "")
    write_run(tmp_path, name)
    with serving_app(make_page(tmp_path)) as url:
        (row,) = get(f"{url}/api/runs")["runs"]
        assert row["name"] == name
        assert row["id"] == urllib.parse.quote(row["id"], safe=":~")
        assert get(f"{url}/runs/{row['id']}/api/run")["name"] == name


def test_the_list_is_guarded_as_a_run_is(demo: Path) -> None:
    with serving_app(make_page(demo)) as url:
        for path in ("/", "/api/runs", "/runs/demo:rl/", "/runs/demo:rl/api/run"):
            assert status(url + path, {"Host": "evil.example"})[0] == 421
            assert status(url + path, method="POST")[0] == 405
    with serving_app(make_page(demo, key="abc")) as url:
        for path in ("/", "/api/runs", "/runs/demo:rl/", "/runs/demo:rl/api/run", "/static/runs.js"):
            assert status(url + path)[0] == 401
            assert status(url + path, {"Cookie": "m2forge_page=abc"})[0] == 200


def test_a_folder_without_runs_says_how_to_start_one(
    demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_page(demo)
    assert not caplog.records
    make_page(tmp_path)
    assert f"`m2forge pretrain CONFIG --runs {tmp_path}`" in caplog.text


def test_a_run_gets_its_page_and_a_folder_its_list(demo: Path, tmp_path: Path) -> None:
    with serving_app(make_page(demo / "demo" / "rl")) as url:
        assert get(f"{url}/api/run")["list_url"] is None
    with serving_app(make_page(tmp_path)) as url:
        assert get(f"{url}/api/runs")["runs"] == []
        # A run starts in the folder itself, as when its page is opened before it.
        (tmp_path / "config.toml").write_text('corpus = "c"')
        until_s = time.monotonic() + 30
        while not (rows := get(f"{url}/api/runs")["runs"]) and time.monotonic() < until_s:
            time.sleep(0.05)  # a walk that a busy machine interrupts is not repeated at once
        (row,) = rows
        assert row["name"] == tmp_path.name
        assert get(f"{url}/runs/{row['id']}/api/run")["stage"] == "pretrain"
    with pytest.raises(NotFoundError, match="a folder of runs"):
        make_page(tmp_path / "none")


def test_the_command_serves_a_folder_of_runs(demo: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "m2forge", "page", str(demo), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        assert len(get(f"{url}/api/runs")["runs"]) == 5
        assert get(f"{url}/runs/demo:sft/api/run")["name"] == "sft"
        server.terminate()
        assert server.wait(20) in (0, -15)
