"""Tasks of speed: when a repository is faster, and its verification."""

import json
import random
import sys
from pathlib import Path

import pytest

from m2forge.pipelines.swe import speed_tests
from m2forge.pipelines.swe.speed_tests import is_faster, p_value
from m2forge.tasks.folders import swe_tests
from tests.pipelines.swe import projects


def times(generator: random.Random, mean: float) -> list[float]:
    return [mean * generator.lognormvariate(0, 0.15) for _ in range(speed_tests.NUM_PAIRS)]


def test_p_is_that_of_mann_and_whitney() -> None:
    base, new = [float(n % 7) for n in range(20)], [float(n % 5) for n in range(20)]
    # By scipy's mannwhitneyu, one-sided, with the normal approximation.
    assert p_value(base, new) == pytest.approx(0.08735159048, abs=1e-9)
    assert p_value([1.0] * 20, [1.0] * 20) == 1


def test_equal_times_are_not_faster_and_gains_are_found() -> None:
    generator = random.Random(0)
    num_false = sum(is_faster(times(generator, 1), times(generator, 1)) for _ in range(200))
    num_found = sum(is_faster(times(generator, 1.5), times(generator, 1)) for _ in range(200))
    assert num_false == 0
    assert num_found >= 195


def test_a_significant_but_small_gain_is_not_enough() -> None:
    base, new = [1 + n / 1000 for n in range(20)], [0.85 + n / 1000 for n in range(20)]
    assert p_value(base, new) < 1e-6
    assert not is_faster(base, new)
    with pytest.raises(ValueError, match="at least 20 times a side"):
        is_faster(base, new[:5])


def test_a_faster_repository_has_reward_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "i=0; while [ $i -lt 1500 ]; do i=$((i+1)); done\n"
    test = "def test_work():\n    assert open('work.sh').read()\n"
    projects.write_history(tmp_path / "repository", ("base", {"work.sh": slow, "test_work.py": test}))
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "swe_tests.py").write_bytes(Path(swe_tests.__file__).read_bytes())
    (tests / "test.patch").write_text("--- /dev/null\n+++ b/test_more.py\n@@ -0,0 +1 @@\n+# More.\n")
    instance = {
        "base_commit": "HEAD",
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": ["test_work.py::test_work"],
        "workload": ["sh", "work.sh"],
    }
    (tests / "instance.json").write_text(json.dumps(instance))
    monkeypatch.setattr(sys, "path", [*sys.path])
    rewards = []
    # The same speed; faster; faster with a test that fails; a workload that fails.
    for number, source in enumerate((slow, "echo fast\n", "", "exit 1\n")):
        (tmp_path / "repository" / "work.sh").write_text(source)
        monkeypatch.setattr(speed_tests, "BASE", str(tmp_path / f"base{number}"))
        rewards.append(speed_tests.run(tmp_path / "repository", tests, tmp_path))
    assert rewards == [0, 1, 0, 0]
