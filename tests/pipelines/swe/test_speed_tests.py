"""Tasks of speed: when a repository is faster, and its verification."""

import json
import random
import sys
from pathlib import Path

import pytest

from m2forge.pipelines.swe import speed_tests
from m2forge.pipelines.swe.speed_tests import is_faster, p_value
from m2forge.pipelines.swe.toolchains.toolchain import TEST_PATH
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


SLOW = "i=0; while [ $i -lt 1500 ]; do i=$((i+1)); done\n"
RUN = 'sh ./work.sh\ncat tests/report > "$TEST_REPORT"\n'
REPORT = '<testsuite><testcase classname="tests.test_work" name="test_work"/></testsuite>\n'
TESTS = {
    "tests/run.sh": f"set -e\n{RUN}",
    "tests/report": REPORT,
    "tests/test_work.py": "def test_work():\n    assert open('work.sh').read()\n",
}
EMPTY = 'cat tests/report > "$TEST_REPORT"\n'
ATTEMPTS = {
    "the same speed": ({"work.sh": SLOW}, 0),
    "faster": ({"work.sh": "echo fast\n"}, 1),
    "faster with a test that fails": ({"work.sh": ""}, 0),
    "a workload that fails": ({"work.sh": "exit 1\n"}, 0),
    "an emptied test": ({"tests/run.sh": EMPTY}, 0),
    "a run without a test": ({"work.sh": "kill -9 $PPID\n"}, 0),
    "a test emptied by the source": ({"work.sh": f"{SLOW}printf '%s' '{EMPTY}' > tests/run.sh\n"}, 0),
    "a slower base": ({"work.sh": f"{SLOW}printf '%s' '{SLOW * 4}' > ../base/work.sh\n"}, 0),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_a_faster_repository_has_reward_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    projects.write_history(tmp_path / "repository", ("base", {"work.sh": SLOW, **TESTS}))
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "swe_tests.py").write_bytes(Path(swe_tests.__file__).read_bytes())
    (tests / "test.patch").write_text("--- /dev/null\n+++ b/test_more.py\n@@ -0,0 +1 @@\n+# More.\n")
    instance = {
        "base_commit": "HEAD",
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": ["tests/test_work.py::test_work"],
        "test_paths": TEST_PATH,
        "workload": ["sh", "tests/run.sh"],
    }
    (tests / "instance.json").write_text(json.dumps(instance))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(speed_tests, "BASE", str(tmp_path / "base"))
    files, reward = ATTEMPTS[name]
    for path, text in files.items():
        (tmp_path / "repository" / path).write_text(text)
    assert speed_tests.run(tmp_path / "repository", tests, tmp_path) == reward
