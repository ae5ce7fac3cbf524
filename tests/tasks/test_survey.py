"""Sources in worker processes: what a run learns before it begins, and what it refuses in one message."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from m2forge.config import TomlValue, build
from m2forge.errors import ConfigError, M2ForgeError
from m2forge.records import Submission, Verdict, VerdictReason
from m2forge.tasks.config import CurriculumConfig, JudgeConfig, VerifyConfig
from m2forge.tasks.runner import TaskRunner, VerifierUnavailableError
from m2forge.tasks.survey import survey
from m2forge.tasks.task_set import FamilyInfo
from tests.tasks.test_jsonl_family import LINE, many, write
from tests.tasks.test_source import FAMILY
from tests.tasks.test_verifier import CODE


def curriculum(**domains: list[TomlValue]) -> CurriculumConfig:
    tables: dict[str, TomlValue] = {
        name: {"ratio": 1.0, "context": 512, "families": families} for name, families in domains.items()
    }
    return build(CurriculumConfig, {"batch_groups": 8, "stages": [{"name": "only", "domains": tables}]})


def look(config: CurriculumConfig, num_held_out: int = 2, reward: str | None = None) -> dict[str, FamilyInfo]:
    return asyncio.run(survey(config, VerifyConfig(), num_held_out, 0, reward))


def test_families_of_every_source_are_surveyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_tasks.py").write_text(FAMILY)
    write(tmp_path, *many(20, level=3))
    config = curriculum(
        reasoning=[{"source": "my_tasks.py:Doubles"}, {"source": "capitals.jsonl"}],
        agent=[{"source": "m2forge.tasks.agent:Chain", "difficulty": [1, 2]}],
    )
    found = look(config)
    assert {key: (info.name, info.lowest, info.highest) for key, info in found.items()} == {
        "my_tasks.py:Doubles": ("doubles", 1, 2),
        "capitals.jsonl#reasoning": ("capitals", 3, 3),
        "m2forge.tasks.agent:Chain": ("chain", 1, 16),
    }
    counts = found["capitals.jsonl#reasoning"].counts
    assert counts is not None
    assert sum(counts[0][1:]) == 20


RAISES = "raise ValueError('no licence')\n"


@pytest.mark.slow
def test_bad_sources_are_refused_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_tasks.py").write_text(RAISES)
    Path("my_families.py").write_text(FAMILY)
    Path("my_reward.py").write_text(CODE)
    write(tmp_path, *many(12), "{")
    doubles: dict[str, TomlValue] = {"source": "my_families.py:Doubles"}
    cases: list[tuple[list[TomlValue], str, str | None]] = [
        ([{"source": "my_tasks.py:Stack"}], "raised at import:(.|\n)*no licence", None),
        ([{"source": "capitals.jsonl"}], "capitals.jsonl, line 13: not valid JSON", None),
        ([doubles | {"difficulty": [1, 5]}], "my_families.py:Doubles: difficulty: expected 1 to 2, received 5", None),
        ([doubles], "my_reward.py:gone: it has no 'gone'", "my_reward.py:gone"),
    ]
    for families, problem, reward in cases:
        with pytest.raises(M2ForgeError, match=problem):
            look(curriculum(reasoning=families), reward=reward)
    write(tmp_path, *many(12, split="train"), LINE | {"split": "held_out"})
    with pytest.raises(ConfigError, match="1 of its tasks are held out, and an evaluation needs 2; add tasks"):
        look(curriculum(reasoning=[{"source": "capitals.jsonl"}]))
    write(tmp_path, *many(3, split="held_out"))
    with pytest.raises(ConfigError, match="none of its tasks is in the split 'train'"):
        look(curriculum(reasoning=[{"source": "capitals.jsonl"}]))


@pytest.mark.slow
def test_verifiers_of_a_file_run_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker serves all cases, since each costs a process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "k")
    Path("my_v.py").write_text(CODE)
    specs: dict[str, object] = {
        "nothing": {"python": "my_v.py:nothing"},
        "verdict": {"python": "my_v.py:verdict"},
        "slow": {"command": ["sleep", "60"], "timeout_s": 0.3},
        "command": {"command": ["sh", "-c", "echo 0.75"]},
        "judge": {"judge": ["It is polite."]},
    }
    write(tmp_path, *[LINE | {"id": id, "verifier": spec, "split": "train"} for id, spec in specs.items()])
    judge = JudgeConfig(url="http://127.0.0.1:9/v1", model="m", key_env="JUDGE_KEY", max_retries=0)
    config = VerifyConfig(judge=judge, timeout_s=50.0)

    async def scene() -> tuple[dict[str, Verdict], float, str]:
        verdicts: dict[str, Verdict] = {}
        key = "capitals.jsonl#general"
        async with TaskRunner(config, tmp_path / "workers", (key,), reward="my_v.py:per_step") as runner:
            submission = Submission("x", str(tmp_path), steps=({}, {}))
            for id in ("nothing", "verdict", "slow", "command"):
                started_s = time.monotonic()
                task = await runner.next_task(key, "train", 0, 0, 0, 0, f"capitals-{id}")
                verdicts[id] = await runner.verify(task, submission)
                if id == "slow":
                    slow_s = time.monotonic() - started_s
            task = await runner.next_task(key, "train", 0, 0, 0, 0, "capitals-judge")
            with pytest.raises(VerifierUnavailableError) as unavailable:
                await runner.verify(task, submission)
        return verdicts, slow_s, str(unavailable.value)

    verdicts, slow_s, unavailable = asyncio.run(scene())
    reasons = {id: verdict.reason for id, verdict in verdicts.items()}
    assert reasons == {
        "nothing": VerdictReason.VERIFIER_ERROR,
        "verdict": VerdictReason.JUDGED,
        "slow": VerdictReason.LIMIT,
        "command": VerdictReason.JUDGED,
    }
    assert "received nothing; return Verdict(perf)" in str(verdicts["nothing"].evidence["traceback"])
    assert (verdicts["verdict"].perf, verdicts["verdict"].criteria) == (0.5, {"short": 1.0})
    assert (verdicts["command"].perf, verdicts["command"].reward) == (0.75, (0.0, 0.75))
    assert slow_s < 40
    assert "task capitals-judge: the judge at http://127.0.0.1:9/v1 gave no usable response" in unavailable
    assert json.dumps(verdicts["command"].evidence)


def test_a_judges_key_that_is_not_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judge = JudgeConfig(url="http://127.0.0.1:9/v1", model="m", key_env="NO_SUCH_KEY")
    with pytest.raises(ConfigError, match="the environment variable NO_SUCH_KEY is not set"):
        TaskRunner(VerifyConfig(judge=judge), tmp_path)
