"""The pre-training stage: a built corpus and a configuration in, a base model out.

Phases run one after another on the same model: a constant learning rate, then its decay while the context grows, then
more MTP modules, trained first with the main model frozen and jointly at the end. Each phase reads the documents that
earlier phases left unread, whatever their contexts and mixtures. This file wires corpus, model and train loop.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from m2forge.corpus.manifest import TOKENIZER_NAME, Manifest, Split, read_manifest
from m2forge.corpus.reader import CorpusReader, ReaderState
from m2forge.errors import ConfigError
from m2forge.model.convert import find_companions
from m2forge.model.hub import pinned
from m2forge.model.start import Start, start_from
from m2forge.observe.tracker import require_writers
from m2forge.pretrain.config import PretrainConfig, PretrainEvalConfig
from m2forge.pretrain.model_config import network_config, start_folder
from m2forge.records import JsonValue, Pack
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train.evaluation import Evaluation
from m2forge.train.loop import TrainLoop
from m2forge.train.machine import machine_ranks, refuse_unfit_phases
from m2forge.train.run_dir import CONFIG_FILE, open_run

_log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
EVAL_SEED = 0
"""Seed of the order in which evaluations read, so that runs of different seeds evaluate the same tokens."""
_PHASE = "phase"
"""Key in a source's state: index of the phase that read last."""
_PROBE = "def area(width):\n    return width * 1234567890  # Äpfel, 東京 🙂\n\nIt isn't  late; nobody slept."
"""A text that mixes scripts, code and numbers: different tokenizers encode it differently."""


def run_pretrain(config: PretrainConfig, runs: Path) -> Path:
    """Start or resume the run of `config`; returns the finished model's folder."""
    require_writers(config.train.metrics)
    run_dir = runs / config.name
    config = pinned(config, run_dir / CONFIG_FILE)
    corpus = Path(config.corpus)
    network = network_config(config)
    end_id = read_manifest(corpus).end_of_text_id
    folder = start_folder(config)
    if folder is not None:
        _refuse_other_tokenizer(folder, corpus)
    _check_domains(config)
    evaluation = None if config.eval is None else _open_evaluation(config, config.eval)

    def find_start() -> Start:
        if folder is not None:
            return start_from(folder)
        return Start(network, seed=config.seed, token_ids={} if end_id is None else {"eos_token_id": end_id})

    def open_source(index: int, state: Mapping[str, JsonValue] | None) -> CorpusSource:
        if index and state is None:
            _log.warning(
                "phase %s reads the corpus from its start: an earlier version wrote the checkpoint, without the "
                "documents that the phases before have read",
                config.phases[index].name,
            )
        return CorpusSource(config, index, state)

    companions = find_companions(corpus / TOKENIZER_NAME)
    with machine_ranks(config.train.machine, run_dir, config) as ranks:
        refuse_unfit_phases(config.train, network, config.phases, ranks)
        loop = TrainLoop(run_dir, config.train, config.phases, find_start, open_source, companions, ranks, evaluation)
        open_run(run_dir, config, loop.position.last_begun)
        return loop.run()


class CorpusSource:
    """The packs of one phase."""

    def __init__(self, config: PretrainConfig, index: int, state: Mapping[str, JsonValue] | None) -> None:
        """`state`: state of this phase's source, or of an earlier phase's source."""
        phase = config.phases[index]
        self._index = index
        is_same_phase, reader_state = False, None
        if state is not None:
            is_same_phase = state.get(_PHASE) == index
            reader_state = ReaderState.from_json({key: value for key, value in state.items() if key != _PHASE})
        self._reader = CorpusReader(
            Path(config.corpus),
            context=phase.context,
            pack_tokens=phase.pack_tokens,
            seed=config.seed,
            mixture=phase.mixture,
            long_share=phase.long_share,
            state=reader_state if is_same_phase else None,
            after=None if is_same_phase else reader_state,
        )
        self.domains = self._reader.domains

    def next_pack(self) -> Pack:
        return self._reader.next_pack()

    def state(self) -> Mapping[str, JsonValue]:
        return {_PHASE: self._index, **self._reader.state().to_json()}


class HeldOutDocuments:
    """The packs of an evaluation."""

    def __init__(self, config: PretrainConfig, eval_config: PretrainEvalConfig, context: int, pack_tokens: int) -> None:
        self._corpus = Path(eval_config.corpus or config.corpus)
        self._split: Split = "held_out" if eval_config.corpus is None else "train"
        self._num_tokens, self._context, self._pack_tokens = eval_config.num_tokens, context, pack_tokens
        self.domains = self._reader().domains

    def packs(self) -> Iterator[Pack]:
        reader = self._reader()
        num_tokens = min(self._num_tokens, reader.num_tokens)
        return reader.packs(num_tokens, num_tokens)

    def _reader(self) -> CorpusReader:
        return CorpusReader(
            self._corpus, context=self._context, pack_tokens=self._pack_tokens, seed=EVAL_SEED, split=self._split
        )


def _open_evaluation(config: PretrainConfig, eval_config: PretrainEvalConfig) -> Evaluation:
    if eval_config.corpus is not None:
        _refuse_unsuitable(config.corpus, eval_config.corpus)
    context = eval_config.context or min(phase.context for phase in config.phases)
    # No pack is larger than those of the smallest phase, so that it fits into memory wherever training does.
    pack_tokens = max(context, min(phase.pack_tokens for phase in config.phases))
    return Evaluation(eval_config, HeldOutDocuments(config, eval_config, context, pack_tokens), pack_tokens)


def _refuse_unsuitable(trained: str, evaluated: str) -> None:
    """Raise if the evaluated corpus has other token ids than the trained one, or shares data with it."""
    ours, theirs = read_manifest(Path(trained)), read_manifest(Path(evaluated))
    if (ours.tokenizer, ours.vocab_size) != (theirs.tokenizer, theirs.vocab_size):
        raise ConfigError(
            f"eval.corpus {evaluated!r} was built with another tokenizer than {trained!r}; build it with "
            f"tokenizer.path = {str(Path(trained) / TOKENIZER_NAME)!r}"
        )
    if shared := _trained_shards(ours) & _trained_shards(theirs):
        raise ConfigError(
            f"eval.corpus {evaluated!r} shares {len(shared)} shards with the training split of {trained!r}; give a "
            "corpus of other documents, or leave eval.corpus out to evaluate the held-out split"
        )


def _trained_shards(manifest: Manifest) -> set[str]:
    return {shard.sha256 for token_set in manifest.sets if token_set.split == "train" for shard in token_set.shards}


def _refuse_other_tokenizer(start: Path, corpus: Path) -> None:
    """Raise if the tokenizers differ: the same ids would mean other tokens, and training would silently start over."""
    folders = (start, corpus / TOKENIZER_NAME)
    if not all((folder / TOKENIZER_FILE).is_file() for folder in folders):
        return
    theirs, ours = (load_tokenizer(folder).encode(_PROBE) for folder in folders)
    if theirs != ours:
        raise ConfigError(
            f"the tokenizer of {start} and the one that made the corpus {corpus} encode the same text differently; "
            f"build the corpus with tokenizer.path = {str(start)!r}"
        )


def _check_domains(config: PretrainConfig) -> None:
    """Open every phase's reader once, so that an invalid mixture is refused before the first step."""
    for index in range(len(config.phases)):
        CorpusSource(config, index, None)
