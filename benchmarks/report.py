"""What every benchmark prints: tables of ours, the peer and the limit, the bars, and with --json one line of JSON."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    bar: float
    met: bool

    @classmethod
    def at_least(cls, name: str, value: float, bar: float) -> "Bar":
        return cls(name, value, bar, value >= bar)

    @classmethod
    def at_most(cls, name: str, value: float, bar: float) -> "Bar":
        return cls(name, value, bar, value <= bar)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="what a CPU can measure, in a minute")
    return parser


ARM_PARTS = {"0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2"}
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimdhp", "bf16", "sve")
"""Which of them a processor has decides what its CPU kernels can do."""


def cpu_ticks() -> list[int]:
    """The kernel's counts of CPU time by kind since it started; empty where it has none."""
    try:
        return [int(count) for count in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    except (OSError, ValueError):
        return []


STEAL = 7
"""The position of time in which the machine's host ran something else."""
TICKS_AT_START = cpu_ticks()


def stolen() -> str:
    """The share of the CPU time since the start that the host took away, if it is worth a word."""
    spent = [now - before for now, before in zip(cpu_ticks(), TICKS_AT_START, strict=True)]
    share = spent[STEAL] / max(1, sum(spent)) if len(spent) > STEAL else 0.0
    return f", {share:.0%} of CPU time stolen by the host" if share >= 0.01 else ""


def hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}{stolen()}"


def processor() -> str:
    """Its name, where the system says it, and the instructions that matter here."""
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        return platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in lines}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    part = facts.get("CPU part", "")
    name = facts.get("model name") or ARM_PARTS.get(part) or f"{platform.machine()} {part}".strip()
    return f"{name} ({' '.join(flag for flag in INSTRUCTIONS if flag in flags)})"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def finish(bars: Sequence[Bar], as_json: bool) -> None:
    print_table(
        f"Bars on {hardware()}",
        ("bar", "value", "asked", "met"),
        [(bar.name, f"{bar.value:.3g}", f"{bar.bar:.3g}", "yes" if bar.met else "NO") for bar in bars],
    )
    if as_json:
        print(json.dumps({"hardware": hardware(), "bars": [asdict(bar) for bar in bars]}))


def median_s(step: Callable[[], object], repeats: int, warmup: int = 2) -> float:
    """Median seconds of a step, the device's queue drained around each."""
    return statistics.median(times_s([step], repeats, warmup)[0])


def times_s(steps: Sequence[Callable[[], object]], repeats: int, warmup: int = 2) -> list[list[float]]:
    """Seconds of every repeat of every step, the steps taking turns so that a slow moment meets all of them."""
    for step in steps:
        for _ in range(warmup):
            step()
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, seconds in zip(steps, times, strict=True):
            _drain()
            start = time.perf_counter()
            step()
            _drain()
            seconds.append(time.perf_counter() - start)
    return times


def _drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
