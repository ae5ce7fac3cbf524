"""Stages over a store: what becomes of items, whatever the workers, failures and kills."""

import hashlib
import importlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from m2forge.errors import ConfigError, DataError, M2ForgeError, RunError
from m2forge.pipelines.config import PipelineConfig, QuestionsConfig
from m2forge.pipelines.output import WriteFolders, WriteLines
from m2forge.pipelines.run import render, run_stages
from m2forge.pipelines.shared_stage import Dedup
from m2forge.pipelines.stage import (
    Context,
    Item,
    Outcome,
    Passed,
    Pipeline,
    Rejection,
    Rule,
    SetStage,
    Source,
    Stage,
    stamp,
)
from m2forge.pipelines.store import Processed, StageYield, Store
from m2forge.tasks.folders.folder import FolderFile
from tests.pipelines.endpoint import completion, serving

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_KILLS = 20 if os.environ.get("M2FORGE_LONG") == "1" else 2


class Numbers(Source):
    name = "numbers"

    def __init__(self, num: int, mark: str = "") -> None:
        self.num, self.mark = num, mark

    def fingerprint(self) -> str:
        return f"{self.num}{self.mark}"

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        for number in range(self.num):
            yield Item(f"n{number}", {"n": number}) if number % 10 else Rejection("tenth", id=f"n{number}")


class Each(Stage):
    """A function of the number of an item, in threads or worker processes."""

    def __init__(self, name: str, decide: Callable[[Item, Context], Passed | Rejection]) -> None:
        self.name, self.decide = name, decide

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        return self.decide(item, context)


class InThreads(Each):
    runs_in = "threads"


class InProcesses(Each):
    runs_in = "processes"


class Collected(SetStage):
    name = "collected"

    def __init__(self) -> None:
        self.num_runs = 0
        self.found: list[Item] = []

    def process_all(self, items: Iterable[Item], context: Context) -> Iterator[Outcome]:
        self.num_runs += 1
        self.found = list(items)
        yield from self.found


def n_of(item: Item) -> int:
    number = item.data["n"]
    assert isinstance(number, int)
    return number


def fan(item: Item, context: Context) -> Passed | Rejection:
    number = n_of(item)
    if number % 7 == 0:
        return Rejection("seventh", {"n": number})
    drawn = context.random(item).randrange(1000)
    return [item.adding(copy=copy, drawn=drawn) for copy in range(number % 3)] or item


def slow_then_die(item: Item, context: Context) -> Passed:
    if n_of(item) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item.adding(blob=context.put(str(n_of(item)).encode()))


def config(**keys: Any) -> PipelineConfig:
    return PipelineConfig(name="run", questions=QuestionsConfig(source="counters"), **keys)


def run(folder: Path, source: Source, *stages: Stage | SetStage, **keys: Any) -> list[StageYield]:
    folder.mkdir(exist_ok=True)
    return run_stages(Pipeline(source, stages), config(**keys), folder)


def test_every_item_passes_is_rejected_or_fails(tmp_path: Path) -> None:
    def pick(item: Item) -> Passed | Rejection:
        if n_of(item) % 7 == 2:
            raise ZeroDivisionError("at two")
        return [] if n_of(item) == 1 else item

    collected = Collected()
    yields = run(tmp_path, Numbers(50), InThreads("fan", fan), Rule("pick", pick), collected)
    numbers, fanned, picked, last = yields
    assert (numbers.num_in, numbers.num_passed, numbers.rejected) == (50, 45, {"tenth": 5})
    assert (fanned.num_in, fanned.rejected) == (45, {"seventh": 7})
    assert fanned.num_made == picked.num_in > fanned.num_passed
    assert picked.failed.keys() == {"ZeroDivisionError", "no item"}
    assert all(one.num_in == one.num_passed + one.num_rejected + one.num_failed for one in yields)
    assert last.num_in == len(collected.found) == picked.num_passed
    written = json.loads((tmp_path / "yields.json").read_text())
    assert written["is_finished"]
    assert written["num_accepted"] == last.num_made
    assert [one["name"] for one in written["stages"]] == ["numbers", "fan", "pick", "collected"]
    assert sum(1 for _ in render(yields).rows) == 4 + 1 + 1 + 2
    (evidence,) = sqlite3.connect(tmp_path / "pipeline.db").execute(
        "SELECT evidence FROM outcome WHERE reason = 'ZeroDivisionError' LIMIT 1"
    )
    assert json.loads(evidence[0])["error"] == "at two"


def test_results_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    def late(item: Item, context: Context) -> Passed | Rejection:
        time.sleep(random.random() / 500)
        return fan(item, context)

    found = []
    for kind, decide in ((Each, fan), (InThreads, late)):
        collected = Collected()
        run(tmp_path / f"{kind.__name__}", Numbers(60), kind("fan", decide), collected, workers=7)
        found.append(collected.found)
    assert found[0] == found[1]
    assert [n_of(item) for item in found[0]] == sorted(n_of(item) for item in found[0])
    assert [item.id for item in found[0]][:4] == ["n1-0", "n2-0", "n2-1", "n3"]


def test_a_worker_process_that_dies_fails_its_item_alone(tmp_path: Path) -> None:
    collected = Collected()
    _, died, _ = run(tmp_path, Numbers(6), InProcesses("die", slow_then_die), collected, workers=1)
    assert died.failed == {"worker process died": 1}
    assert [n_of(item) for item in collected.found] == [1, 2, 4, 5]


def test_failed_items_run_again_and_later_stages_follow(tmp_path: Path) -> None:
    seen: list[int] = []
    is_broken = True

    def flaky(item: Item, context: Context) -> Passed:
        seen.append(n_of(item))
        if is_broken and n_of(item) == 1:
            raise OSError("no endpoint")
        return item.adding(text=f"the same {n_of(item) // 2 * 2 % 8} words for several numbers in this text")

    done: list[str] = []

    def costly(item: Item) -> Passed:
        done.append(item.id)
        return item

    def stages() -> Sequence[Stage | SetStage]:
        lines = WriteLines("lines.jsonl", lambda item: {"id": item.id})
        return InThreads("flaky", flaky), Dedup(lambda item: item.text("text")), Rule("costly", costly), lines

    _, first, *_ = run(tmp_path, Numbers(6), *stages())
    assert first.failed == {"OSError": 1}
    assert (tmp_path / "lines.jsonl").read_text() == '{"id": "n2"}\n{"id": "n4"}\n'
    is_broken = False
    _, again, dedup, *_ = run(tmp_path, Numbers(6), *stages())
    assert (again.num_failed, seen) == (0, [1, 2, 3, 4, 5, 1])
    assert dedup.num_in == 5
    # What was accepted before is not processed again.
    assert done == ["n2", "n4", "n1"]
    lines = (tmp_path / "lines.jsonl").read_text()
    assert lines == '{"id": "n1"}\n{"id": "n2"}\n{"id": "n4"}\n'
    run(tmp_path / "at-once", Numbers(6), *stages())
    assert (tmp_path / "at-once" / "lines.jsonl").read_text() == lines


def test_an_item_that_is_rejected_now_takes_back_its_outcomes(tmp_path: Path) -> None:
    is_broken = True

    def flaky(item: Item, context: Context) -> Passed:
        if is_broken and n_of(item) == 1:
            raise OSError("no endpoint")
        return item.adding(text="the same words in every text")

    def folder(item: Item, context: Context) -> tuple[str, dict[str, FolderFile]]:
        return item.id, {"task.toml": FolderFile(b"")}

    def stages() -> Sequence[Stage | SetStage]:
        return InThreads("flaky", flaky), Dedup(lambda item: item.text("text")), WriteFolders("tasks", folder)

    run(tmp_path, Numbers(4), *stages())
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == ["n2"]
    is_broken = False
    *_, dedup, write = run(tmp_path, Numbers(4), *stages())
    assert (dedup.rejected, write.num_in) == ({"near-duplicate": 2}, 1)
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == ["n1"]


def test_a_written_folder_is_repaired_and_names_are_taken_once(tmp_path: Path) -> None:
    def folder(item: Item, context: Context) -> tuple[str, dict[str, FolderFile]]:
        name = {4: "n2", 5: "../n5"}.get(n_of(item), item.id)
        return name, {"task.toml": FolderFile(b""), "instruction.md": FolderFile(item.id.encode())}

    for _ in range(2):
        *_, write = run(tmp_path, Numbers(6), WriteFolders("tasks", folder))
        assert write.rejected == {"name is taken": 1, "no valid task folder": 1}
        tasks = tmp_path / "tasks"
        assert sorted(path.name for path in tasks.iterdir()) == ["n1", "n2", "n3"]
        assert (tasks / "n2" / "instruction.md").read_bytes() == b"n2"
        (tasks / "n2" / "instruction.md").unlink()
        (tasks / ".n3.abc.partial").mkdir()


def test_a_source_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.pipelines.run.NUM_COMMITTED", 5)

    class Broken(Numbers):
        def read(self, context: Context) -> Iterator[Item | Rejection]:
            for number, record in enumerate(super().read(context)):
                if number == 17:
                    raise DataError("the disk was pulled out")
                yield record

    with pytest.raises(DataError, match="pulled out"):
        run(tmp_path, Broken(30), Each("fan", fan))
    collected = Collected()
    numbers, *_ = run(tmp_path, Numbers(30), Each("fan", fan), collected)
    assert (numbers.num_in, numbers.num_passed, numbers.rejected) == (30, 27, {"tenth": 3})
    whole = Collected()
    run(tmp_path / "whole", Numbers(30), Each("fan", fan), whole)
    assert collected.found == whole.found


def test_a_lost_outcome_is_noticed(tmp_path: Path) -> None:
    with Store(tmp_path / "pipeline.db") as store:
        store.add_records(0, [Item("a", {}), Item("b", {})], 0.0)
        store.check(0, "source")
        store.commit(1, [Processed("00000000", "a", Rejection("no"))])
        with pytest.raises(RunError, match=r"2 items in, 0 passed \+ 1 rejected \+ 0 failed"):
            store.check(1, "stage")


def test_an_outcome_that_is_not_json_fails_its_item_alone(tmp_path: Path) -> None:
    def odd(item: Item) -> Passed | Rejection:
        if n_of(item) == 3:
            return Rejection("odd", {"bytes": b""})
        if n_of(item) == 4:
            return Item("\ud800", {"text": "\ud800"})
        return item.adding(odd=b"x" if n_of(item) == 2 else "x")

    collected = Collected()
    _, found, _ = run(tmp_path, Numbers(6), Rule("odd", odd), collected)
    assert (found.num_passed, found.failed) == (3, {"not JSON": 2})
    assert [item.id for item in collected.found] == ["n1", "?", "n5"]
    assert collected.found[1].data == {"text": "\ud800"}


def test_a_damaged_store_is_one_message(tmp_path: Path) -> None:
    def fill(item: Item) -> Passed:
        sqlite3.connect(tmp_path / "pipeline.db").execute("DROP TABLE outcome")
        return item

    with pytest.raises(RunError, match=r"pipeline\.db: no such table: outcome; make room"):
        run(tmp_path, Numbers(2), Rule("fill", fill))


def test_stages_that_cannot_go_on_end_the_run(tmp_path: Path) -> None:
    class Short(Collected):
        def process_all(self, items: Iterable[Item], context: Context) -> Iterator[Outcome]:
            yield next(iter(items))

    def stop(item: Item, context: Context) -> Passed:
        raise RunError("no sandbox")

    with pytest.raises(RunError, match="5 items in, 1 outcomes"):
        run(tmp_path / "a", Numbers(6), Short())
    for kind in (Each, InThreads):
        with pytest.raises(RunError, match="no sandbox"):
            run(tmp_path / kind.__name__, Numbers(6), kind("stop", stop))
    with pytest.raises(RunError, match="different name"):
        run(tmp_path / "b", Numbers(6), Each("fan", fan), Each("fan", fan))
    run(tmp_path / "c", Numbers(6), Each("fan", fan))
    with pytest.raises(ConfigError, match="other input"):
        run(tmp_path / "c", Numbers(6, "changed"), Each("fan", fan))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "pipeline.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(M2ForgeError, match=r"pipeline\.db: cannot be opened"):
        run(tmp_path / "d", Numbers(6), Each("fan", fan))


# -- kills -------------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [folder / "lines.jsonl", *(path for path in (folder / "tasks").rglob("*") if path.is_file())]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def stored(folder: Path) -> set[str]:
    """Requests whose completion a killed run had stored."""
    try:
        connection = sqlite3.connect(f"file:{folder / 'pipeline.db'}?mode=ro", uri=True)
        return {str(row[0]) for row in connection.execute("SELECT request FROM completion")}
    except sqlite3.OperationalError:
        return set()


def test_a_killed_run_resumes_to_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    program: Any = importlib.import_module("pipelines_program")
    # Only the killed processes have worker processes: the files do not depend on it.
    monkeypatch.setattr(program.Digest, "runs_in", "main")

    def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        time.sleep(0.002)
        return completion(hashlib.sha256(body["messages"][0]["content"].encode()).hexdigest())

    rng, num = random.Random(7), 20 * NUM_KILLS
    with serving(respond) as endpoint:
        program.run(tmp_path / "whole", endpoint.url, num, 2)
        num_whole = len(endpoint.requests)
        endpoint.requests.clear()
        command = [sys.executable, str(BENCHMARKS / "pipelines_program.py"), str(tmp_path / "killed"), endpoint.url]
        env = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
        num_asked_again, before = 0, set[str]()
        for kill in range(NUM_KILLS):
            num_before = len(endpoint.requests)
            process = subprocess.Popen([*command, str(num), "1"], env=env, stderr=subprocess.DEVNULL)
            # The first kills hit requests, the last ones what follows.
            wanted = num_before + num_whole // (NUM_KILLS + 1)
            while len(endpoint.requests) < wanted and process.poll() is None and kill < NUM_KILLS - 1:
                time.sleep(0.001)
            time.sleep(rng.random() * (0.02 if kill < NUM_KILLS - 1 else 1.0))
            process.kill()
            process.wait()
            num_asked_again += sum(
                is_among(request, before, program.num_draws) for request in endpoint.requests[num_before:]
            )
            before = stored(tmp_path / "killed")
        num_before = len(endpoint.requests)
        program.run(tmp_path / "killed", endpoint.url, num, 1)
        num_asked_again += sum(
            is_among(request, before, program.num_draws) for request in endpoint.requests[num_before:]
        )
    assert len(before) > num_whole // 4, "the kills came before anything was stored"
    assert num_asked_again == 0
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    assert len(files_of(tmp_path / "whole")) > num


def is_among(request: dict[str, Any], stored: set[str], num_draws: Callable[[str], int]) -> bool:
    """Whether all draws of a request were stored: the draw itself is not sent."""
    same = [text for text in stored if json.loads(text)["messages"] == request["messages"]]
    return len(same) >= num_draws(request["messages"][0]["content"])


@pytest.mark.parametrize("change", ["edit", "age", "rename", "add"])
def test_a_stamp_of_a_folder_is_that_of_its_files(change: str, tmp_path: Path) -> None:
    inner = tmp_path / "tasks" / "one" / "tests"
    inner.mkdir(parents=True)
    (inner / "test.sh").write_text("true\n")
    before = stamp(tmp_path / "tasks")
    assert stamp(tmp_path / "tasks") == before
    match change:
        case "edit":
            (inner / "test.sh").write_text("false\n")
        case "age":
            os.utime(inner / "test.sh", (0, 0))
        case "rename":
            (inner / "test.sh").rename(inner / "tests.sh")
        case _:
            (inner / "more.sh").touch()
    assert stamp(tmp_path / "tasks") != before
