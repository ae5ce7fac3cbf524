"""Rule-based quality: features in; for each document the first rule it breaks and a score in 0 … 1 out.

The rules are those of Gopher, C4 and FineWeb that can be computed from counts; code has its own. The score is the share
of soft rules that a document satisfies: milder criteria that drop nothing by themselves.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from m2forge.corpus.config import QualityConfig, Rule
from m2forge.corpus.judge.feature import Feature, FeatureArray

BoolArray = npt.NDArray[np.bool_]
PASSED = -1
"""Instead of a rule's index: no rule is broken."""


class _Ratios:
    """Ratios of features, 0 if the denominator is 0."""

    def __init__(self, features: FeatureArray) -> None:
        self._features = features

    def __call__(self, part: Feature, whole: Feature) -> FeatureArray:
        return self._features[:, part] / np.maximum(self._features[:, whole], 1.0)


def broken_rules(features: FeatureArray, is_code: BoolArray, config: QualityConfig) -> npt.NDArray[np.int8]:
    """For each document the index in `Rule` of the first rule it breaks, or PASSED."""
    ratio = _Ratios(features)
    prose, code = _prose_limits(features, ratio, config), _code_limits(features, ratio, config)
    broken = np.full(len(features), PASSED, np.int8)
    for index, rule in reversed(list(enumerate(Rule))):
        if rule in config.rules:
            never = np.zeros(len(features), bool)
            broken[np.where(is_code, code.get(rule, never), prose.get(rule, never))] = index
    return broken


def rule_scores(features: FeatureArray, is_code: BoolArray) -> FeatureArray:
    ratio = _Ratios(features)
    mean_word = ratio(Feature.WORD_BYTES, Feature.WORDS)
    repeated = ratio(Feature.REPEATED_SHINGLES, Feature.SHINGLES)
    prose = (
        features[:, Feature.WORDS] >= 50,
        (mean_word >= 3) & (mean_word <= 10),
        ratio(Feature.LETTER_WORDS, Feature.WORDS) >= 0.8,
        ratio(Feature.STOP, Feature.WORDS) >= 0.1,
        ratio(Feature.STOPPED_LINES, Feature.LINES) >= 0.12,
        ratio(Feature.BULLET_LINES, Feature.LINES) <= 0.5,
        ratio(Feature.REPEATED_LINES, Feature.LINES) <= 0.1,
        repeated <= 0.1,
        ratio(Feature.BOILERPLATE, Feature.WORDS) <= 0.005,
        ratio(Feature.SYMBOLS, Feature.NUM_BYTES) <= 0.05,
    )
    letters = ratio(Feature.LETTERS, Feature.NUM_BYTES)
    line = ratio(Feature.LINE_BYTES, Feature.LINES)
    code = (
        features[:, Feature.WORDS] >= 30,
        letters >= 0.4,
        (line >= 8) & (line <= 100),
        repeated <= 0.3,
        ratio(Feature.LONG_LINE_BYTES, Feature.NUM_BYTES) <= 0.01,
        ratio(Feature.DIGITS, Feature.NUM_BYTES) <= 0.2,
    )
    return np.where(is_code, _mean(code), _mean(prose))


def _prose_limits(features: FeatureArray, ratio: _Ratios, config: QualityConfig) -> dict[Rule, BoolArray]:
    mean_word = ratio(Feature.WORD_BYTES, Feature.WORDS)
    return {
        Rule.TOO_SHORT: features[:, Feature.WORDS] < config.min_words,
        # In bytes: a CJK character takes three, and counts as a word.
        Rule.WORD_LENGTH: (mean_word < 2) | (mean_word > 14),
        Rule.SYMBOLS: ratio(Feature.HASHES, Feature.WORDS) > 0.1,
        Rule.ALPHABETIC: ratio(Feature.LETTER_WORDS, Feature.WORDS) < 0.7,
        Rule.BULLETS: ratio(Feature.BULLET_LINES, Feature.LINES) > 0.9,
        Rule.ELLIPSES: ratio(Feature.ELLIPSIS_LINES, Feature.LINES) > 0.3,
        Rule.REPEATED_LINES: ratio(Feature.REPEATED_LINES, Feature.LINES) > 0.3,
        Rule.REPEATED_WORDS: ratio(Feature.REPEATED_SHINGLES, Feature.SHINGLES) > 0.3,
        Rule.BOILERPLATE: ratio(Feature.BOILERPLATE, Feature.WORDS) > 0.03,
        Rule.BLOB: ratio(Feature.LONG_WORD_BYTES, Feature.NUM_BYTES) > 0.2,
    }


def _code_limits(features: FeatureArray, ratio: _Ratios, config: QualityConfig) -> dict[Rule, BoolArray]:
    blob = np.maximum(
        ratio(Feature.LONG_WORD_BYTES, Feature.NUM_BYTES), ratio(Feature.LONG_LINE_BYTES, Feature.NUM_BYTES)
    )
    return {
        Rule.TOO_SHORT: features[:, Feature.WORDS] < config.min_words / 4,
        Rule.ALPHABETIC: ratio(Feature.LETTERS, Feature.NUM_BYTES) < 0.25,
        Rule.REPEATED_WORDS: ratio(Feature.REPEATED_SHINGLES, Feature.SHINGLES) > 0.8,
        Rule.BLOB: blob > 0.3,
    }


def _mean(passed: Sequence[BoolArray]) -> FeatureArray:
    total: FeatureArray = np.sum(np.stack(passed), axis=0, dtype=np.float64)
    return total / len(passed)
