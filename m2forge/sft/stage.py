"""The SFT stage: a model folder and trajectories in, a model with interleaved thinking out.

Trajectories are encoded once into the run directory, packed whole, and trained for a number of epochs by the same loop
as pre-training. This file wires data, model and train loop.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from m2forge.errors import NotFoundError
from m2forge.model.checkpoint import load_model
from m2forge.model.exchange import find_companions
from m2forge.model.transformer import Transformer
from m2forge.records import JsonValue, Pack
from m2forge.sft.config import SFTConfig
from m2forge.sft.dataset import prepare
from m2forge.sft.reader import SFTReader, SFTReaderState
from m2forge.sft.store import Store
from m2forge.text.format import make_format
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train.checkpoint import begun_phase
from m2forge.train.config import PhaseConfig
from m2forge.train.loop import CHECKPOINT_FOLDER, TrainLoop
from m2forge.train.machine import machine_ranks
from m2forge.train.run_dir import open_run

DATA_FOLDER = "data"


def run_sft(config: SFTConfig, runs: Path) -> Path:
    """Start or resume the run of `config`; returns the finished model's folder."""
    start = Path(config.model)
    if not start.is_dir():
        raise NotFoundError(f"model {config.model!r} is no folder; give one that `m2forge pretrain` or `import` wrote")
    chat_format = make_format(config.chat_format, load_tokenizer(start), drop_thinking=config.drop_thinking)
    run_dir = runs / config.name
    begun = begun_phase(run_dir / CHECKPOINT_FOLDER)
    if begun is not None:
        # A started run refuses a different configuration before its data is touched.
        open_run(run_dir, config, begun)

    def build_model(device: torch.device, dtype: torch.dtype) -> Transformer:
        model = load_model(start, device=device, dtype=dtype)
        model.token_ids = {**model.token_ids, "eos_token_id": chat_format.stop_ids[0]}
        return model

    with machine_ranks(config.train.machine) as ranks:
        # Rank 0 encodes; the other ranks open the result.
        if ranks.rank > 0:
            ranks.max_int(0)
        store = prepare(config.data, chat_format, run_dir / DATA_FOLDER, config.seed)
        if ranks.rank == 0:
            ranks.max_int(0)

        def open_source(index: int, state: Mapping[str, JsonValue] | None) -> TrajectorySource:
            return TrajectorySource(config, store, state)

        phases = [_phase(config, store)]
        loop = TrainLoop(run_dir, config.train, phases, build_model, open_source, find_companions(start), ranks)
        open_run(run_dir, config, loop.position.last_begun)
        return loop.run()


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


def _phase(config: SFTConfig, store: Store) -> PhaseConfig:
    """The whole run as one phase: its steps are the packs of all epochs."""
    reader = SFTReader(store, pack_tokens=config.pack_tokens, seed=config.seed)
    num_packs = sum(reader.num_packs(epoch) for epoch in range(config.num_epochs))
    # An incomplete last step takes packs from the following epoch, so every trajectory is seen as often as configured.
    steps = -(-num_packs // config.packs_per_step)
    return PhaseConfig(
        name="sft",
        steps=steps,
        context=config.data.context,
        pack_tokens=config.pack_tokens,
        packs_per_step=config.packs_per_step,
        rate=config.rate,
        warmup_steps=min(config.warmup_steps, steps),
        mtp_weight=config.mtp_weight,
    )
