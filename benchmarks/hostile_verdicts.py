"""Hostile answers to every family, those of reasoning-gym included: how long the slowest verdict takes, how much memory
a worker uses, and how long the event loop that asks for verdicts stalls.

200 answers to each family: numbers of any size and form, nesting, exponents, what makes regular expressions backtrack,
format strings, odd Unicode, very long lines, and right answers that were changed in a few places. They go through
`TaskRunner` with its limits as a run has them, one after another. `--quick` asks all embedded families and a slice of
the library's: those below, whose scorers read numbers, moves, grids or formulas, with fewer answers each.
"""

import asyncio
import importlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from report import Bar, print_table

from m2forge.errors import M2ForgeError
from m2forge.records import Submission
from m2forge.tasks.catalog import EMBEDDED, find_family
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.family import VerdictReason
from m2forge.tasks.library_family import EVALUATING
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.source import GYM_PREFIX

NUM_ANSWERS, NUM_TASKS = 200, 4
QUICK_ANSWERS = 30
QUICK_DATASETS = (
    "rush_hour",
    "coin_flip",
    "chain_sum",
    "complex_arithmetic",
    "sudoku",
    "number_sorting",
    "time_intervals",
    "simple_equations",
)
MAX_VERDICT_S, MAX_MEMORY_MB, MAX_STALL_MS = 2.0, 512.0, 100.0
DRAW_S = 10.0
"""Families of the library whose tasks take longer to make are left out."""
LONG = 60_000
"""Signs of a long answer: an agent's line may hold a megabyte, a scorer of the library is given 65,536."""
PERIOD_S = 0.005

Maker = Callable[[random.Random, str], str]


def _numbers(rng: random.Random, right: str) -> str:
    exponent = rng.choice((9, 99, 9999, 99_999_999, 10**18))
    forms = ("1e{}", "-1e{}", "1e-{}", "A+{}", "9**{}", "10^{}", "1/{}", "{}!", "0x{}", "range({})", "[0]*{}", "{}j")
    return rng.choice(forms).format(exponent)


def _digits(rng: random.Random, right: str) -> str:
    return rng.choice("-+ 0")[: rng.randrange(2)] + rng.choice(("9", "1", "7.", "1,", "3/")) * rng.randrange(
        1, LONG // 2
    )


def _special(rng: random.Random, right: str) -> str:
    words = (
        "nan",
        "NaN",
        "inf",
        "-inf",
        "Infinity",
        "None",
        "null",
        "true",
        "",
        " ",
        "\0",
        "-1",
        "-0",
        "1e400",
        "٣",
        "²",
    )
    return rng.choice(words)


def _nesting(rng: random.Random, right: str) -> str:
    opening, closing = rng.choice(
        (("[", "]"), ("(", ")"), ("{", "}"), ('{"a":', "}"), ("((1+", ")"), ("-", ""), ("not ", ""))
    )
    depth = rng.choice((10, 100, 1000, 10_000))
    return opening * depth + rng.choice(("", "1")) + closing * rng.choice((0, depth))


def _backtracking(rng: random.Random, right: str) -> str:
    unit = rng.choice(("a", " ", "\t", "\n", "1", "(a", "a|", "\\", ". ", "0 1 ", "UDLR", "<answer>", "$"))
    return unit * rng.randrange(100, LONG // len(unit)) + rng.choice(("!", "", "b", "\n"))


def _formats(rng: random.Random, right: str) -> str:
    return rng.choice(
        ("%s" * 500, "{0.__class__}", "{:>99999999}", "%99999999d", "%n%n", "${IFS}", "{{{{" * 100, "\\x00" * 99)
    )


def _unicode(rng: random.Random, right: str) -> str:
    signs = ("\u202e", "\u0301", "\U0001f4a9", "\udcff", "\ufeff", "ﷺ", "İ", "ß", "\u2028", "𝟗")
    return "".join(rng.choice(signs) for _ in range(rng.choice((1, 10, 1000, LONG))))


def _lines(rng: random.Random, right: str) -> str:
    return "\n".join(str(rng.randrange(-10, 10)) * rng.choice((1, 50)) for _ in range(rng.choice((10, 1000, 5000))))


def _changed(rng: random.Random, right: str) -> str:
    """A right answer, changed in a few places; the shape stays that which the scorer reads furthest."""
    signs = list(right or "1")
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(signs))
        signs[place] = rng.choice(("", signs[place][:9] * 1000, "99999999999", "-", "1e9", "\n", " ", "[", "∞"))
    return "".join(signs)[:LONG]


KNOWN = ("A+99999999999", "1e99999999", "9**9**9", "[" * LONG)
"""Answers at which a scorer without limits did not end, and others of their kind."""
MAKERS: tuple[Maker, ...] = (
    _numbers,
    _digits,
    _special,
    _nesting,
    _backtracking,
    _formats,
    _unicode,
    _lines,
    _changed,
    _changed,
)


def hostile_answers(num: int, rights: Sequence[str], seed: str) -> list[str]:
    rng = random.Random(seed)
    made = [MAKERS[index % len(MAKERS)](rng, rights[index % len(rights)]) for index in range(num)]
    return [*KNOWN, *made][:num]


@dataclass(slots=True)
class Found:
    """What the verdicts of one family took."""

    name: str
    seconds: list[float] = field(default_factory=list)
    reasons: Counter[VerdictReason] = field(default_factory=Counter)
    num_right: int = 0


async def _ask(runner: TaskRunner, name: str, num: int) -> Found | None:
    """None where the library makes no tasks of it."""
    found, level = Found(name), find_family(name).levels[0]
    try:
        tasks = [await runner.next_task(name, "train", 0, place, level, level) for place in range(NUM_TASKS)]
    except M2ForgeError as error:
        print(f"{name}: left out: {str(error).splitlines()[0]}")
        return None
    # What is expected stands in the evidence of any verdict.
    rights = [str((await runner.verify(task, Submission(""))).evidence.get("expected", "1")) for task in tasks]
    # In a thread: to make them takes longer than a stall may.
    answers = await asyncio.to_thread(hostile_answers, num, rights, name)
    for index, answer in enumerate(answers):
        started_s = time.monotonic()
        verdict = await runner.verify(tasks[index % NUM_TASKS], Submission(answer))
        found.seconds.append(time.monotonic() - started_s)
        found.reasons[verdict.reason] += 1
        found.num_right += verdict.perf == 1
    return found


async def _watch(stalls_s: list[float]) -> None:
    while True:
        at_s = time.monotonic()
        await asyncio.sleep(PERIOD_S)
        stalls_s.append(time.monotonic() - at_s - PERIOD_S)


async def _measure(names: Sequence[tuple[str, int]]) -> tuple[list[Found], float, float]:
    """What each family took, the longest stall in seconds and the most memory in bytes."""
    stalls_s: list[float] = []
    found: list[Found] = []
    # A verifier that raises is counted here, and does not end the measurement.
    config = VerifyConfig(max_error_share=1.0, draw_timeout_s=DRAW_S)
    for name, _ in names:
        find_family(name)  # imports the library here, which is no stall of the loop
    with tempfile.TemporaryDirectory() as folder:
        async with TaskRunner(config, Path(folder)) as runner:
            watching = asyncio.create_task(_watch(stalls_s))
            for name, num in names:
                one = await _ask(runner, name, num)
                found += [one] if one is not None else []
                print(".", end="", flush=True)
            print()
            watching.cancel()
            return found, max(stalls_s), runner.max_memory_bytes


def _datasets() -> list[str]:
    importlib.import_module("reasoning_gym")  # which registers its datasets
    return sorted(name for name in importlib.import_module("reasoning_gym.factory").DATASETS if name not in EVALUATING)


def measure(is_quick: bool) -> list[Bar]:
    datasets = QUICK_DATASETS if is_quick else _datasets()
    names = [(family.name, NUM_ANSWERS) for family in EMBEDDED]
    names += [(f"{GYM_PREFIX}{name}", QUICK_ANSWERS if is_quick else NUM_ANSWERS) for name in datasets]
    if is_quick:
        print(f"quick: {len(QUICK_DATASETS)} of the library's families, {QUICK_ANSWERS} answers to each")
    found, stall_s, memory = asyncio.run(_measure(names))
    print_table(
        "Hostile answers",
        ("family", "verdicts", "mean ms", "slowest s", "limit", "verifier_error", "right"),
        [
            (
                each.name,
                str(len(each.seconds)),
                f"{1e3 * sum(each.seconds) / len(each.seconds):.2f}",
                f"{max(each.seconds):.2f}",
                str(each.reasons[VerdictReason.LIMIT]),
                str(each.reasons[VerdictReason.VERIFIER_ERROR]),
                str(each.num_right),
            )
            for each in found
        ],
    )
    return [
        Bar.at_most("slowest verdict, s", max(max(each.seconds) for each in found), MAX_VERDICT_S),
        Bar.at_most("memory of a worker, MB", memory / 2**20, MAX_MEMORY_MB),
        Bar.at_most("longest stall of the event loop, ms", 1e3 * stall_s, MAX_STALL_MS),
    ]
