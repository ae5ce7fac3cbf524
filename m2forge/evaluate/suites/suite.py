"""Synthetic suites: a configuration in, cells out.

Each sample has its own random generator, seeded by the run's seed, task, size, depth and index: adding a length to a
suite does not change the samples of the others.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from m2forge.errors import ConfigError
from m2forge.evaluate.config import (
    AlphabetConfig,
    ManyShotConfig,
    MultiHopConfig,
    MultiKeyConfig,
    MultiQueryConfig,
    NeedleConfig,
    Suite,
    WordCountConfig,
)
from m2forge.evaluate.predictor import Predictor
from m2forge.evaluate.prompts.sample import Sample, Task
from m2forge.evaluate.prompts.text_wording import TextWording, noise_filler, text_filler
from m2forge.evaluate.prompts.wording import ShotTask, TokenWording, Wording, make_alphabet
from m2forge.evaluate.report.report import Cell, make_cell, readable_text
from m2forge.evaluate.score import Outcome, score_forced, score_free
from m2forge.evaluate.suites.haystack import Filler, HopTask, NeedleTask, RandomFiller, WindowFiller
from m2forge.evaluate.suites.word_count import WordCountTask
from m2forge.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Material:
    """The inputs that tasks are built from."""

    vocab_size: int
    alphabet: AlphabetConfig
    tokenizer: Tokenizer | None = None
    begin_ids: tuple[int, ...] = ()


def make_task(suite: Suite, material: Material) -> Task:
    wording = _wording(suite, material)
    if isinstance(suite, ManyShotConfig):
        return ShotTask(wording, suite.num_inputs, suite.num_labels)
    if isinstance(suite, WordCountConfig):
        if isinstance(wording, TokenWording):
            num_words = len(wording.alphabet.symbols) + len(wording.alphabet.filler)
            return WordCountTask(wording, suite.num_common, num_words)
        return WordCountTask(wording, suite.num_common)
    filler = _filler(suite, wording, material)
    if isinstance(suite, MultiHopConfig):
        return HopTask(wording, filler, suite.num_chains, suite.num_hops)
    if isinstance(suite, MultiQueryConfig):
        return NeedleTask(wording, filler, suite.num_needles, suite.num_queries)
    return NeedleTask(wording, filler, suite.num_needles if isinstance(suite, MultiKeyConfig) else 1)


def sample_rng(seed: int, task: str, size: int, depth: float | None, index: int) -> np.random.Generator:
    depth_key = 0 if depth is None else 1 + round(depth * 1_000_000)
    return np.random.default_rng([seed, zlib.crc32(task.encode()), size, depth_key, index])


def draw_samples(suite: Suite, task: Task, size: int, depth: float | None, seed: int) -> list[Sample]:
    """The samples of one cell."""
    rngs = (sample_rng(seed, suite.task, size, depth, index) for index in range(suite.num_samples))
    return [task.sample(rng, size, depth) for rng in rngs]


def measure_suite(
    name: str,
    suite: Suite,
    task: Task,
    predictor: Predictor,
    *,
    seed: int,
    max_pack_tokens: int,
    tokenizer: Tokenizer | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Cell]:
    """One cell per size and depth. `advance` is called with the number of samples finished."""
    cells = []
    for size in suite.sizes:
        samples = [draw_samples(suite, task, size, depth, seed) for depth in suite.positions]
        flat = [sample for cell in samples for sample in cell]
        outcomes = _score(suite, predictor, flat, max_pack_tokens, tokenizer)
        for index, depth in enumerate(suite.positions):
            mine = outcomes[index * suite.num_samples : (index + 1) * suite.num_samples]
            shots = isinstance(suite, ManyShotConfig)
            cells.append(
                make_cell(
                    name,
                    suite.task,
                    [outcome.recall for outcome in mine],
                    [outcome.is_exact for outcome in mine],
                    length=None if shots else size,
                    num_shots=size if shots else None,
                    depth=depth,
                    beyond_context=max(len(outcome.sample.ids) for outcome in mine) > predictor.max_context,
                )
            )
        advance(len(flat))
    return cells


def _score(
    suite: Suite, predictor: Predictor, samples: list[Sample], max_pack_tokens: int, tokenizer: Tokenizer | None
) -> list[Outcome]:
    if suite.decoding == "forced":
        return score_forced(predictor, samples, max_pack_tokens=max_pack_tokens)

    def decode(ids: list[int]) -> str:
        assert tokenizer is not None
        return readable_text(tokenizer, ids)

    return score_free(
        predictor, samples, decode=decode, max_new_tokens=suite.max_new_tokens, max_pack_tokens=max_pack_tokens
    )


def _wording(suite: Suite, material: Material) -> Wording:
    if suite.material == "text":
        return TextWording(_require_tokenizer(suite, material), material.begin_ids)
    config = material.alphabet
    alphabet = make_alphabet(
        material.vocab_size,
        first_id=config.first_id,
        num_symbols=config.num_symbols,
        marker_ids=config.marker_ids,
    )
    return TokenWording(alphabet, config.key_tokens, config.value_tokens)


def _filler(
    suite: NeedleConfig | MultiKeyConfig | MultiQueryConfig | MultiHopConfig, wording: Wording, material: Material
) -> Filler:
    if suite.haystack is None:
        if isinstance(wording, TokenWording):
            return RandomFiller(wording.alphabet.filler)
        return noise_filler(_require_tokenizer(suite, material))
    tokenizer = _require_tokenizer(suite, material)
    try:
        text = suite.haystack.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"haystack {suite.haystack}: cannot be read ({error.strerror}); give a text file") from error
    if not isinstance(wording, TokenWording):
        return text_filler(tokenizer, text)
    ids = np.array(tokenizer.encode(text), np.int32)
    ids = ids[~np.isin(ids, wording.alphabet.markers)]
    if not len(ids):
        raise ConfigError(f"haystack {suite.haystack}: holds no text; give a text file")
    return WindowFiller(ids)


def _require_tokenizer(suite: Suite, material: Material) -> Tokenizer:
    if material.tokenizer is None:
        raise ConfigError(f"suite {suite.name or suite.task}: text needs a tokenizer; give `tokenizer`")
    return material.tokenizer
