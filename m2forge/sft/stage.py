"""The SFT stage: a model folder and trajectories in, a model with interleaved thinking out.

Trajectories are encoded once into the run directory, packed whole, and trained for a number of epochs by the same loop
as pre-training. This file wires data, model and train loop.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from m2forge.model.config_file import read_config
from m2forge.model.convert import find_companions
from m2forge.model.hub import find_folder, pinned
from m2forge.model.start import Start, start_from
from m2forge.observe.tracker import require_writers
from m2forge.records import JsonValue, Pack
from m2forge.sft.config import SFTConfig, SFTEvalConfig
from m2forge.sft.dataset import prepare
from m2forge.sft.split import Selection
from m2forge.sft.trajectory_store import SFTReader, SFTReaderState, Store, read_once
from m2forge.text.format import ChatFormat, make_format
from m2forge.text.rewrite import check_rewrites
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train.config import PhaseConfig
from m2forge.train.evaluation import Evaluation
from m2forge.train.loop import TrainLoop
from m2forge.train.machine import machine_ranks, refuse_unfit_phases
from m2forge.train.position import CHECKPOINT_FOLDER, begun_phase
from m2forge.train.run_dir import CONFIG_FILE, open_run

DATA_FOLDER, EVAL_DATA_FOLDER = "data", "eval_data"

_log = logging.getLogger(__name__)


def run_sft(config: SFTConfig, runs: Path) -> Path:
    """Start or resume the run of `config`; returns the finished model's folder."""
    require_writers(config.train.metrics)
    run_dir = runs / config.name
    config = pinned(config, run_dir / CONFIG_FILE)
    start = find_folder(config.model, config.revision)
    chat_format = make_format(config.chat_format, load_tokenizer(start), drop_thinking=config.drop_thinking)
    cost = "in such a conversation only the answers after the last rewritten one have loss"
    check_rewrites(chat_format, config.prefix_rewrites, key="prefix_rewrites", cost=cost)
    begun = begun_phase(run_dir / CHECKPOINT_FOLDER)
    if begun is not None:
        # A started run refuses a different configuration before its data is touched.
        open_run(run_dir, config, begun)

    stop_ids = chat_format.stop_ids
    eos_id = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)

    def find_start() -> Start:
        found = start_from(start, config.train.lora)
        return replace(found, token_ids={**found.token_ids, "eos_token_id": eos_id})

    with machine_ranks(config.train.machine, run_dir, config) as ranks:
        # The number of steps, which the data has yet to tell, takes no memory.
        refuse_unfit_phases(config.train, read_config(start), [_phase(config, 1)], ranks, config.train.lora)
        # Rank 0 encodes; the other ranks open the result.
        if ranks.rank > 0:
            ranks.max_int(0)
        store, held_out = _prepare(config, chat_format, run_dir)
        if ranks.rank == 0:
            ranks.max_int(0)

        def open_source(index: int, state: Mapping[str, JsonValue] | None) -> TrajectorySource:
            return TrajectorySource(config, store, state)

        evaluation = None
        if config.eval is not None and held_out is not None:
            evaluation = Evaluation(config.eval, HeldOutTrajectories(config, config.eval, held_out), config.pack_tokens)
        phases, companions = [_phase(config, _num_steps(config, store))], find_companions(start)
        loop = TrainLoop(run_dir, config.train, phases, find_start, open_source, companions, ranks, evaluation)
        open_run(run_dir, config, loop.position.last_begun)
        return loop.run()


def _prepare(config: SFTConfig, chat_format: ChatFormat, run_dir: Path) -> tuple[Store, Store | None]:
    """The trajectories to train on, and those held out, if any."""
    dest, held_dest = run_dir / DATA_FOLDER, run_dir / EVAL_DATA_FOLDER
    if config.eval is None:
        return prepare(config.data, chat_format, dest, config.seed), None
    if config.eval.share is not None:
        train, hold = Selection("train", config.eval.share), Selection("held_out", config.eval.share)
        store = prepare(config.data, chat_format, dest, config.seed, train)
        held_out = prepare(config.data, chat_format, held_dest, config.seed, hold)
    else:
        evaluated = config.data.model_copy(update={"sources": config.eval.sources})
        held_out = prepare(evaluated, chat_format, held_dest, config.seed, Selection("held_out", share=1.0))
        hashes = () if held_out.hashes is None else held_out.hashes.tolist()
        train = Selection("train", hashes=frozenset(hashes))
        store = prepare(config.data, chat_format, dest, config.seed, train)
    report = held_out.report
    _log.info("%d trajectories of %d tokens are held out for evaluation", report.num_kept, report.num_tokens)
    return store, held_out


class HeldOutTrajectories:
    """The packs of an evaluation."""

    def __init__(self, config: SFTConfig, eval_config: SFTEvalConfig, store: Store) -> None:
        self._store, self._pack_tokens, self._num_tokens = store, config.pack_tokens, eval_config.num_tokens
        self.domains = _names([source.path for source in eval_config.sources or config.data.sources])

    def packs(self) -> Iterator[Pack]:
        return read_once(self._store, self._pack_tokens, self._num_tokens)


class TrajectorySource:
    """The packs of the run."""

    def __init__(self, config: SFTConfig, store: Store, state: Mapping[str, JsonValue] | None) -> None:
        self._reader = SFTReader(
            store,
            pack_tokens=config.pack_tokens,
            seed=config.seed,
            state=None if state is None else SFTReaderState.from_json(state),
        )
        self.domains = _names([source.path for source in config.data.sources])

    def next_pack(self) -> Pack:
        return self._reader.next_pack()

    def state(self) -> Mapping[str, JsonValue]:
        return self._reader.state().to_json()


def _names(paths: Sequence[str]) -> tuple[str, ...]:
    """Names of the sources in loss metrics: their file names, numbered where two are equal."""
    stems = [Path(path).name.split(".")[0] for path in paths]
    return tuple(f"{stem}-{index}" if stems.count(stem) > 1 else stem for index, stem in enumerate(stems))


def _num_steps(config: SFTConfig, store: Store) -> int:
    """Steps that the packs of all epochs fill. An incomplete last step takes packs from the following epoch, so every
    trajectory is seen as often as configured."""
    reader = SFTReader(store, pack_tokens=config.pack_tokens, seed=config.seed)
    num_packs = sum(reader.num_packs(epoch) for epoch in range(config.num_epochs))
    return -(-num_packs // config.packs_per_step)


def _phase(config: SFTConfig, steps: int) -> PhaseConfig:
    """The whole run as one phase."""
    return PhaseConfig(
        name="sft",
        steps=steps,
        context=config.data.context,
        pack_tokens=config.pack_tokens,
        packs_per_step=config.packs_per_step,
        lr=config.lr,
        warmup_steps=min(config.warmup_steps, steps),
        mtp_weight=config.mtp_weight,
    )
