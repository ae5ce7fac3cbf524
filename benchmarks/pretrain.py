"""Training speed over token shards: our engine against a transformers training loop, step for step.

Both start from the same weights, read the same rows from the same shards, clip to the same norm and step AdamW at the
same rates; the loss curves are compared. On one GPU `m2-mini` in bfloat16, ours with float32 masters, the peer's AdamW
on the bfloat16 weights themselves, compiled whole and compiled layer by layer. (Float32 weights under autocast, as
`Trainer(bf16=True)` has them, send transformers' experts down a slow path, 28k tokens/s.) On a CPU: `m2-tiny` in
float32.

    python benchmarks/pretrain.py [--json] [--quick]
"""

import gc
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peer import peer
from report import Bar, arguments, finish, print_table
from text_corpus import write_text_corpus

from m2forge.corpus.reader import CorpusReader
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer, fastest_attention
from m2forge.records import NO_TARGET, Pack
from m2forge.train.config import Curve, OptimizerConfig, PhaseConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.loop import Prefetch, lr_at

OPTIMIZER = OptimizerConfig(eps=1e-8)


@dataclass(frozen=True)
class Workload:
    config: ModelConfig
    device: str
    dtype: torch.dtype
    phase: PhaseConfig
    """Its packs are rows of `context` tokens."""
    num_timed: int
    """The last steps, over which time is taken."""
    corpus_bytes: int


@dataclass(frozen=True)
class Result:
    losses: list[float]
    tokens_per_s: float
    memory_gib: float
    data_share: float = 0.0


def workload(quick: bool) -> Workload:
    if torch.cuda.is_available() and not quick:
        phase = PhaseConfig(
            name="speed", steps=120, context=4096, pack_tokens=32768, lr=Curve(start=4e-4), warmup_steps=20
        )
        return Workload(_plain(preset("m2-mini")), "cuda", torch.bfloat16, phase, 60, 60_000_000)
    steps = 40 if quick else 150
    phase = PhaseConfig(name="speed", steps=steps, context=256, pack_tokens=1024, lr=Curve(start=2e-3), warmup_steps=10)
    return Workload(_plain(preset("m2-tiny")), "cpu", torch.float32, phase, steps // 2, 2_000_000)


def _plain(config: ModelConfig) -> ModelConfig:
    """Without what transformers does not train: prediction modules and the bias rule."""
    assert config.moe is not None
    return config.model_copy(update={"num_mtp": 0, "moe": config.moe.model_copy(update={"bias_update": "none"})})


class Rows:
    """Packs of a corpus with the borders of documents taken out: rows that attend to all before them, the way
    transformers trains on concatenated text."""

    def __init__(self, folder: Path, phase: PhaseConfig) -> None:
        self._reader = CorpusReader(folder, context=phase.context, pack_tokens=phase.pack_tokens, seed=0)
        self._lengths = np.full(phase.pack_tokens // phase.context, phase.context, np.int32)
        self._left = np.zeros((2, 0), np.int32)
        self.domains = self._reader.domains

    def next_pack(self) -> Pack:
        num_tokens = int(self._lengths.sum())
        while self._left.shape[1] < num_tokens:
            pack = self._reader.next_pack()
            self._left = np.concatenate([self._left, [pack.tokens, pack.targets]], 1)
        (tokens, targets), self._left = self._left[:, :num_tokens], self._left[:, num_tokens:]
        return Pack(tokens=tokens, targets=targets, lengths=self._lengths, tags=np.zeros_like(self._lengths))

    def state(self) -> dict[str, bool]:
        return {}


def timed(
    load: Workload,
    step: Callable[[int], torch.Tensor | Callable[[], float]],
    data_s: Callable[[], float],
    num_tokens: Callable[[], int],
) -> Result:
    """Run all steps; losses are read at the end, so that no host sync slows a step. `data_s`, `num_tokens`: the
    last step's wait for its pack, and the tokens in it."""
    losses: list[torch.Tensor | Callable[[], float]] = []
    started_s, waited_s, trained = 0.0, 0.0, 0
    for index in range(load.phase.steps):
        if index == load.phase.steps - load.num_timed:
            _drain()
            started_s, waited_s, trained = time.perf_counter(), 0.0, 0
        losses.append(step(index))
        waited_s += data_s()
        trained += num_tokens()
    _drain()
    passed_s = time.perf_counter() - started_s
    memory = torch.cuda.max_memory_allocated() / 2**30 if load.device == "cuda" else 0.0
    values = [loss() if callable(loss) and not isinstance(loss, torch.Tensor) else float(loss) for loss in losses]
    return Result(values, trained / passed_s, memory, waited_s / passed_s)


def run_ours(load: Workload, folder: Path, *, documents: bool = False) -> Result:
    model = build(load.config, load.device, load.dtype)
    if load.device == "cuda":
        model.compile_blocks()
        torch.cuda.reset_peak_memory_stats()
    engine = TrainEngine(model, OPTIMIZER, router_bias="balanced")
    reader = CorpusReader(folder, context=load.phase.context, pack_tokens=load.phase.pack_tokens, seed=0)
    source = _Stateless(reader) if documents else Rows(folder, load.phase)
    sizes = [0]
    with Prefetch(source, 1) as ahead:

        def step(index: int) -> Callable[[], float]:
            packs = ahead.take().packs
            sizes[0] = packs[0].tokens.size
            metrics = engine.step_rows(packs, lr=lr_at(load.phase, index), pack_tokens=load.phase.pack_tokens)
            return lambda: metrics.read()["loss"]

        return timed(load, step, lambda: ahead.waited_s, lambda: sizes[0])


class _Stateless:
    def __init__(self, reader: CorpusReader) -> None:
        self._reader, self.domains = reader, reader.domains

    def next_pack(self) -> Pack:
        return self._reader.next_pack()

    def state(self) -> dict[str, bool]:
        return {}


def run_peer(load: Workload, folder: Path, start: Transformer, compiled: str) -> Result:
    """`compiled`: "whole", "layers" or "no"."""
    model = peer(load.config, start, "grouped_mm")
    if load.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if compiled == "layers":
        for layer in model.model.layers:
            layer.compile()
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed_tokens" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed_tokens" in n]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True)

    def loss_of(tokens_BL: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens_BL, labels=labels_BL, shift_labels=labels_BL, use_cache=False).loss
        return loss

    function = torch.compile(loss_of) if compiled == "whole" else loss_of
    rows = _device_rows(load, folder)

    def step(index: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(load.phase, index)
        # The attention backend that ours has.
        with fastest_attention(torch.device(load.device)):
            loss = function(*next(rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return timed(load, step, lambda: 0.0, lambda: load.phase.pack_tokens)


def _device_rows(load: Workload, folder: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, the token after each or −100), read ahead as ours are."""
    with Prefetch(Rows(folder, load.phase), 1) as ahead:
        while True:
            (pack,) = ahead.take().packs
            targets = np.where(pack.targets == NO_TARGET, -100, pack.targets)
            shape = (-1, load.phase.context)
            tensors = [torch.from_numpy(x.astype(np.int64)).view(shape) for x in (pack.tokens, targets)]
            tokens, labels = (
                x.pin_memory().to(load.device, non_blocking=True) if load.device == "cuda" else x for x in tensors
            )
            yield tokens, labels


def _drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def curve_difference(ours: list[float], theirs: list[float], window: int = 10) -> float:
    """Largest difference of the two curves, each averaged over `window` steps, relative to the loss."""
    kernel = np.ones(window) / window
    a, b = (np.convolve(losses, kernel, mode="valid") for losses in (ours, theirs))
    return float(np.max(np.abs(a - b) / b))


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    load = workload(options.quick)
    on_gpu = load.device == "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_tokens = write_text_corpus(folder, load.config.vocab_size, load.corpus_bytes)
        results = {"m2forge": run_ours(load, folder)}
        free()
        names = {"whole": "transformers, compiled whole", "layers": "transformers, compiled by layer"}
        peers = names if on_gpu else {"no": "transformers"}
        for compiled, kind in peers.items():
            results[kind] = run_peer(load, folder, build(load.config, load.device, load.dtype), compiled)
            free()
        if on_gpu:
            results["m2forge, documents masked"] = run_ours(load, folder, documents=True)
    ours = results["m2forge"]
    steps = f"{load.phase.steps} steps of {load.phase.pack_tokens}, {load.num_timed} timed"
    print_table(
        f"{num_tokens / 1e6:.1f}M tokens of shards, {steps}",
        ("", "tokens/s", "GiB", "first loss", "last loss", "ours is"),
        [
            (
                kind,
                f"{r.tokens_per_s:,.0f}",
                f"{r.memory_gib:.1f}",
                f"{r.losses[0]:.3f}",
                f"{np.mean(r.losses[-10:]):.3f}",
                f"{ours.tokens_per_s / r.tokens_per_s:.2f}x",
            )
            for kind, r in results.items()
        ],
    )
    bars = [Bar.at_most("share of the step spent waiting for data", ours.data_share, 0.02)]
    for kind in peers.values():
        difference = curve_difference(ours.losses, results[kind].losses)
        bars.append(Bar.at_most(f"difference of the loss curves to {kind}", difference, 0.02))
        if on_gpu:
            ratio = ours.tokens_per_s / results[kind].tokens_per_s
            bars.append(Bar.at_least(f"tokens/s over {kind}", ratio, 1.5))
    finish(bars, options.json)


if __name__ == "__main__":
    main()
