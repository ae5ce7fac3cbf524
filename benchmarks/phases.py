"""What the later phases of pre-training are for, measured on models trained here.

Context: a network is trained on short documents (code, and code with facts hidden in it that are asked for at the end),
then its context is extended by one more phase, sixteenfold on a GPU. Needle retrieval is measured before and after,
from the trained to the extended length.

Prediction modules: the chain is lengthened from one module to three, by copies or by random weights, and trained with
the main model frozen. How many steps do the copies need to reach the loss that random weights end at?

All of it through `m2forge pretrain`, by Muon and the modules by AdamW: `m2-mini` with one module on a GPU, `m2-nano` on
a CPU, and there with --quick the modules alone.

    python benchmarks/phases.py [--json] [--quick]
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from report import Bar, arguments, finish, print_table
from text_corpus import python_sources

from m2forge.config import TomlValue, build
from m2forge.corpus.manifest import Kind
from m2forge.corpus.token_set import CorpusWriter
from m2forge.evaluate.predictor import ModelPredictor
from m2forge.evaluate.prompts.wording import Alphabet, TokenWording, make_alphabet
from m2forge.evaluate.suites.ruler import NeedleTask, WindowFiller
from m2forge.evaluate.suites.suite import score_forced
from m2forge.model.checkpoint import load_model
from m2forge.observe.metrics import read_metrics
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.stage import run_pretrain
from m2forge.records import IntArray
from m2forge.text.tokenizer import END_OF_TEXT, train_tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SMOOTHED_STEPS = 10


@dataclass(frozen=True)
class Workload:
    model: str
    vocab_size: int
    text_vocab: int
    """Ids below are text, those from here on the symbols and markers of hidden facts."""
    text_bytes: int
    short: int
    """Context that the network is trained on first."""
    long: int
    fact_tokens: int
    """In short documents with hidden facts; half as many in long ones."""
    base_tokens: int
    """Tokens per pack. Packs are small, because learning to look facts up takes many steps rather than many tokens."""
    base_steps: int
    extend_tokens: int
    extend_steps: int
    module_tokens: int
    module_steps: int
    lr: float
    num_samples: int
    """Per length and depth."""


GPU = Workload(
    model="m2-mini",
    vocab_size=16_384,
    text_vocab=14_336,
    text_bytes=30_000_000,
    short=1024,
    long=16_384,
    fact_tokens=16_000_000,
    base_tokens=16_384,
    base_steps=1000,
    extend_tokens=32_768,
    extend_steps=120,
    module_tokens=32_768,
    module_steps=120,
    lr=1.5e-3,
    num_samples=20,
)
CPU = Workload(
    model="m2-nano",
    vocab_size=1024,
    text_vocab=960,
    text_bytes=2_000_000,
    short=128,
    long=1024,
    fact_tokens=1_000_000,
    base_tokens=1024,
    base_steps=800,
    extend_tokens=2048,
    extend_steps=150,
    module_tokens=512,
    module_steps=120,
    lr=4e-3,
    num_samples=20,
)
QUICK = replace(CPU, fact_tokens=0, base_tokens=512, base_steps=100, extend_steps=0, module_steps=50)


class Facts:
    """Documents of code with facts hidden in them, and questions about the facts at the end."""

    def __init__(self, alphabet: Alphabet, text: IntArray) -> None:
        self.wording = TokenWording(alphabet, key_tokens=1, value_tokens=1)
        self.filler = WindowFiller(text)

    def task(self, num_needles: int = 1, num_queries: int = 1) -> NeedleTask:
        return NeedleTask(self.wording, self.filler, num_needles, num_queries)

    def document(self, rng: np.random.Generator, shortest: int, longest: int) -> IntArray:
        """With one to four facts, all of them asked for. Most are short, so that questions come often."""
        length = int(shortest * (longest / shortest) ** (rng.random() ** 2))
        num_needles = int(rng.integers(1, 1 + min(4, length // 12)))
        return self.task(num_needles, num_needles).sample(rng, length).ids


def write_corpus(load: Workload, folder: Path) -> Facts:
    texts = list(python_sources(load.text_bytes))
    tokenizer = train_tokenizer(texts[:: 1 + len(texts) // 2000], load.text_vocab, [END_OF_TEXT])
    end = tokenizer.end_of_text_id
    assert end is not None
    rows = [np.array([*ids, end], np.int32) for ids in tokenizer.encode_batch(texts)]
    facts = Facts(make_alphabet(load.vocab_size, first_id=load.text_vocab, num_symbols=128), np.concatenate(rows))
    rng = np.random.default_rng(0)
    with CorpusWriter(folder, vocab_size=load.vocab_size) as writer:
        for row in rows:
            writer.add("code", row, split="train")
        for kind, shortest, longest, num_tokens in (
            (Kind.PLAIN, 24, load.short, load.fact_tokens),
            (Kind.LONG, load.short // 2, load.long, load.fact_tokens // 2),
        ):
            written = 0
            while written < num_tokens:
                document = facts.document(rng, shortest, longest)
                writer.add("facts", document, split="train", kind=kind)
                written += len(document)
        writer.finish({"code": 0.3, "facts": 0.7} if load.fact_tokens else {"code": 1.0}, end_of_text_id=end)
    return facts


def run(
    load: Workload, corpus: Path, runs: Path, name: str, model: str, phase: dict[str, TomlValue], optimizer: str
) -> Path:
    """One phase through `m2forge pretrain`; the folder of the model it ends with."""
    data: dict[str, TomlValue] = {
        "name": name,
        "corpus": str(corpus),
        "model": model,
        "model_set": [] if Path(model).is_dir() else ["num_mtp=1", f"max_context={load.short}"],
        "train": {"optimizer": {"kind": optimizer, "eps": 1e-8}, "checkpoint": {"keep": 0}},
        "phases": [phase | {"name": name}],
    }
    return run_pretrain(build(PretrainConfig, data), runs)


def train_base(load: Workload, corpus: Path, runs: Path) -> Path:
    phase: dict[str, TomlValue] = {
        "steps": load.base_steps,
        "context": load.short,
        "pack_tokens": load.base_tokens,
        "warmup_steps": 50,
        "lr": {"start": load.lr, "end": load.lr / 4},
        "mtp_weight": {"start": 0.3},
    }
    return run(load, corpus, runs, "base", load.model, phase, "muon")


def extend(load: Workload, corpus: Path, runs: Path, model: Path) -> Path:
    phase: dict[str, TomlValue] = {
        "steps": load.extend_steps,
        "context": load.long,
        "pack_tokens": load.extend_tokens,
        "warmup_steps": 10,
        "lr": {"start": load.lr / 2, "end": load.lr / 20},
        "mtp_weight": {"start": 0.1},
        "long_share": 0.6,
    }
    return run(load, corpus, runs, "extended", str(model), phase, "muon")


def retrieval(load: Workload, facts: Facts, folder: Path, num_needles: int) -> dict[int, float]:
    """Share of the facts asked for that are found, by length; `num_needles` are hidden and one is asked for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    predictor = ModelPredictor(load_model(folder, device=device))
    task = facts.task(num_needles)
    found, length = {}, load.short
    while length <= load.long:
        rng = np.random.default_rng(1)
        samples = [task.sample(rng, length, depth) for depth in DEPTHS for _ in range(load.num_samples)]
        found[length] = float(np.mean([outcome.is_exact for outcome in score_forced(predictor, samples)]))
        length *= 2
    return found


def module_losses(load: Workload, corpus: Path, runs: Path, model: Path, source: str) -> list[float]:
    """Mean loss of the two added modules, step by step, smoothed."""
    phase: dict[str, TomlValue] = {
        "steps": load.module_steps,
        "context": load.short,
        "pack_tokens": load.module_tokens,
        "lr": {"start": load.lr / 2},
        "warmup_steps": 10,
        "mtp_weight": {"start": 1.0},
        "num_mtp": 3,
        "mtp_source": source,
        "trains": "mtp",
    }
    name = f"modules-{source}"
    run(load, corpus, runs, name, str(model), phase, "adamw")
    steps = read_metrics(runs / name / "metrics.jsonl")
    losses = [(step.values["mtp_loss/2"] + step.values["mtp_loss/3"]) / 2 for step in steps]
    smoothed: list[float] = np.convolve(losses, np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS, mode="valid").tolist()
    return smoothed


def context_bars(load: Workload, facts: Facts, before: Path, after: Path) -> list[Bar]:
    names = {before: "before", after: "after"}
    found = {(folder, count): retrieval(load, facts, folder, count) for folder in names for count in (1, 4)}
    lengths = list(found[before, 1])
    print_table(
        f"{load.model}: facts found, {load.num_samples * len(DEPTHS)} a length, before and after context {load.long:,}",
        ("", *(f"{length:,}" for length in lengths)),
        [
            (f"{names[folder]}, {count} hidden", *(f"{values[length]:.0%}" for length in lengths))
            for (folder, count), values in found.items()
        ],
    )
    return [
        Bar.at_least(f"needles found at {load.long} after the extension", found[after, 1][load.long], 0.95),
        Bar.at_most(f"needles found at {load.long} before the extension", found[before, 1][load.long], 0.5),
    ]


def module_bars(load: Workload, corpus: Path, runs: Path, model: Path) -> list[Bar]:
    losses = {source: module_losses(load, corpus, runs, model, source) for source in ("main", "random")}
    goal = losses["random"][-1]
    reached = {
        source: next((step for step, loss in enumerate(found) if loss <= goal), load.module_steps) + SMOOTHED_STEPS
        for source, found in losses.items()
    }
    print_table(
        f"{load.model}: loss of the two added modules, main model frozen, {load.module_steps} steps",
        ("added modules start as", "first", "last", f"steps to reach {goal:.3f}"),
        [
            (name, f"{losses[source][0]:.3f}", f"{losses[source][-1]:.3f}", str(reached[source]))
            for source, name in (("main", "copies of the last layer"), ("random", "random weights"))
        ],
    )
    share = reached["main"] / load.module_steps
    return [Bar.at_most("steps of copies over steps of random weights, to the same loss", share, 0.5)]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    load = QUICK if options.quick else GPU if torch.cuda.is_available() else CPU
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as name:
        corpus, runs = Path(name) / "corpus", Path(name) / "runs"
        corpus.mkdir()
        start_s = time.monotonic()
        facts = write_corpus(load, corpus)
        print(f"corpus written in {time.monotonic() - start_s:.0f} s")
        model = train_base(load, corpus, runs)
        print(f"trained after {time.monotonic() - start_s:.0f} s")
        if load.extend_steps:
            before, model = model, extend(load, corpus, runs, model)
            bars += context_bars(load, facts, before, model)
        bars += module_bars(load, corpus, runs, model)
    finish(bars, options.json)


if __name__ == "__main__":
    main()
