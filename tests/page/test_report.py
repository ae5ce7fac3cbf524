"""The report in one file: its script whole, its data harmless, its two trajectories alike."""

import json
import shutil
from pathlib import Path

import pytest

from m2forge.errors import NotFoundError
from m2forge.page.pool_reader import PoolReader
from m2forge.page.report import bundle, collect, find_contrast, find_held_out, json_for_script, write_report
from m2forge.page.run_folder import Run
from m2forge.rl.eval import make_attempt, read_attempts, write_attempts
from m2forge.text.format import ChatFormat
from m2forge.tree.token_tree import TokenTree
from tests.page.scene import Scene, make_call

HOSTILE = {"</script><!--": "<script>&amp;\u2028\u2029\ud800</script>]]>"}


def test_data_cannot_end_its_element() -> None:
    text = json_for_script(HOSTILE)
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()
    assert json.loads(text) == HOSTILE


def test_the_modules_become_one_script() -> None:
    script = bundle()
    assert "import " not in "".join(line for line in script.splitlines(keepends=True) if not line.startswith("//"))
    assert not any(line.startswith("export ") for line in script.splitlines())


def test_a_report_is_written_for_any_run(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write_report(done, out)
    text = out.read_text()
    assert "Content-Security-Policy" in text
    assert "http://" not in text.replace("http://www.w3.org/", "")
    assert "src=" not in text
    empty = tmp_path / "empty"
    empty.mkdir()
    write_report(empty, out)
    assert "<title>empty" in out.read_text()
    with pytest.raises(NotFoundError):
        write_report(tmp_path / "none", out)


def test_before_and_after_are_alike(done: Path) -> None:
    sides = collect(Run(done))["sides"]
    assert isinstance(sides, dict)
    before, after = (side["head"] for side in (sides["before"], sides["after"]) if isinstance(side, dict))
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert (before["family"], before["difficulty"]) == (after["family"], after["difficulty"])
    assert before["reward_parts"]["perf"] < 1 == after["reward_parts"]["perf"]
    assert before["oldest_step"] < after["oldest_step"]


def test_the_same_task_goes_before_alike_ones(format: ChatFormat, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", format, queue=8, window=8, group_size=2)
    alike, same = [scene.next_task() for _ in range(4)][::3], scene.next_task()
    assert (alike[0].difficulty, alike[0].domain) == (alike[1].difficulty, alike[1].domain)
    scene.pool.put([(alike[0], 1), (same, 2), (alike[1], 1)])
    for lease, (version, perf) in zip(
        scene.pool.lease("loop", 4), ((0, 0.0), (1, 0.0), (3, 1.0), (9, 1.0)), strict=True
    ):
        scene.record(lease, [make_call([20, 21], [22], version, 0.0, scene.draw)])
        scene.finish(lease, perf, "x")
    with PoolReader(scene.pool.config).read() as connection:
        found = find_contrast(connection)
    scene.pool.close()
    assert found is not None
    assert (found.before, found.after, found.is_same_task) == (2, 3, True)


def test_held_out_attempts_go_before_those_of_training(done: Path, format: ChatFormat, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(done, run_dir)
    scene = Scene(tmp_path / "other", format, queue=8, window=8, group_size=2)
    tasks = [scene.next_task() for _ in range(3)]
    scene.pool.close()
    perfs = {0: (0.0, 0.0, 1.0), 4: (0.0, 1.0, 1.0), 9: (0.0, 1.0, 0.0)}
    for step, earned in perfs.items():
        tree = TokenTree(scene.pool.vocab_size)
        tree.add(make_call([20, 21], [22], step, 0.0, scene.draw), "x", episode="x")
        pairs = zip(tasks, earned, strict=True)
        write_attempts(
            run_dir / "kept", step, [make_attempt(step, task, perf, "x", None, tree) for task, perf in pairs]
        )
    kept = read_attempts(run_dir / "kept")
    assert [(found.step, found.perf) for found in kept] == [(n, perf) for n, earned in perfs.items() for perf in earned]
    found = find_held_out(kept)
    assert found is not None
    # The third task was solved only by the earlier version.
    assert [(side.task.id, side.step) for side in found] == [(tasks[1].id, 0), (tasks[1].id, 9)]
    sides = collect(Run(run_dir))["sides"]
    assert isinstance(sides, dict)
    assert "held-out" in str(sides["note"])
    after = sides["after"]
    assert isinstance(after, dict)
    assert (len(after["calls"]), after["head"]["oldest_step"]) == (1, 9)
    assert find_held_out(kept[:3]) is None
