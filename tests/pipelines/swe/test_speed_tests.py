"""Tasks of speed: when a repository is faster, and its verification."""

import itertools
import json
import random
import sys
from pathlib import Path

import pytest

from m2forge.pipelines.swe import speed_tests
from m2forge.pipelines.swe.speed_tests import LOOKS, compare, decide, is_faster, p_value
from m2forge.pipelines.swe.toolchains.toolchain import TEST_PATH
from m2forge.tasks.folders import swe_tests
from tests.pipelines.swe import projects


def times(generator: random.Random, mean: float) -> list[float]:
    return [mean * generator.lognormvariate(0, 0.15) for _ in range(LOOKS[0])]


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
    with pytest.raises(ValueError, match="at least 20 pairs of times, received 20 and 5"):
        is_faster(base, new[:5])


def compared(generator: random.Random, gain: float) -> tuple[bool, int]:
    """Whether the gain is found, and after how many pairs, where half of all runs take twice as long: the machine is
    slow for eight runs at a time on average."""
    is_slow = False

    def time_s(mean: float) -> float:
        nonlocal is_slow
        is_slow ^= generator.random() < 1 / 8
        return mean * generator.lognormvariate(0, 0.05) * (2 if is_slow else 1)

    base_s, new_s = compare(lambda: time_s(gain), lambda: time_s(1))
    return is_faster(base_s, new_s), len(base_s)


def test_gains_are_found_through_slow_episodes() -> None:
    generator = random.Random(0)
    found, num_pairs = zip(*(compared(generator, 1.5) for _ in range(200)), strict=True)
    # By the ratio of the sides' medians after 20 pairs, 170 of them.
    assert sum(found) == 200
    assert set(num_pairs) <= set(LOOKS)
    assert sum(num_pairs) / 200 < 1.5 * LOOKS[0]


def test_repeated_looks_do_not_make_equal_trees_faster() -> None:
    generator = random.Random(1)
    found, num_pairs = zip(*(compared(generator, 1) for _ in range(400)), strict=True)
    assert sum(found) == 0
    assert sum(num_pairs) / 400 < 1.5 * LOOKS[0]


@pytest.mark.parametrize(("gain", "num_pairs"), [(1.5, 20), (1.0, 20), (1.25, 60)])
def test_only_what_is_undecided_is_measured_again(gain: float, num_pairs: int) -> None:
    times_s = itertools.cycle([0.95, 1.06])
    # At a gain of 1.25, ratios of 0.76 and 0.85 alternate.
    base_s, new_s = compare(lambda: gain, lambda: next(times_s))
    assert (len(base_s), len(new_s)) == (num_pairs, num_pairs)
    assert is_faster(base_s, new_s) is (gain == 1.5)


def test_a_look_is_stricter_than_the_whole_test() -> None:
    base_s, new_s = [1.0] * 14 + [0.5] * 6, [0.5] * 14 + [1.0] * 6
    assert speed_tests.MAX_P / len(LOOKS) < p_value(base_s, new_s) < speed_tests.MAX_P
    assert decide(base_s, new_s) is None
    assert decide(base_s * 2, new_s * 2) is True


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
