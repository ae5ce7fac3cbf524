"""`m2forge rl` on tasks of one's own: JSONL tasks, a verifier and a reward function in files, a program per attempt.
Commands and a judge at an HTTP endpoint verify the tasks of two more files. Where namespaces are allowed, programs and
commands run in sandboxes, and a fourth family is task folders.

One run for all cases, with every process killed in between."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select

from m2forge.cli import main
from m2forge.config import TomlValue, write_resolved
from m2forge.model.checkpoint import load_model
from m2forge.model.config_file import read_config
from m2forge.model.lora import is_adapter_folder
from m2forge.page.run_folder import Run
from m2forge.pool.pool import Pool
from m2forge.pool.tables import episode_table, unit_table
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import read_results
from m2forge.rl.layout import Layout
from tests.rl.killed_run import run_with_kills, trained_artifacts
from tests.rl.scene import make_config, make_model
from tests.sandbox.places import problem
from tests.tasks.folders.scene import new_folder
from tests.tasks.folders.scene import table as folder_table
from tests.tasks.judge_endpoint import completion, serve

PROGRAM = Path(__file__).parent / "shell_agent.py"
CODE = """
from pathlib import Path
from m2forge import Verdict

def verify(task, submission):
    path = Path(submission.workspace, "answer.txt")
    text = path.read_text() if path.exists() else ""
    word = task.instruction.split()[3]
    seen = Path(submission.workspace, "note.txt").read_text()
    evidence = {
        "seen": seen,
        "roles": [message["role"] for message in submission.messages],
        "num_steps": len(submission.steps),
        "answer": submission.answer,
    }
    return Verdict(float(text == word), evidence, criteria={"written": float(bool(text))})

def broken(task, submission):
    raise KeyError("a verifier that its author broke")

def score(task, submission, verdict):
    return [10.0 * verdict.perf + index for index, _ in enumerate(submission.steps)]
"""
WORDS = ("north", "south", "east", "west", "up", "down")
CRITERION = "It says that it is done."
FILES = ("tasks", "commands", "judged")
FAMILIES = FILES if problem("namespace") else (*FILES, "folders")
"""They take turns: a run of four groups has tasks of each."""
TEST = """#!/bin/sh
[ "$(cat /workspace/answer.txt)" = WORD ] && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
"""
LIMIT_S = 500.0


def write_tasks(folder: Path) -> Path:
    (folder / "my_code.py").write_text(CODE)
    for name in FILES:
        lines: list[dict[str, Any]] = [
            {
                "id": word,
                "instruction": f"Write the word {word} to answer.txt",
                "files": {"note.txt": word},
                "split": "held_out" if word == "down" else "train",
                "verifier": verifier(name, word),
            }
            for word in WORDS
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_folders(folder / "folders", WORDS)
    return folder / "tasks.jsonl"


def write_folders(folder: Path, words: Sequence[str]) -> None:
    """A task folder for each word; the last is held out."""
    for word in words:
        split = "held_out" if word == words[-1] else "train"
        origin: TomlValue = {"m2forge": {"source": "words", "split": split}}
        texts = {"instruction.md": f"Write the word {word} to answer.txt", "tests/test.sh": TEST.replace("WORD", word)}
        texts["environment/Dockerfile"] = "FROM host\nCOPY --chown=1000:1000 note.txt /workspace/\nWORKDIR /workspace\n"
        texts["environment/note.txt"] = word
        new_folder(folder / word, folder_table(metadata=origin), texts)


def verifier(family: str, word: str) -> dict[str, Any]:
    if family == "commands":
        return {"command": ["sh", "-c", f'test "$(cat answer.txt)" = {word}']}
    return {"judge": [CRITERION]} if family == "judged" else {"python": "my_code.py:verify"}


def judge(body: dict[str, object], key: str) -> tuple[int, object]:
    """Says yes, with a quote, where the conversation ends as it should."""
    is_met = "[assistant] done" in str(body["messages"])
    return completion(json.dumps({"criteria": [{"met": is_met, "quote": "done"}]}))


def make_run(model: Path, folder: Path, *sources: str, **fields: object) -> RLConfig:
    families = [
        {"source": f"folders:{folder / source}" if source == "folders" else str(folder / source)} for source in sources
    ]
    stage = {"name": "only", "domains": {"agent": {"ratio": 1.0, "context": 2048, "families": families}}}
    return make_config(
        model,
        **{
            "num_steps": 2,
            "agent": {
                "kind": "command",
                "command": [sys.executable, str(PROGRAM), "{model}", "{instruction}"],
                "timeout_s": 60.0,
                "max_concurrent": 3,
                "sandbox": {"backend": "process" if problem("namespace") else "namespace"},
            },
            "curriculum": {"batch_groups": 2, "stages": [stage]},
            "pool": {"window": {"queue": 4, "no_signal": "train"}},
            "verify": {"timeout_s": 10.0},
            "reward": {"alpha": 0.0, "beta": 0.0, "function": f"{folder}/my_code.py:score", "mode": "replace"},
            "eval": {"num_tasks": 1},
        }
        | fields,
    )


@dataclass(frozen=True)
class Ended:
    run_dir: Path
    config: RLConfig
    episodes: list[Mapping[str, Any]]
    """Task, artifacts, reward and step rewards of the trained episodes."""

    def of(self, family: str) -> list[Mapping[str, Any]]:
        return [episode for episode in self.episodes if episode["task"]["metadata"]["family"] == family]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("own")
    write_tasks(folder)
    with serve(judge) as url:
        settings = {
            "verify": {"timeout_s": 10.0, "judge": {"url": url, "model": "strict"}},
            "eval": {"num_tasks": len(FAMILIES)},
            "train": {"checkpoint": {"every_steps": 1}, "machine": {"num_threads": 1}, "lora": {"rank": 2}},
            "weights": {"sync": "collective"},
        }
        sources = (*(f"{name}.jsonl" for name in FILES), *FAMILIES[len(FILES) :])
        config = make_run(make_model(folder / "scene"), folder, *sources, **settings)
        run_with_kills(config, folder, LIMIT_S, alone=() if problem("namespace") else ("sandbox",))
    vocab_size = read_config(Path(config.model)).vocab_size
    run_dir = folder / "run"
    with Pool(Layout(run_dir).pool(config.pool), vocab_size) as pool, pool.database.read() as connection:
        names = ("artifacts", "reward", "step_rewards", "failure")
        columns = [unit_table.c.task, *(episode_table.c[name] for name in names)]
        query = select(*columns).join(unit_table, episode_table.c.unit == unit_table.c.id)
        rows = connection.execute(query.where(unit_table.c.step.is_not(None))).all()
    return Ended(run_dir, config, [_read(row._asdict()) for row in rows])


def _read(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if value is None or name == "failure" else json.loads(value) for name, value in row.items()}


def test_killed_processes_and_programs_lose_no_attempt(ended: Ended) -> None:
    answers = [each["answer"].strip() for each in trained_artifacts(ended.config, ended.run_dir)]
    assert answers == ["done"] * len(ended.episodes)


def test_the_sampler_serves_what_adapters_make_of_the_base(ended: Ended) -> None:
    folder = Layout(ended.run_dir).model
    assert is_adapter_folder(folder)
    before, after = load_model(Path(ended.config.model)).state_dict(), load_model(folder).state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed
    assert all(".attention." in name for name in changed)


def test_a_verifier_sees_workspace_messages_and_steps(ended: Ended) -> None:
    assert [len(ended.of(name)) for name in FAMILIES] == ([2, 2, 2, 2] if "folders" in FAMILIES else [4, 2, 2])
    for episode in ended.of("tasks"):
        word = episode["task"]["instruction"].split()[3]
        evidence = episode["reward"]["evidence"]
        assert evidence["verifier"]["seen"] == word
        assert evidence["verifier"]["roles"] == ["user", "assistant", "tool", "assistant"]
        assert evidence["verifier"]["answer"].strip() == "done"
        assert evidence["verifier"]["num_steps"] == 2
        assert evidence["criteria"] == {"written": 1.0}
    assert {episode["reward"]["perf"] for episode in ended.episodes} == {0.0, 1.0}


def test_commands_judges_and_folders_give_verdicts(ended: Ended) -> None:
    for episode in ended.of("commands"):
        perf, evidence = episode["reward"]["perf"], episode["reward"]["evidence"]["verifier"]
        assert (perf, evidence["status"]) in ((1.0, 0), (0.0, 1))
    for episode in ended.of("folders"):
        perf, evidence = episode["reward"]["perf"], episode["reward"]["evidence"]["verifier"]
        assert evidence["rewards"] == {"reward": perf}
        assert evidence["ended"] == "exited"
    for episode in ended.of("judged"):
        assert episode["reward"]["perf"] == 1.0
        assert episode["reward"]["evidence"]["criteria"] == {CRITERION: 1.0}


def test_a_reward_function_pays_every_step(ended: Ended) -> None:
    for episode in ended.episodes:
        perf = episode["reward"]["perf"]
        assert episode["step_rewards"] == [10 * perf, 10 * perf + 1]
        assert episode["reward"]["total"] == 20 * perf + 1


def test_tasks_are_held_out_and_labelled_by_their_file(ended: Ended) -> None:
    words = {episode["task"]["instruction"].split()[3] for episode in ended.episodes}
    assert words <= {"north", "south", "east", "west", "up"}
    results = read_results(Layout(ended.run_dir).evaluations)
    assert [(result.num_tasks, set(result.by_family)) for result in results] == [(len(FAMILIES), {*FAMILIES})] * 2
    assert Run(ended.run_dir).config()["curriculum"]


def test_pass_rates_are_stored_with_the_queue(ended: Ended) -> None:
    vocab_size = read_config(Path(ended.config.model)).vocab_size
    with Pool(Layout(ended.run_dir).pool(ended.config.pool), vocab_size) as pool:
        state = json.loads(pool.note() or "{}")
    stored = list(state["curriculum"]["rates"].values())
    assert any(stored), "at least those of the first batch"
    for name, rates in zip(FAMILIES, stored, strict=True):
        assert all(num >= 1 and 0 <= rate <= 1 for num, rate in rates.values())
        assert set(rates) <= {f"{name}-{word}" for word in WORDS}


@pytest.mark.parametrize(
    ("source", "text", "problem"),
    [
        ("my_tasks.py:Stack", "raise ValueError('no licence')", "my_tasks.py: raised at import:"),
        ("tasks.jsonl", '{"instruction": "x"', "tasks.jsonl, line 1: not valid JSON"),
        (
            "tasks.jsonl",
            '{"instruction": "x", "split": "train", "verifier": {"exact": "y"}}',
            "0 of its tasks are held",
        ),
    ],
)
def test_bad_tasks_exit_2_and_write_nothing(
    tmp_path: Path, source: str, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / source.partition(":")[0]).write_text(f"{text}\n")
    (tmp_path / "my_code.py").write_text(CODE)
    (tmp_path / "model").mkdir()
    write_resolved(make_run(tmp_path / "model", tmp_path, source), tmp_path / "rl.toml")
    for more in ([], ["--dry-run"]):
        assert main(["rl", str(tmp_path / "rl.toml"), "--runs", str(tmp_path / "runs"), *more]) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
