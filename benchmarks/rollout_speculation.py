"""Speculation against plain decoding, with prediction modules that this project's own pre-training trained.

The network learns the Python sources of this machine with one module. Then it writes: texts at temperature 1, behind
parts of files that it has not learnt. On these the chain, lengthened to three by copies, trains on alone: what
modules are asked to foresee is what the network writes, and over texts that it has learnt by heart it is surer of
itself than elsewhere. First they follow the network, then they learn to be accepted. Prompts are other held-out files.
Both engines decode the same prompts in turns: one plain, one that chooses how far to speculate (`speculation = 3`).
Texts differ, so a run of any size decodes eight prompts at least: small batches one after the other. Speed is tokens
per second of decode steps, ratios are of medians over runs. Acceptance, how often the first k drafts are all accepted,
comes from a third engine that always drafts three. Training and measuring can be two commands, with a folder between
them. The table also has the time to read the prompts, which the modules read too, and that of everything: all arrive at
once there, and a batch that speculates ends one by one. With --depths there are engines that always draft one, two and
three beside: how good is the choice?

On a CPU everything is scaled down, which shows that it runs; time there says nothing of a GPU, and there are no bars.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from report import Bar, print_table
from rollout_serve import make_core, serve
from rollout_watch import Timed, joined
from text_corpus import write_text_corpus

from m2forge.config import TomlValue, build
from m2forge.corpus.manifest import MANIFEST_NAME, read_manifest
from m2forge.corpus.reader import CorpusReader
from m2forge.corpus.token_set import CorpusWriter
from m2forge.model.checkpoint import load_model
from m2forge.model.transformer import Transformer
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.stage import run_pretrain
from m2forge.protocols import Prompt
from m2forge.records import IntArray, Sampling
from m2forge.rollout.core import Core
from m2forge.rollout.speculation.adaptive_depth import FixedDepth

DEPTH = 3
MIN_SPEEDUP, SMALL_BATCH, MIN_ANYWHERE = 1.6, 8, 0.95
WARM_UP_RUNS = 5
"""In which graphs are captured, and the engine tries every depth: it reads prompts at another in each."""
ACCEPTANCE_RUNS = 4


@dataclass(frozen=True)
class Load:
    model: str
    vocab_size: int
    text_bytes: int
    context: int
    pack_tokens: int
    base_steps: int
    written: int
    """Texts that the network writes for its modules,"""
    num_written: int
    """Tokens of each completion, after its prompt."""
    writers: int
    """Completions generated at once."""
    module_steps: int
    """Training steps of the modules with each loss."""
    lr: float
    batches: tuple[int, ...]
    num_prompt: int
    num_new: int
    repeats: int
    """Repeats of small batches, which take little time; larger ones are repeated half as often."""


GPU = Load(
    model="m2-mini",
    vocab_size=16_384,
    text_bytes=240_000_000,
    context=1024,
    pack_tokens=32_768,
    base_steps=1600,
    written=20_480,
    num_written=256,
    writers=512,
    module_steps=600,
    lr=1.5e-3,
    batches=(1, 2, 4, 8, 32, 128, 256),
    num_prompt=256,
    num_new=128,
    repeats=15,
)
CPU = Load(
    model="m2-nano",
    vocab_size=512,
    text_bytes=1_000_000,
    context=128,
    pack_tokens=512,
    base_steps=120,
    written=128,
    num_written=48,
    writers=16,
    module_steps=20,
    lr=4e-3,
    batches=(1, 8),
    num_prompt=32,
    num_new=48,
    repeats=1,
)
QUICK = replace(CPU, text_bytes=300_000, base_steps=30, written=32, num_written=24, module_steps=5, num_new=24)
TOP_K = 256
"""Number of likeliest tokens whose probabilities the modules learn singly; temperature 1 also samples others."""
UNSEEN_EVERY = 12
"""One file in this many is held out of training; its parts are the prompts."""


def speculation(
    device: torch.device,
    *,
    is_quick: bool,
    keep: Path | None,
    only_trains: bool = False,
    batches: Sequence[int] = (),
    has_depths: bool = False,
) -> list[Bar]:
    """`keep`: a folder for corpus and model, which are taken from there if they are there already. `only_trains`: the
    rest is left to another command. `batches`: in place of the usual ones. `has_depths`: fixed ones beside."""
    is_full = device.type == "cuda" and not is_quick
    load = GPU if is_full else QUICK if is_quick else CPU
    load = replace(load, batches=tuple(batches) or load.batches)
    with tempfile.TemporaryDirectory() as name:
        folder = keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        trained = train(load, folder)
        if only_trains:
            return []
        model = load_model(trained, device=device, dtype=torch.bfloat16 if is_full else None)
        text = held_out(load, folder / "corpus", "code", 4 * max(load.batches))
        bars = [bar for temperature in (0.0, 1.0) for bar in compare(model, load, text, temperature, has_depths)]
    return bars if is_full else []


def train(load: Load, folder: Path) -> Path:
    """The folder of a model with three modules. What an earlier command finished in `folder` is taken from there."""
    start_s = time.monotonic()
    corpus, written, runs = folder / "corpus", folder / "written", folder / "runs"
    if not (corpus / MANIFEST_NAME).exists():
        corpus.mkdir(exist_ok=True)
        num_tokens = write_text_corpus(corpus, load.vocab_size, load.text_bytes, UNSEEN_EVERY)
        print(f"  {num_tokens:,} tokens of text after {time.monotonic() - start_s:.0f} s", flush=True)
    common: dict[str, TomlValue] = {"context": load.context, "pack_tokens": load.pack_tokens}
    base: dict[str, TomlValue] = common | {
        "name": "base",
        "steps": load.base_steps,
        "warmup_steps": load.base_steps // 10,
        "lr": {"start": load.lr, "end": load.lr / 10},
        "mtp_weight": {"start": 0.3},
    }
    modules: dict[str, TomlValue] = common | {
        "name": "modules",
        "steps": load.module_steps,
        "warmup_steps": load.module_steps // 10,
        "lr": {"start": load.lr / 2, "end": load.lr / 5},
        "mtp_weight": {"start": 1.0},
        "mtp_loss": "topk_kl",
        "mtp_top_k": TOP_K,
        "num_mtp": DEPTH,
        "mtp_source": "mtp1",
        "trains": "mtp",
    }
    accepted: dict[str, TomlValue] = modules | {
        "name": "accepted",
        "lr": {"start": load.lr / 5, "end": load.lr / 20},
        "mtp_loss": "topk_acceptance",
    }
    model = load.model
    for phase, optimizer in ((base, "muon"), (modules, "adamw"), (accepted, "adamw")):
        if phase is modules and not (written / MANIFEST_NAME).exists():
            num_tokens = write(Path(model), load, corpus, written)
            print(f"  {num_tokens:,} tokens written after {time.monotonic() - start_s:.0f} s", flush=True)
        data: dict[str, TomlValue] = {
            "name": phase["name"],
            "corpus": str(corpus if phase is base else written),
            "model": model,
            "model_set": [] if Path(model).is_dir() else ["num_mtp=1", f"max_context={load.context}"],
            "train": {"optimizer": {"kind": optimizer, "eps": 1e-8}, "checkpoint": {"keep": 0}},
            "phases": [phase],
        }
        trained = folder / f"{phase['name']}.txt"
        if not trained.exists():
            trained.write_text(str(run_pretrain(build(PretrainConfig, data), runs)))
        model = trained.read_text()
        print(f"  {phase['name']} trained after {time.monotonic() - start_s:.0f} s", flush=True)
    return Path(model)


def write(folder: Path, load: Load, corpus: Path, written: Path) -> int:
    """Number of tokens of a corpus that the network writes by itself, to be trained on with what they stand behind."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, device=device, dtype=torch.bfloat16 if device.type == "cuda" else None)
    core = make_core(model, load.writers, load.num_prompt + load.num_written)
    manifest, unseen = read_manifest(corpus), held_out(load, corpus, "unseen", load.written // 2)
    written.mkdir(exist_ok=True)
    num_tokens = 0
    with CorpusWriter(written, vocab_size=manifest.vocab_size) as writer:
        for seed in range(load.written // load.writers):
            longer = replace(load, num_new=load.num_written)
            prompts = draw_prompts(longer, unseen, load.writers, 1.0, seed)
            for prompt, ids in zip(prompts, serve(core, prompts).ids, strict=True):
                writer.add("written", [*prompt.ids, *ids], split="train")
                num_tokens += len(ids)
        writer.finish(end_of_text_id=manifest.end_of_text_id)
    return num_tokens


def held_out(load: Load, corpus: Path, domain: str, num_prompts: int) -> IntArray:
    """Concatenated held-out documents, enough for `num_prompts` different prompts."""
    pack_tokens = num_prompts * load.num_prompt
    reader = CorpusReader(
        corpus, context=load.context, pack_tokens=pack_tokens, seed=0, mixture={domain: 1.0}, split="held_out"
    )
    return reader.next_pack().tokens


def draw_prompts(load: Load, text: IntArray, num_requests: int, temperature: float, seed: int) -> list[Prompt]:
    starts = np.random.default_rng(seed).integers(0, text.size - load.num_prompt, num_requests)
    sampling = Sampling(temperature=temperature)
    # No seed of their own: a seed ties each token to its number, and drafts to luck.
    return [Prompt(text[start : start + load.num_prompt], load.num_new, sampling) for start in starts]


def compare(model: Transformer, load: Load, text: IntArray, temperature: float, has_depths: bool) -> list[Bar]:
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    shares = acceptance(model, load, text, temperature)
    rows, bars = [], []
    for batch in load.batches:
        context = load.num_prompt + load.num_new
        cores = [make_core(model, batch, context, speculation=depth) for depth in (0, DEPTH)]
        if has_depths:
            cores += [with_depth(cores[1], depth) for depth in range(1, DEPTH + 1)]
        plain, drafted, *fixed = in_turns(cores, load, text, batch, temperature)
        speedup, whole = (of(drafted) / of(plain) for of in (decode_rate, whole_rate))
        depth = mean_depth(cores[1].metrics())
        rates = (f"{decode_rate(runs):,.0f}" for runs in (plain, drafted))
        reading = statistics.median(run.read_s for run in plain) / statistics.median(run.read_s for run in drafted)
        ratios = (f"{ratio:.2f}x" for ratio in (speedup, reading, whole))
        rows.append((str(batch), *rates, f"{depth:.2f}", *ratios))
        others = "".join(
            f"; always {k}: {decode_rate(runs) / decode_rate(plain):.2f}x" for k, runs in enumerate(fixed, 1)
        )
        print(f"  {kind}, batch {batch}: {speedup:.2f}x, {depth:.2f} drafts{others}", flush=True)
        asked = MIN_SPEEDUP if batch <= SMALL_BATCH else MIN_ANYWHERE
        bars.append(Bar.at_least(f"{kind}, batch {batch}: speculation over plain decoding", speedup, asked))
    accepted = ", ".join(f"{share:.0%}" for share in shares)
    print_table(
        f"{load.model}, {kind}, prompts of {load.num_prompt}, {load.num_new} new, median of {load.repeats} runs, of "
        f"half as many beyond a batch of {SMALL_BATCH}; of three "
        f"drafts the first one, two, three accepted: {accepted}",
        ("batch", "plain, tokens/s", "speculating, tokens/s", "drafts a step", "decode steps", "prompts", "all"),
        rows,
    )
    return bars


def in_turns(cores: Sequence[Core], load: Load, text: IntArray, batch: int, temperature: float) -> list[list[Timed]]:
    """Runs of each engine; before them come runs that are not counted, in which the engine finds its depth."""
    num_batches = max(1, SMALL_BATCH // batch)
    repeats = load.repeats if batch <= SMALL_BATCH else max(1, load.repeats // 2)
    runs: list[list[Timed]] = [[] for _ in cores]
    for run in range(WARM_UP_RUNS + repeats):
        seeds = range(run * num_batches, (run + 1) * num_batches)
        batches = [draw_prompts(load, text, batch, temperature, seed) for seed in seeds]
        for core, timed in zip(cores, runs, strict=True):
            timed.append(joined([serve(core, prompts) for prompts in batches]))
    return [timed[WARM_UP_RUNS:] for timed in runs]


def decode_rate(runs: Sequence[Timed]) -> float:
    return statistics.median(timed.decode_rate for timed in runs)


def whole_rate(runs: Sequence[Timed]) -> float:
    return statistics.median(timed.rate for timed in runs)


def acceptance(model: Transformer, load: Load, text: IntArray, temperature: float) -> list[float]:
    """How often the first k drafts are all accepted, where three are always made."""
    core = with_depth(make_core(model, SMALL_BATCH, load.num_prompt + load.num_new, speculation=DEPTH), DEPTH)
    for seed in range(ACCEPTANCE_RUNS):
        serve(core, draw_prompts(load, text, SMALL_BATCH, temperature, seed))
    metrics = core.metrics()
    return [metrics[f"total_accepted_{k}"] / metrics[f"total_drafted_{k}"] for k in range(1, DEPTH + 1)]


def with_depth(core: Core, depth: int) -> Core:
    """The same core with a fixed number of drafts."""
    return Core(core.model, core.config, core.version, depth=FixedDepth(depth))


def mean_depth(metrics: Mapping[str, float]) -> float:
    """Drafts over steps, summed over sequences; a step draws one token besides those that were drafts."""
    drafted, accepted = (
        sum(metrics[f"total_{name}_{k}"] for k in range(1, DEPTH + 1)) for name in ("drafted", "accepted")
    )
    return drafted / (metrics["total_sampled_tokens"] - accepted)
