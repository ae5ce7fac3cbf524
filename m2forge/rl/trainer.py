"""The trainer process: batches of the pool in, policy versions out.

    claim a batch in the window → advantages → a step over its token trees → commit → publish → periodically, checkpoint

A thread publishes while the trainer waits for the next batch and runs it: only the next update waits for its end.

On a mesh of several ranks (rl/ranks.py) rank 0 does all of it, and the others take part in the step: rank 0 signals
what comes next and deals the trees by cost; each rank publishes its share of the weights. The next step then begins
after all ranks have published.

All of its state is on disk. Killed at any moment and restarted, it resumes from its newest checkpoint: versions
published since are discarded, and the pool returns the units that those steps had trained on. So the current weights
have trained on every committed episode exactly once.

Each batch has quotas, the number of its units by label of the pool, STAGE/DOMAIN. Quotas of fixed-size batches come
from `tasks/curriculum.py`: a function of the configuration and the step alone, the same that the curriculum draws by.
So step t trains units that were drawn for batch t's stage, and a stage ends for both after `num_batches` batches. The
size of a token-limited batch is unknown until it is claimed, so every size m has quotas:

    c_d(m) ∈ {⌊m·ratio_d⌋, ⌈m·ratio_d⌉},    Σ_d c_d(m) = m

The domains furthest below their ratio over the batches so far are rounded up first. No batch crosses the end of its
stage, and none takes more of a domain than the curriculum drew for the stage, so the last batches of a stage may depart
from the rounding above. The sizes of the batches so far determine all of this; a restarted trainer reads them from the
pool.

`make_trees` turns the units of a batch into the token trees of a step: one per group, with an advantage on every call.
"""

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import floor
from pathlib import Path
from typing import TypeVar

import torch

from m2forge.cluster.launcher import NODE_ADDRESS
from m2forge.config import load_resolved
from m2forge.errors import RecordError, TrainingError
from m2forge.model.checkpoint import copy_model, open_source, save_model, write_model
from m2forge.model.config_file import read_config
from m2forge.model.convert import find_companions
from m2forge.model.hub import find_folder
from m2forge.model.start import start_from
from m2forge.observe.busy import BusyLog, open_busy_log
from m2forge.observe.metrics import MetricsWriter
from m2forge.pool.batch import Claim
from m2forge.pool.pool import Pool
from m2forge.pool.stored import StoredEpisode, StoredUnit, make_label, read_roles
from m2forge.records import FloatArray, PolicyVersion, Reward
from m2forge.reward.advantage import assign_advantages, select_rewards, trained_calls
from m2forge.reward.config import AdvantageConfig
from m2forge.reward.judge import Judged
from m2forge.rl.config import RLConfig
from m2forge.rl.importance_ratio import delete_ratios, write_ratios
from m2forge.rl.layout import Layout, begin_branch
from m2forge.rl.ranks import deal, gather, scatter
from m2forge.tasks.config import CurriculumConfig, StageConfig
from m2forge.tasks.curriculum import Mixture
from m2forge.train.batch import Problem
from m2forge.train.checkpoint import CheckpointStore, Writing, load_start, restore
from m2forge.train.config import PhaseConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.loop import TokenCost, lr_at
from m2forge.train.machine import (
    choose_dtype,
    load_network,
    machine_ranks,
    machine_settings,
    rank_device,
    refuse_unfit_policy,
    set_up_model,
)
from m2forge.train.parallel import (
    SINGLE_RANK,
    ProcessRanks,
    Ranks,
    context_group,
    exchange,
    group_beside,
    public_share,
)
from m2forge.train.position import Position, read_position
from m2forge.train.run_dir import CONFIG_FILE, hold_run
from m2forge.tree.codec import decode_tree, encode_tree
from m2forge.tree.token_tree import TokenTree
from m2forge.weights.store import Send, Share


def make_trees(units: Sequence[StoredUnit], config: AdvantageConfig, vocab_size: int) -> list[TokenTree]:
    """One tree per group, with the advantage of each trained call. `units` is the whole batch of a step."""
    groups: dict[str, list[tuple[Judged, TokenTree, list[int]]]] = {}
    for unit in units:
        groups.setdefault(unit.group, []).extend(_judged(episode, config) for episode in unit.episodes)
    episodes = [judged.episode for group in groups.values() for judged, _, _ in group]
    advantages = iter(assign_advantages([[judged for judged, _, _ in group] for group in groups.values()], config))
    trees: list[TokenTree] = []
    for group in groups.values():
        tree = TokenTree(vocab_size)
        for judged, episode_tree, indices in group:
            for index, call in zip(indices, judged.episode.calls, strict=True):
                advantage = next(advantages)
                assert episodes[advantage.episode] is judged.episode, "advantages come in another order than episodes"
                tree.add(
                    call,
                    f"{judged.episode.id}/{index}",
                    episode=judged.episode.id,
                    advantage=advantage.value,
                    weight=advantage.weight,
                    experts=episode_tree.routing(index),
                )
        trees.append(tree)
    return trees


def _judged(stored: StoredEpisode, config: AdvantageConfig) -> tuple[Judged, TokenTree, list[int]]:
    """The episode's trained calls with their rewards, the tree of all calls, and the indices of the trained ones."""
    if stored.reward is None or stored.step_rewards is None:
        raise RecordError(f"episode {stored.name}: expected a reward for it and for each of its steps")
    tree = stored.tree()
    episode = stored.episode(tree)
    calls = trained_calls(read_roles(stored.artifacts), len(episode.calls), config)
    trained = replace(episode, calls=tuple(episode.calls[index] for index in calls))
    return Judged(trained, tuple(select_rewards(stored.step_rewards, calls))), tree, calls


T = TypeVar("T")
POLL_S, MAX_POLL_S = 0.02, 0.2
TRAINER_FOLDER = "trainer"
IDLE_S = 60.0
"""Interval at which rank 0 signals ranks that wait for a batch, because a collective has a timeout."""
_IDLE, _STEP, _END = 1, 2, 3
"""Commands that rank 0 broadcasts: wait, train a step, end."""
_log = logging.getLogger(__name__)


def train(run_dir: Path) -> None:
    """Train the run in `run_dir` from its configuration there; a lock allows one process at a time."""
    config = load_resolved(RLConfig, run_dir / CONFIG_FILE)
    with (
        machine_ranks(config.train.machine, run_dir, config) as ranks,
        hold_run(run_dir / TRAINER_FOLDER) if not ranks.rank else nullcontext(),
    ):
        Trainer(run_dir, config, ranks).run()


@dataclass(frozen=True)
class Order:
    """One rank's part of a step."""

    trees: list[bytes]
    """As tree/codec.py encodes them."""
    lr: float


@dataclass(frozen=True)
class Step:
    """Result of a step; on rank 0 that of all ranks."""

    is_empty: bool
    figures: dict[str, float]
    problems: list[Problem]
    log_ratios: dict[str, FloatArray]
    """Logprobs of each sample's tokens before the update, less those when they were sampled."""


class Trainer:
    def __init__(self, run_dir: Path, config: RLConfig, ranks: Ranks = SINGLE_RANK) -> None:
        self.config, self.layout, self.ranks = config, Layout(run_dir), ranks
        folder = find_folder(config.model, config.revision)
        self._companions = find_companions(folder)
        self._busy = BusyLog(None) if ranks.rank else open_busy_log("trainer")
        self.checkpoints = CheckpointStore(self.layout.checkpoints, config.train.checkpoint, self._companions)
        self.weights = self.layout.weight_store(config, self._companions)
        self._send: Send | None = None
        """Broadcasts versions, while the trainer runs."""
        self._publishing: Writing | None = None
        self._published_s = 0.0
        """Seconds of the current step in which the trainer itself published, or waited for the thread that does."""
        self._group = None if ranks.num_ranks == 1 else group_beside()
        """The group on which the ranks publish."""
        machine = config.train.machine
        device = rank_device(machine, ranks)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Copies versions to the host, beside the next step's kernels."""
        refuse_unfit_policy(config.train, read_config(folder), config.policy, device, ranks.num_ranks)
        newest = self.checkpoints.newest()
        if newest is None:
            start, self.position = start_from(folder, config.train.lora), Position()
        else:
            start, self.position = load_start(newest), read_position(newest)
        config.policy.refuse_misfit(start.config)
        dtype = choose_dtype(machine, device)
        model = load_network(start, machine, dtype, ranks, f"checkpoints of {run_dir}: {self.position}")
        self.engine = TrainEngine(
            model,
            config.train.optimizer,
            ranks=ranks,
            policy=config.policy,
            offload=machine.offload,
            router_bias=config.train.router_bias,
            walk=machine.walk_config,
            context=context_group(machine.mesh, ranks, model.config) if isinstance(ranks, ProcessRanks) else None,
        )
        self.engine.before_update.add(self._end_publishing)
        self._num_sharing = machine.mesh.context
        self._claimed_s = 0.0
        """Seconds of the claim that brought the last batch; those before count as waiting."""
        self._saved: PolicyVersion | None = None
        """The version of a checkpoint that is not yet marked in the pool."""
        self._cost = TokenCost(model.config, model.config.max_context)
        if newest is not None:
            restore(self.engine, newest)
            _log.info("resuming from %s", newest)
        set_up_model(model, machine, device)
        self._phase = PhaseConfig(
            name="rl",
            steps=config.num_steps,
            context=model.config.max_context,
            pack_tokens=max(config.policy.pack_tokens, model.config.max_context),
            lr=config.lr,
            warmup_steps=min(config.warmup_steps, config.num_steps),
        )

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.config.name, self.position.step)

    def run(self) -> None:
        """Train the remaining steps and write the finished model."""
        with machine_settings(self.config.train.machine, self.engine.device), self._broadcasting():
            try:
                self._follow() if self.ranks.rank else self._lead()
            except BaseException:
                self.checkpoints.leave()
                if self._publishing is not None and self.ranks.num_ranks == 1:
                    self._publishing.join()
                raise
            if not self.ranks.rank and not self.layout.model.exists():
                self._write_finished()
            self.ranks.max_int(0)

    @contextmanager
    def _broadcasting(self) -> Iterator[None]:
        if self.config.weights.sync == "files":
            yield
            return
        from m2forge.weights.collective import LOCAL, Sender

        host = LOCAL if self.config.cluster.launcher == "local" else os.environ[NODE_ADDRESS]
        sender = Sender(self.layout.broadcast, self.ranks.rank, self._exchange, host)
        self._send = sender.send
        try:
            yield
        finally:
            sender.close()

    def _exchange(self, value: T) -> list[T]:
        """What each rank passes."""
        return [value] if self.ranks.num_ranks == 1 else exchange(value, self._group)

    def _write_finished(self) -> None:
        if self.ranks.num_ranks == 1:
            save_model(self.engine.model, self.layout.model, companions=self._companions)
            return
        # The ranks' last published version, read tensor by tensor: no rank holds the whole model.
        newest = self.weights.newest()
        assert newest is not None
        if self.engine.model.lora is None:
            write_model(open_source(newest[1]), self.layout.model, companions=self._companions)
        else:
            copy_model(newest[1], self.layout.model)

    def _lead(self) -> None:
        config = self.config
        with (
            Pool(
                self.layout.pool(config.pool), self.engine.model.config.vocab_size, wait_s=config.pool.reconnect_s
            ) as pool,
            MetricsWriter(self.layout.run_dir, config.train.metrics) as metrics,
        ):
            self._discard_later(pool)
            waited_from_s = time.perf_counter()
            for claimed in self._batches(pool):
                waited_s = time.perf_counter() - waited_from_s - self._claimed_s
                figures = self._learn(pool, claimed)
                waited_from_s = time.perf_counter()
                metrics.write(self.position.step, figures | {"waited_s": waited_s, "claimed_s": self._claimed_s})
                self._mark_saved(pool)
                if self._is_due():
                    self._save(pool)
            self._end_publishing()
            self.ranks.max_int(_END)
            self._save(pool)
            self.checkpoints.wait()
            self._mark_saved(pool)

    def _follow(self) -> None:
        """The loop of a rank other than 0: the same collectives in the same order."""
        if self.ranks.max_int(0):
            self._publish()
        while (signal := self.ranks.max_int(0)) != _END:
            if signal != _STEP:
                continue
            order: Order = scatter(None, self.ranks)
            # After an empty step rank 0 ends the run.
            if not self._step([decode_tree(tree) for tree in order.trees], order.lr).is_empty:
                self._publish()
                if self._is_due():
                    self.checkpoints.begin(self.engine, self.position)
        self.checkpoints.save(self.engine, self.position)

    def _is_due(self) -> bool:
        return self.position.step % self.config.train.checkpoint.every_steps == 0

    def _publish(self) -> None:
        """Publish the weights as the version of the current step; rank 0 only begins to, until `_end_publishing`. All
        ranks call this together."""
        self._end_publishing()
        with self._timed_publishing():
            share, step = None, self.position.step
            if isinstance(self.ranks, ProcessRanks):
                share = Share(self.ranks.rank, public_share(self.engine.model, self.ranks), self._exchange)
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

            def publish() -> None:
                began_s = time.perf_counter()
                with torch.cuda.stream(self._stream):
                    self.weights.publish(self.engine.model, step, share, self._send)
                _log.info("published version %d in %.2f s", step, time.perf_counter() - began_s)

            if self.ranks.rank:
                publish()  # it has nothing else to do before rank 0's next signal
            else:
                self._publishing = Writing(publish)

    def _end_publishing(self) -> None:
        """Wait until the last version is complete; raise the error that prevented it."""
        if self._publishing is not None:
            with self._timed_publishing():
                self._publishing.join()
            publishing, self._publishing = self._publishing, None
            publishing.end()

    def _meet_others(self) -> None:
        """Called before each collective of rank 0. The other ranks reach it only after the last version is complete; if
        rank 0 failed to write its part, they never do, so the error is raised here."""
        if self.ranks.num_ranks > 1:
            self._end_publishing()

    @contextmanager
    def _timed_publishing(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._published_s += time.perf_counter() - began_s

    def _discard_later(self, pool: Pool) -> None:
        """Discard everything that came after the checkpoint."""
        # First, so that a reader that sees fewer versions than before finds the reason in the lineage.
        begin_branch(self.layout.lineage, self.weights.branch, self.position.step)
        delete_ratios(self.layout.ratios, self.position.step)
        self.weights.discard_after(self.position.step)
        restored = pool.restore(self.version)
        if restored.num_returned:
            _log.info(
                "step %d has not trained on %d units; the pool returns them to the window",
                self.position.step,
                restored.num_returned,
            )
        newest = self.weights.newest()
        # A remaining version of this step was published by the process that wrote the checkpoint, from these weights.
        if self.ranks.max_int(int(newest is None or newest[0].step != self.position.step)):
            self._publish()

    def _batches(self, pool: Pool) -> Iterator[Claim]:
        """Yield the batch of each remaining step as soon as the window holds it."""
        config, remaining = self.config.curriculum, range(self.position.step, self.config.num_steps)
        max_tokens, per_group = self.config.batch_tokens, self.config.units_per_group
        if max_tokens is None:
            for quotas in itertools.islice(batch_quotas(config, per_group), remaining.start, remaining.stop):
                yield self._wait_for(partial(pool.claim, sum(quotas.values()), self.version, quotas))
            return
        sized = SizedQuotas(config, pool.batch_sizes(self.version.lineage), per_group)
        for _ in remaining:
            within = partial(pool.claim_within, max_tokens, sized.max_units, self.version, sized.quotas)
            claimed = self._wait_for(within)
            sized.note(len(claimed.units))
            yield claimed

    def _wait_for(self, claim: Callable[[], Claim | None]) -> Claim:
        began_s = heard_s = asked_s = time.monotonic()
        while (claimed := claim()) is None:
            # Each poll reads the whole window; a late one delays the step by at most a tenth of the wait.
            time.sleep(min(MAX_POLL_S, max(POLL_S, 0.1 * (time.monotonic() - began_s))))
            if self._publishing is not None and not self._publishing.is_alive():
                self._end_publishing()
            if time.monotonic() > heard_s + IDLE_S:
                self._meet_others()
                self.ranks.max_int(_IDLE)
                heard_s = time.monotonic()
            asked_s = time.monotonic()
        self._claimed_s = time.monotonic() - asked_s
        return claimed

    def _learn(self, pool: Pool, claimed: Claim) -> dict[str, float]:
        started_s, self._published_s = time.perf_counter(), 0.0
        units = pool.fetch(claimed)
        trees = make_trees(units, self.config.reward.advantage, self.engine.model.config.vocab_size)
        lr = lr_at(self._phase, self.position.step)
        step = self._step(self._share(trees, lr), lr)
        for problem in step.problems:
            _log.warning("not trained: %s", problem.reason)
        if step.is_empty:
            raise TrainingError(describe_untrained(units, step.problems, self.version))
        figures = step.figures | {"lr": lr, "trained_s": time.perf_counter() - started_s - self._published_s}
        pool.commit(claimed, self.version)
        self._publish()
        figures["published_s"] = self._published_s
        write_ratios(self.layout.ratios, self.position.step, step.log_ratios, self.config.keep_ratios)
        rewards = [episode.reward for unit in units for episode in unit.episodes if episode.reward is not None]
        figures["reward"] = sum(reward.total for reward in rewards) / max(1, len(rewards))
        figures["perf"] = sum(reward.perf for reward in rewards) / max(1, len(rewards))
        figures |= _by_domain(units)
        figures["num_units"] = len(units)
        figures["num_flat"] = num_flat = sum(_is_flat(unit) for unit in units)
        if num_flat and self.config.pool.window.no_signal == "skip":
            message = "%d of %d units of step %d have no training signal: "
            message += "pool.window.max_skips tasks before each had equal rewards too"
            _log.warning(message, num_flat, len(units), self.position.step)
        figures["lag"] = max((unit.lag for unit in units if unit.lag is not None), default=0)
        # Never below 0: the pool dates tokens of a lost version to the step where its branch left the lineage.
        oldest = [unit.oldest_step for unit in units if unit.oldest_step is not None]
        figures["staleness"] = self.position.step - 1 - min(oldest, default=self.position.step - 1)
        return figures

    def _share(self, trees: Sequence[TokenTree], lr: float) -> Sequence[TokenTree]:
        """Send the other ranks their trees of a step, so that all need about the same time; returns this rank's. The
        ranks of a context group share theirs."""
        if self.ranks.num_ranks == 1:
            return trees
        num_sharing = self._num_sharing
        dealt = deal([self._cost.tree_flops(tree) for tree in trees], self.ranks.num_ranks // num_sharing)
        self._meet_others()
        self.ranks.max_int(_STEP)
        orders = [Order([encode_tree(trees[index]) for index in indices], lr) for indices in dealt]
        scatter([order for order in orders for _ in range(num_sharing)], self.ranks)
        return [trees[index] for index in dealt[0]]

    def _step(self, trees: Sequence[TokenTree], lr: float) -> Step:
        """Take one step. All ranks call this together, each with its trees."""
        with self._busy:
            report = self.engine.step(trees, lr=lr, version=self.position.step)
            # Host sync.
            figures = report.read()
        self._busy.flush()
        log_ratios = {sample.name: logprobs - sample.logprobs for sample, logprobs in report.logprobs()}
        parts = gather((report.problems, log_ratios), self.ranks)
        if not report.is_empty:
            num_tokens = self.position.num_tokens + int(figures["tokens_computed"])
            self.position = replace(self.position, step=self.position.step + 1, num_tokens=num_tokens)
        problems = [problem for part, _ in parts[:: self._num_sharing] for problem in part]
        return Step(report.is_empty, figures, problems, dict(pair for _, part in parts for pair in part.items()))

    def _save(self, pool: Pool) -> None:
        # In this order: after a power loss the pool may have steps that the checkpoint lacks, never the reverse.
        pool.flush()
        self._meet_others()
        self.checkpoints.begin(self.engine, self.position)
        self._saved = self.version if self.config.train.checkpoint.keep else None

    def _mark_saved(self, pool: Pool) -> None:
        """Mark a complete checkpoint in the pool."""
        if self._saved is not None and not self.checkpoints.is_writing:
            self.checkpoints.wait()
            pool.mark_durable(self._saved)
            self._saved = None


def describe_untrained(units: Sequence[StoredUnit], problems: Sequence[Problem], version: PolicyVersion) -> str:
    """Explain why a batch has nothing to train on: the number of refused samples by reason, with an example of each."""
    reasons = [problem.reason.removeprefix(f"Sample {problem.name}: ") for problem in problems]
    kinds = {reason.partition(", received")[0]: reason for reason in reversed(reasons)}
    counts = Counter(reason.partition(", received")[0] for reason in reasons)
    lines = [f"{number} × {kinds[kind]}" for kind, number in counts.most_common()]
    num_episodes = sum(len(unit.episodes) for unit in units)
    num_empty = sum(not episode.calls for unit in units for episode in unit.episodes)
    if num_empty:
        lines.append(f"{num_empty} of {num_episodes} episodes recorded no completion call")
    why = "; ".join(lines) or "every recorded completion is empty"
    return (
        f"step {version.step + 1}: nothing in the batch of {num_episodes} episodes can be trained: {why}. Check "
        "the agents' requests, `agent.sampling`, `agent.budget` and the limits under `policy`, then start the run again"
    )


def _is_flat(unit: StoredUnit) -> bool:
    """Whether all rewards of a group are equal, so that its advantages are zero."""
    totals = {episode.reward.total for episode in unit.episodes if episode.reward is not None}
    return len(unit.episodes) > 1 and len(totals) == 1


def _by_domain(units: Sequence[StoredUnit]) -> dict[str, float]:
    rewards: dict[str, list[Reward]] = {}
    for unit in units:
        judged = [episode.reward for episode in unit.episodes if episode.reward is not None]
        rewards.setdefault(unit.task.domain, []).extend(judged)
    figures = {}
    for domain, judged in rewards.items():
        figures[f"reward/{domain}"] = sum(reward.total for reward in judged) / max(1, len(judged))
        figures[f"perf/{domain}"] = sum(reward.perf for reward in judged) / max(1, len(judged))
    return figures


def batch_quotas(config: CurriculumConfig, units_per_group: int = 1) -> Iterator[dict[str, int]]:
    """Yield the quotas of each step, without end."""
    for stage in config.stages:
        mixture = Mixture(stage.ratios(), config.batch_groups)
        while mixture.num_batches != stage.num_batches:
            counts = mixture.next()
            yield {make_label(stage.name, domain): num * units_per_group for domain, num in counts.items()}


class SizedQuotas:
    """Quotas of the next batch at any size. A stage has as many units as its `num_batches` batches of `batch_groups`
    groups."""

    def __init__(self, config: CurriculumConfig, sizes: Iterable[int] = (), units_per_group: int = 1) -> None:
        """`sizes`: number of units of each batch so far."""
        self._config, self._units_per_group = config, units_per_group
        self._remaining: dict[str, int] | None = None
        """Units of the stage not yet claimed, by label; None in the last stage, which has no end."""
        self._enter(0)
        for num_units in sizes:
            self.note(num_units)

    @property
    def max_units(self) -> int:
        """Units of the largest batch: `batch_groups` groups, or the rest of the stage if smaller."""
        full = self._config.batch_groups * self._units_per_group
        return full if self._remaining is None else min(full, sum(self._remaining.values()))

    def quotas(self, num_units: int) -> dict[str, int]:
        exact = {label: ratio * num_units for label, ratio in self._ratios.items()}
        limits = dict.fromkeys(exact, num_units) if self._remaining is None else self._remaining
        counts = {label: min(floor(num), limits[label]) for label, num in exact.items()}
        rounded = [label for label, num in exact.items() if counts[label] < num and counts[label] < limits[label]]
        rounded.sort(key=lambda label: counts[label] - exact[label] - self._deficit[label])
        for label in rounded[: num_units - sum(counts.values())]:
            counts[label] += 1
        while sum(counts.values()) < num_units:
            # Near its end the stage has too few units left of some domain.
            some = [label for label in counts if counts[label] < limits[label]]
            counts[max(some, key=lambda label: exact[label] + self._deficit[label] - counts[label])] += 1
        return counts

    def note(self, num_units: int) -> None:
        """Record that a batch of `num_units` units was claimed."""
        counts = self.quotas(num_units)
        for label, ratio in self._ratios.items():
            self._deficit[label] += ratio * num_units - counts[label]
        if self._remaining is not None:
            self._remaining = {label: num - counts[label] for label, num in self._remaining.items()}
            if not any(self._remaining.values()):
                self._enter(self._stage + 1)

    def _enter(self, index: int) -> None:
        self._stage: int = index
        stage = self._config.stages[index]
        self._ratios = {make_label(stage.name, domain): ratio for domain, ratio in stage.ratios().items()}
        self._deficit: dict[str, Fraction] = dict.fromkeys(self._ratios, Fraction(0))
        """Units that each domain lacks to its ratio in this stage; negative if it had too many."""
        self._remaining = self._drawn(stage)

    def _drawn(self, stage: StageConfig) -> dict[str, int] | None:
        if stage.num_batches is None:
            return None
        mixture, drawn = Mixture(stage.ratios(), self._config.batch_groups), Counter[str]()
        for _ in range(stage.num_batches):
            for domain, num in mixture.next().items():
                drawn[make_label(stage.name, domain)] += num * self._units_per_group
        return dict(drawn)
