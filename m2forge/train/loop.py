"""The training loop that every stage runs: phases, steps, metrics, checkpoints, resume.

A stage supplies the model, the phases and a function that opens the data source of a phase; the loop owns the control
flow and the run directory:

    runs/NAME/  config.toml  metrics.jsonl  tensorboard/  checkpoints/  model/ (when the run is complete)

A stage that holds out data passes an `Evaluation`; the loop then measures its loss every few steps and at the end of a
phase, and stores a checkpoint whenever the loss is the lowest of the phase. The search starts again with each phase: a
later one trains another context, another mixture or other weights.

All ranks read the same packs, and each trains on its share of them, so a run may resume on a different number of ranks.
Each writes its part of a checkpoint, and only rank 0 metrics and the model.

A run whose directory holds a checkpoint resumes from it. Everything a phase changes about the model (context, MTP
modules, what is frozen) is set again on entry, so a resumed run is in the state of the interrupted one.

`TokenCost` computes the FLOPs of a step from the documents and targets of its packs:

    flops = Σ over documents of  length · (base + slope · length)  +  head · targets

A token attends to half of its document on average, so its cost grows with the document's length, not with the context
limit of the phase; and the head runs only at positions with a target. `count` gives the cost at two lengths; the cost
is linear between them, which is exact without attention windows.

`Prefetch` reads packs in a thread, each step's with the source's state after them: a checkpoint records what was
trained on, not what was prefetched.

Learning rate and loss weights are functions of the step within the phase alone:

    x = step / (steps − 1)                          0 at the first step of the phase, 1 at its last
    linear: start + (end − start) · x               cosine: end + (start − end) · (1 + cos πx) / 2
    warmup multiplies by (step + 1) / warmup_steps until that reaches 1
"""

import gc
import logging
import math
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np

from m2forge.errors import ConfigError, ExistsError, TrainingError
from m2forge.model.checkpoint import copy_model, save_model
from m2forge.model.config import ModelConfig
from m2forge.model.count import count
from m2forge.model.start import Start
from m2forge.model.transformer import Transformer
from m2forge.observe.metrics import MetricsWriter
from m2forge.observe.progress import Progress, progress
from m2forge.records import JsonValue, Pack
from m2forge.train.batch import num_targets
from m2forge.train.checkpoint import CheckpointStore, load_start, restore
from m2forge.train.config import Curve, PhaseConfig, TrainConfig
from m2forge.train.engine import PendingMetrics, TrainEngine
from m2forge.train.evaluation import Evaluation, selection_loss
from m2forge.train.machine import choose_dtype, load_network, machine_settings, peak_flops, rank_device, set_up_model
from m2forge.train.parallel import SINGLE_RANK, ProcessRanks, Ranks, context_group, expand_mtp
from m2forge.train.position import CHECKPOINT_FOLDER, MODEL_FOLDER, Best, Position, read_position
from m2forge.train.run_dir import hold_run
from m2forge.tree.token_tree import TokenTree


class TokenCost:
    def __init__(self, config: ModelConfig, context: int) -> None:
        first, *rest = count(config, (1, context) if context > 1 else (1,)).costs
        self._slope = (rest[0].training_flops - first.training_flops) / (context - 1) if rest else 0.0
        # Forward (1x) and backward (2x), for the main model and each MTP module.
        self._head = 3 * 2 * config.vocab_size * config.hidden_size * (1 + config.num_mtp)
        self._base = first.training_flops - self._slope - self._head

    def training_flops(self, packs: Sequence[Pack]) -> float:
        """FLOPs of the forward and backward passes over `packs`."""
        length = np.concatenate([pack.lengths for pack in packs]).astype(np.float64)
        through_layers = float((length * (self._base + self._slope * length)).sum())
        return through_layers + self._head * sum(num_targets(pack) for pack in packs)

    def tree_flops(self, tree: TokenTree) -> float:
        """The same for a tree, whose shared tokens are computed once."""
        nodes, _ = tree.nodes()
        size_V, end_V = np.array([(node.size, node.end) for node in nodes], np.float64).reshape(-1, 2).T
        # A token attends to as many as its depth. A row's mean depth is half of its length.
        depths = float((size_V * (end_V - size_V / 2)).sum())
        num_edges = sum(sample.num_response for sample in tree.samples)
        return float(size_V.sum()) * self._base + 2 * self._slope * depths + self._head * num_edges


DEPTH = 2


class PackSource(Protocol):
    """A source of packs, such as a corpus or SFT trajectories."""

    @property
    def domains(self) -> tuple[str, ...]:
        """Names that `Pack.tags` index into."""
        ...

    def next_pack(self) -> Pack: ...

    def state(self) -> Mapping[str, JsonValue]:
        """Small and JSON-serializable; a source created with it resumes exactly here."""
        ...


class Prefetched(NamedTuple):
    packs: list[Pack]
    state: Mapping[str, JsonValue]
    """State of the source after these packs."""


class Prefetch:
    """Use as a context manager; `take` returns the packs of one step."""

    def __init__(self, source: PackSource, packs_per_step: int) -> None:
        self._source, self._packs_per_step = source, packs_per_step
        self._queue: queue.Queue[Prefetched | BaseException] = queue.Queue(DEPTH)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self.waited_s = 0.0
        """Seconds the last `take` waited."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def take(self) -> Prefetched:
        start_s = time.perf_counter()
        item = self._queue.get()
        self.waited_s = time.perf_counter() - start_s
        if isinstance(item, BaseException):
            raise item
        return item

    def _fill(self) -> None:
        try:
            while not self._leaving.is_set():
                packs = [self._source.next_pack() for _ in range(self._packs_per_step)]
                self._queue.put(Prefetched(packs, self._source.state()))
        except BaseException as error:  # noqa: BLE001, raised again by `take`
            self._queue.put(error)


def curve_at(curve: Curve, step: int, num_steps: int) -> float:
    """The value of a curve over `num_steps` at `step`, counted from 0."""
    if curve.end is None:
        return curve.start
    done = step / max(1, num_steps - 1)
    if curve.shape == "cosine":
        return curve.end + (curve.start - curve.end) * (1 + math.cos(math.pi * done)) / 2
    return curve.start + (curve.end - curve.start) * done


def lr_at(phase: PhaseConfig, step: int) -> float:
    lr = curve_at(phase.lr, step, phase.steps)
    return lr * min(1.0, (step + 1) / phase.warmup_steps) if phase.warmup_steps else lr


def mtp_weight_at(phase: PhaseConfig, step: int) -> float:
    return curve_at(phase.mtp_weight, step, phase.steps)


OpenSource = Callable[[int, Mapping[str, JsonValue] | None], PackSource]
"""(phase index, state of the last source: this phase's, an earlier one's, or None) → the phase's packs."""

MAX_BAD_STEPS = 10
"""Consecutive steps without a finite gradient after which the run ends."""

_log = logging.getLogger(__name__)


@dataclass
class _Pending:
    """A step whose metrics are still being copied from the device."""

    step: int
    num_tokens: int
    num_flops: float | None
    metrics: PendingMetrics
    extra: dict[str, float]


class TrainLoop:
    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        phases: Sequence[PhaseConfig],
        find_start: Callable[[], Start],
        open_source: OpenSource,
        companions: tuple[Path, ...] = (),
        ranks: Ranks = SINGLE_RANK,
        evaluation: Evaluation | None = None,
    ) -> None:
        self.run_dir, self.config, self.phases, self.open_source = run_dir, config, tuple(phases), open_source
        self.companions, self.ranks, self.evaluation = companions, ranks, evaluation
        self._exports_best = evaluation is not None and evaluation.config.export == "best"
        if self._exports_best and not config.checkpoint.keep:
            raise ConfigError('eval.export = "best" needs checkpoints, and train.checkpoint.keep is 0; set it to 1')
        self.store = CheckpointStore(run_dir / CHECKPOINT_FOLDER, config.checkpoint, companions)
        self.device = rank_device(config.machine, ranks)
        self.dtype = choose_dtype(config.machine, self.device)
        self._loaded = newest = self.store.newest()
        if newest is None:
            start, self.position = find_start(), Position()
        else:
            start, self.position = load_start(newest), read_position(newest)
            _log.info("resuming from %s", newest)
            self._forget_missing_best()
        model = load_network(start, config.machine, self.dtype, ranks, f"{run_dir}: {self.position}")
        self._num_sharing = config.machine.mesh.context
        self.engine = TrainEngine(
            model,
            config.optimizer,
            ranks=ranks,
            offload=config.machine.offload,
            router_bias=config.router_bias,
            walk=config.machine.walk_config,
            context=context_group(config.machine.mesh, ranks, model.config)
            if isinstance(ranks, ProcessRanks)
            else None,
        )
        if newest is not None:
            restore(self.engine, newest)
        if self.position.phase > len(self.phases):
            raise ConfigError(f"{run_dir} is in phase {self.position.phase + 1}, the configuration has {len(phases)}")
        _refuse_missing_modules(self.phases[self.position.phase :], len(model.mtp))
        set_up_model(model, config.machine, self.device)
        self._bad_steps = 0

    def run(self) -> Path:
        """Train the remaining phases; returns the folder of the finished model."""
        leads = self.ranks.rank == 0
        hold = hold_run(self.run_dir) if leads else nullcontext()
        with hold, machine_settings(self.config.machine, self.device):
            if self.store.newest() != self._loaded:
                raise ExistsError(f"another process resumed {self.run_dir} in the meantime; start again")
            self._peak_flops = self.ranks.num_ranks * peak_flops(self.device, self.dtype)
            with MetricsWriter(self.run_dir, self.config.metrics) if leads else nullcontext() as writer:
                try:
                    for index in range(self.position.phase, len(self.phases)):
                        self._run_phase(index, writer)
                except BaseException:
                    self.store.leave()
                    raise
            return self._write_model()

    # -- one phase ----------------------------------------------------------------------------------------------------

    def _run_phase(self, index: int, writer: MetricsWriter | None) -> None:
        phase = self.phases[index]
        self._enter(phase)
        if not self.position.step_in_phase:
            self.position = replace(self.position, best=None)
        source = self.open_source(index, self.position.source)
        self.engine.tag_names = source.domains
        # With the main model frozen most of the backward pass is skipped, so the usual FLOP count does not apply.
        cost = None if phase.trains == "mtp" else TokenCost(self.engine.model.config, phase.context)
        num_idle = self.ranks.num_ranks - phase.packs_per_step * self._num_sharing
        if num_idle > 0 and self.ranks.rank == 0:
            _log.warning(
                "phase %s: %d of %d ranks have nothing to do; raise its packs_per_step (%d)",
                *(phase.name, num_idle, self.ranks.num_ranks, phase.packs_per_step),
            )
        before = self.position
        description = f"{phase.name}, context {phase.context}"
        shown = progress(phase.steps, description) if self.ranks.rank == 0 else nullcontext()
        with Prefetch(source, phase.packs_per_step) as prefetch, shown as bar:
            if bar is not None:
                bar.advance(self.position.step_in_phase)
            pending: _Pending | None = None
            started_s = time.perf_counter()
            while self.position.step_in_phase < phase.steps:
                current = self.step(phase, prefetch, cost)
                # Metrics of the previous step: the device has finished them while it runs this one.
                self._report(pending, writer, bar)
                passed_s = time.perf_counter() - started_s
                started_s += passed_s
                current.extra |= throughput(
                    current.num_tokens, current.num_flops, passed_s, prefetch.waited_s, self._peak_flops
                )
                pending = current
                evaluation = self._scheduled_evaluation(phase)
                saves = self.position.step % self.config.checkpoint.every_steps == 0
                if evaluation is not None or saves:
                    self._report(pending, writer, bar)
                    pending = None
                    if evaluation is not None:
                        # Before the checkpoint of this step, which then contains it.
                        self._evaluate(evaluation, phase, writer, bar)
                    if saves:
                        self.store.begin(self.engine, self.position)
                    started_s = time.perf_counter()
            self._report(pending, writer, bar)
        self._log_padding(phase, before)
        self.position = replace(self.position, phase=index + 1, step_in_phase=0)
        self.store.save(self.engine, self.position)

    def _enter(self, phase: PhaseConfig) -> None:
        model = self.engine.model
        if phase.num_mtp is not None and phase.num_mtp > len(model.mtp):
            machine = self.config.machine
            model = expand_mtp(model, phase.num_mtp, phase.mtp_source, machine.mesh, self.ranks)
            set_up_model(model, machine, self.device)
            self.engine.model = model
            self.engine.optimizer.follow(model)
            # The smaller network, if it was divided, has references to itself.
            gc.collect()
        attention = model.config.attention
        if phase.rope_theta is not None:
            attention = attention.model_copy(update={"rope_theta": phase.rope_theta})
        context = max(model.config.max_context, phase.context)
        model.config = model.config.model_copy(update={"attention": attention, "max_context": context})
        model.freeze_main(phase.trains == "mtp")

    def step(self, phase: PhaseConfig, prefetch: Prefetch, cost: TokenCost | None) -> _Pending:
        packs, state = prefetch.take()
        done = self.position.step_in_phase
        lr, mtp_weight = lr_at(phase, done), mtp_weight_at(phase, done)
        metrics = self.engine.step_rows(
            packs[self.ranks.rank // self._num_sharing :: self.ranks.num_ranks // self._num_sharing],
            lr=lr,
            pack_tokens=phase.pack_tokens,
            mtp_weight=mtp_weight,
            mtp_loss=phase.mtp_loss,
            mtp_top_k=phase.mtp_top_k,
            measure_agreement=bool(self.engine.model.mtp) and self.position.step % self.config.agreement_every == 0,
        )
        num_tokens = sum(pack.tokens.size for pack in packs)
        self.position = replace(
            self.position,
            step_in_phase=done + 1,
            step=self.position.step + 1,
            num_tokens=self.position.num_tokens + num_tokens,
            source=state,
        )
        extra = {
            "lr": lr,
            "num_tokens": float(self.position.num_tokens),
            "padding_share": _padding_share(phase, 1, num_tokens),
        }
        if self.engine.model.mtp:
            extra["mtp_weight"] = mtp_weight
        num_flops = None if cost is None else cost.training_flops(packs)
        return _Pending(self.position.step, num_tokens, num_flops, metrics, extra)

    def _report(self, pending: _Pending | None, writer: MetricsWriter | None, bar: Progress | None) -> None:
        if pending is None:
            return
        values = pending.metrics.read() | pending.extra
        if writer is not None:
            writer.write(pending.step, values)
        if bar is not None:
            bar.advance(1, {"loss": values["loss"], "tokens/s": f"{values['tokens_per_s']:,.0f}"})
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        self._bad_steps = 0 if finite else self._bad_steps + 1
        if self._bad_steps >= MAX_BAD_STEPS:
            raise TrainingError(
                f"{MAX_BAD_STEPS} steps in a row had no finite gradient, up to step {pending.step} "
                f"(loss {values['loss']}); lower the learning rate, or resume from an "
                f"older checkpoint of {self.run_dir}"
            )

    def _scheduled_evaluation(self, phase: PhaseConfig) -> Evaluation | None:
        """The evaluation to run after this step, if any."""
        if self.evaluation is None:
            return None
        is_scheduled = self.position.step % self.evaluation.config.every == 0
        return self.evaluation if is_scheduled or self.position.step_in_phase == phase.steps else None

    def _evaluate(
        self, evaluation: Evaluation, phase: PhaseConfig, writer: MetricsWriter | None, bar: Progress | None
    ) -> None:
        """Measure the held-out loss; if it is the lowest of the phase, store a checkpoint that says so."""
        metrics = evaluation.measure(self.engine, phase)
        loss, best = selection_loss(phase, metrics), self.position.best
        if writer is not None:
            writer.write(self.position.step, metrics)
        if bar is not None:
            bar.advance(0, {"eval loss": metrics["eval/loss"]})
        if math.isfinite(loss) and (best is None or loss < best.loss):
            self.position = replace(self.position, best=Best(self.position.step, loss))
            self.store.begin(self.engine, self.position)

    def _forget_missing_best(self) -> None:
        best = self.position.best
        if best is not None and not self.store.path(best.step).is_dir():
            _log.warning(
                "the best checkpoint, %s, is missing; the next evaluation is the best", self.store.path(best.step)
            )
            self.position = replace(self.position, best=None)

    def _log_padding(self, phase: PhaseConfig, before: Position) -> None:
        num_steps = self.position.step - before.step
        if num_steps and self.ranks.rank == 0:
            share = _padding_share(phase, num_steps, self.position.num_tokens - before.num_tokens)
            _log.info(
                "phase %s: %.2f%% of its packs of %d tokens was padding", phase.name, 100 * share, phase.pack_tokens
            )

    def _write_model(self) -> Path:
        """Write the finished model; the previous one stays until this one is complete, and is never partial."""
        dest = self.run_dir / MODEL_FOLDER
        model: Transformer | Path = self.engine.model
        if self._exports_best:
            model = self._best_model()
        elif self.config.machine.mesh.is_sharded:
            # Of the last step, too; it is copied tensor by tensor, so that no rank holds a whole network.
            model = self.store.path(self.position.step) / MODEL_FOLDER
        if self.ranks.rank == 0:
            self._replace_model(model, dest)
        self.ranks.max_int(0)
        return dest

    def _best_model(self) -> Path:
        best = self.position.best
        if best is None:
            raise TrainingError(
                "no evaluation of the last phase had a finite loss, so there is no best checkpoint to export; start "
                'again with eval.export = "last" to write the last weights'
            )
        _log.info("exporting step %d, whose held-out loss %.6g is the lowest of the last phase", best.step, best.loss)
        return self.store.path(best.step) / MODEL_FOLDER

    def _replace_model(self, model: Transformer | Path, dest: Path) -> None:
        """`model`: the model to write, or the model folder of a checkpoint."""
        fresh, old = self.run_dir / f".{MODEL_FOLDER}.fresh", self.run_dir / f".{MODEL_FOLDER}.old"
        for left in (fresh, old, *self.run_dir.glob(f".{fresh.name}.*.partial")):
            shutil.rmtree(left, ignore_errors=True)
        if isinstance(model, Path):
            copy_model(model, fresh, self.companions)
        else:
            save_model(model, fresh, companions=self.companions)
        if dest.exists():
            dest.rename(old)
        fresh.rename(dest)
        shutil.rmtree(old, ignore_errors=True)


def _refuse_missing_modules(phases: Sequence[PhaseConfig], num_mtp: int) -> None:
    """Raise, before the first step, if a later phase would find too few or too many MTP modules."""
    for phase in phases:
        wanted = num_mtp if phase.num_mtp is None else phase.num_mtp
        if not num_mtp and (wanted or phase.trains == "mtp"):
            raise ConfigError(
                f'phase {phase.name}: num_mtp {wanted}, trains "{phase.trains}": the network has no MTP module '
                "to start from; build it with num_mtp = 1"
            )
        if wanted < num_mtp:
            raise ConfigError(
                f"phase {phase.name}: num_mtp {wanted} is less than the {num_mtp} modules of the phase before"
            )
        num_mtp = wanted


def _padding_share(phase: PhaseConfig, num_steps: int, num_tokens: int) -> float:
    """Share of the steps' token capacity that was padding."""
    return 1 - num_tokens / (num_steps * phase.packs_per_step * phase.pack_tokens)


def throughput(
    num_tokens: int, num_flops: float | None, passed_s: float, waited_s: float, peak_flops: float
) -> dict[str, float]:
    """Metrics of a step that took `passed_s`, `waited_s` of them for data."""
    values = {"tokens_per_s": num_tokens / passed_s, "data_share": waited_s / passed_s}
    if num_flops is not None:
        values["mfu"] = num_flops / passed_s / peak_flops
    return values
