"""Verifies a task of speed: a repository in, 1 out if its tests pass and it is faster than the base commit.

    speed_tests.py /testbed /tests /logs/verifier

The workload is a command of `instance.json`; it runs in turn in a copy of the base commit and in the repository, in
alternating order, so that a slow moment of the machine meets both. Both trees have the test files of the base commit
and the test patch, which are restored before and compared afterwards. The workload runs the tests that must go on
passing, and writes JUnit's report to the path in TEST_REPORT: a run in which one of them did not pass makes the reward
0. What counts is CPU time of the command with its children.

The comparison is a group-sequential test: it looks at the times after each of `LOOKS` pairs, and measures more pairs
only while it is undecided. Each look has the level α = MAX_P / number of looks (Bonferroni), so that all of them
together keep MAX_P. At a look the repository is

    faster        if the median of new_i / base_i is at most MAX_RATIO, and
                  a one-sided Mann–Whitney test rejects "new is not smaller" at α
    not faster    if a sign test rejects "the median of new_i / base_i is at most MAX_RATIO" at α

and it is not faster if the last look decides nothing. Ratios are those of pairs, because the two runs of a pair mostly
share the speed of the machine: where half of all runs meet a slow episode, the median of either side may be that of
the slow runs or that of the fast ones. Mann–Whitney uses the normal approximation of U, which is good from 20 values a
side on, corrected for ties and continuity:

    U = Σ_ij [base_i > new_j] + ½ [base_i = new_j],    z = (U − n²/2 − ½) / σ

It imports the standard library alone, because task folders carry a copy of this file beside that of swe_tests.py.
"""

import hashlib
import importlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

LOOKS = (20, 40, 60)
"""Numbers of pairs after which the comparison may be decided."""
MAX_RATIO, MAX_P = 0.8, 0.01
BASE = "/tmp/base"
VARIABLE = "TEST_REPORT"
COMMAND_S = 120


def decide(base_s: Sequence[float], new_s: Sequence[float]) -> bool | None:
    """Whether the new tree is faster by these pairs of times; None if they are too few to tell."""
    num = len(base_s)
    if num < LOOKS[0] or len(new_s) != num:
        raise ValueError(f"expected at least {LOOKS[0]} pairs of times, received {num} and {len(new_s)} times")
    level = MAX_P / len(LOOKS)
    if median_ratio(base_s, new_s) <= MAX_RATIO and p_value(base_s, new_s) < level:
        return True
    num_above = sum(ratio > MAX_RATIO for ratio in ratios(base_s, new_s))
    p_above = sum(math.comb(num, k) for k in range(num_above, num + 1)) / 2**num
    return False if p_above < level else None


def is_faster(base_s: Sequence[float], new_s: Sequence[float]) -> bool:
    return decide(base_s, new_s) is True


def ratios(base_s: Sequence[float], new_s: Sequence[float]) -> list[float]:
    # A clock that counts ticks reads 0 for a short run.
    return [new / base if base > 0 else math.inf for base, new in zip(base_s, new_s, strict=True)]


def median_ratio(base_s: Sequence[float], new_s: Sequence[float]) -> float:
    return statistics.median(ratios(base_s, new_s))


def p_value(base_s: Sequence[float], new_s: Sequence[float]) -> float:
    """How probable it is that values of `new_s` are at least this much smaller, if both have one distribution."""
    m, n = len(base_s), len(new_s)
    wins = sum((base > new) + 0.5 * (base == new) for base in base_s for new in new_s)
    ties = sum(num**3 - num for num in Counter([*base_s, *new_s]).values())
    variance = m * n / 12 * ((m + n + 1) - ties / ((m + n) * (m + n - 1)))
    if variance <= 0:
        return 1.0  # All values are equal.
    return 0.5 * math.erfc((wins - m * n / 2 - 0.5) / math.sqrt(2 * variance))


def cpu_s(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> float:
    """CPU time of a command and its children; raises if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    quiet = subprocess.DEVNULL
    subprocess.run(
        command, cwd=folder, env=dict(env), check=True, timeout=COMMAND_S, stdin=quiet, stdout=quiet, stderr=quiet
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(
    command: Sequence[str], base: Path, new: Path, check: Callable[[Path], None] | None = None
) -> tuple[list[float], list[float]]:
    """CPU times of the command in both trees. `check` raises for the report of a run that does not count."""
    report = base.with_name(f"{base.name}.xml")

    def timed(tree: Path) -> float:
        path = os.environ.get("PYTHONPATH", "").replace(str(new), str(tree))
        report.unlink(missing_ok=True)
        time_s = cpu_s(command, tree, {**os.environ, "PYTHONPATH": path, VARIABLE: str(report)})
        if check is not None:
            check(report)
        return time_s

    return compare(lambda: timed(base), lambda: timed(new))


def compare(time_base: Callable[[], float], time_new: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Times of both sides, as many pairs as it takes to decide, after one run each that is not counted."""
    base_s, new_s = list[float](), list[float]()
    sides = ((time_base, base_s), (time_new, new_s))
    for timed, _ in sides:
        timed()
    while len(base_s) < LOOKS[-1]:
        for timed, times in sides if len(base_s) % 2 else reversed(sides):
            times.append(timed())
        if len(base_s) in LOOKS and decide(base_s, new_s) is not None:
            break
    return base_s, new_s


def checkout(repository: Path, commit: str, patch: Path, base: Path) -> None:
    """Write the files of a commit, with the test patch, to a folder."""
    base.mkdir(parents=True)
    git = ["git", "-c", "safe.directory=*", "-C", str(repository)]
    # An index of its own: neither the repository's changes nor its attributes for archives count.
    env = {**os.environ, "GIT_INDEX_FILE": f"{base}.index"}
    subprocess.run([*git, "read-tree", commit], env=env, check=True)
    subprocess.run([*git, "checkout-index", "-a", f"--prefix={base}/"], env=env, check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "--allow-empty", str(patch)], cwd=base, check=True)


def digests(tree: Path, names: Collection[str]) -> dict[str, str]:
    """The digest of each file; "" for one that is missing."""
    files = {name: tree / name for name in names}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for name, path in files.items()
    }


def run(repository: Path, tests: Path, logs: Path) -> float:
    instance = json.loads((tests / "instance.json").read_text(encoding="utf-8"))
    # A copy of swe_tests.py lies beside this file.
    sys.path.insert(0, str(tests))
    swe_tests = importlib.import_module("swe_tests")
    base = Path(BASE)
    checkout(repository, instance["base_commit"], tests / "test.patch", base)
    sound = digests(base, [str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()])
    if not swe_tests.run(repository, tests, logs):
        return 0.0
    swe_tests.restore_tests(repository, tests, instance)
    wanted = {swe_tests.report_name(id) for id in instance["PASS_TO_PASS"]}

    def check(report: Path) -> None:
        if not report.is_file() or not wanted <= swe_tests.passed(report):
            raise ValueError("a test that must pass did not, or was not run")

    try:
        base_s, new_s = measure(instance["workload"], base, repository, check=check)
    except (subprocess.SubprocessError, ValueError, SyntaxError) as error:
        print(f"the workload failed: {error}", file=sys.stderr)
        return 0.0
    restored = {name: digest for name, digest in sound.items() if swe_tests.file_matcher(tests, instance)(name)}
    if digests(base, sound) != sound or digests(repository, restored) != restored:
        print("the workload has changed test files, or the base", file=sys.stderr)
        return 0.0
    found = f"median ratio {median_ratio(base_s, new_s):.3f}, p = {p_value(base_s, new_s):.2g}"
    print(f"{found}, {len(base_s)} pairs", file=sys.stderr)
    return float(is_faster(base_s, new_s))


if __name__ == "__main__":
    print(f"{run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])):g}")
