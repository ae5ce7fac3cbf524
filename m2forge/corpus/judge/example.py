"""Examples for the quality classifier: from positive and negative sources, or from the corpus itself by rule scores."""

import logging
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from m2forge.corpus.config import ClassifierConfig, CorpusConfig, Source
from m2forge.corpus.judge.classifier import Classifier, train_classifier
from m2forge.corpus.judge.quality import PASSED, broken_rules, rule_scores
from m2forge.corpus.judge.scan import Scanner, batches
from m2forge.corpus.read.document import Document, Problems
from m2forge.corpus.read.file import read_span
from m2forge.corpus.read.source import Part, list_parts

_log = logging.getLogger(__name__)

MAX_EXAMPLE_BYTES = 20_000
"""Only the beginning of an example is used, so that all examples fit in memory."""
_CLASS_SHARE = 0.3
"""Share of the documents ranked by rules that is used as positive, and as negative, examples; the middle is unclear."""


def make_classifier(config: CorpusConfig, settings: ClassifierConfig, parts: Sequence[Part]) -> Classifier:
    if settings.labels == "sources":
        half = settings.num_documents // 2
        return train_classifier(*(_read(sources, config, half) for sources in (settings.positive, settings.negative)))
    return _by_rules(config, parts, settings.num_documents)


def _read(sources: Sequence[Source], config: CorpusConfig, count: int) -> list[bytes]:
    """The first documents of each source, equally many from each."""
    texts: list[bytes] = []
    problems = Problems(config.strict)
    for source in sources:
        documents = (
            document
            for part in list_parts([source], config.part_bytes)
            for span in part.spans
            for document in read_span(span, source, problems)
        )
        texts += [document.text[:MAX_EXAMPLE_BYTES] for document in islice(documents, -(-count // len(sources)))]
    for locations in problems.examples.values():
        _log.warning("left out of the classifier's examples: %s", locations[0])
    return texts


def _by_rules(config: CorpusConfig, parts: Sequence[Part], count: int) -> Classifier:
    scanner = Scanner(config, None)
    texts: list[bytes] = []
    scores: list[float] = []
    for fixed, batch in _batches(config, parts, count):
        measured = scanner.measure([document.text for document in batch])
        is_code = scanner.domains_of(batch, fixed, measured.features) == "code"
        passed = broken_rules(measured.features, is_code, config.quality) == PASSED
        # A document that breaks a rule ranks below all that break none.
        scores += (rule_scores(measured.features, is_code) + passed).tolist()
        texts += [document.text[:MAX_EXAMPLE_BYTES] for document in batch]
    order = np.argsort(scores, kind="stable").tolist()
    size = max(1, int(len(order) * _CLASS_SHARE))
    return train_classifier([texts[index] for index in order[-size:]], [texts[index] for index in order[:size]])


def _batches(config: CorpusConfig, parts: Sequence[Part], count: int) -> Iterator[tuple[str | None, list[Document]]]:
    """The first documents of parts spaced evenly over the corpus."""
    chosen = [parts[index] for index in sorted({*np.linspace(0, len(parts) - 1, 64).astype(int).tolist()})]
    share = -(-count // len(chosen))
    for part in chosen:
        source = config.sources[part.source]
        documents = (document for span in part.spans for document in read_span(span, source, Problems(config.strict)))
        for batch in batches(islice(documents, share)):
            yield source.domain, batch
