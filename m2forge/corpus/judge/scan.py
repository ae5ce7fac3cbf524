"""The first stage: read one part, filter its documents, and write those that pass with all that later stages need.

Each document is loaded once. For each batch of about `BATCH_BYTES`, array operations compute features, quality, domain,
MinHash signature and topic sketch. The output depends only on the part and the configuration, so any number of
processes may scan parts.

Where a source names no domain, a document's is recognized by file suffix, else by marker words. The rules are cheap and
coarse, good enough to weight a mixed crawl. A source whose domain is known should name it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2forge.corpus.config import DOMAINS, CorpusConfig, Rule
from m2forge.corpus.judge.classifier import Classifier, load_classifier
from m2forge.corpus.judge.duplicate import NOTHING, MinHash, SignatureArray, band_keys, bands_for
from m2forge.corpus.judge.feature import Feature, FeatureArray, count_features
from m2forge.corpus.judge.quality import PASSED, broken_rules, rule_scores
from m2forge.corpus.judge.topic import SketchArray, sketch, sketch_sums
from m2forge.corpus.judge.words import WINDOW_BYTES, TextBatch, cut, shingles, windows
from m2forge.corpus.read.document import Document, Problems
from m2forge.corpus.read.file import read_span
from m2forge.corpus.read.source import CODE_SUFFIXES, Part
from m2forge.corpus.write.document_table import TableWriter
from m2forge.files import staged_folder


def domain_of_name(name: str) -> str | None:
    """The domain implied by a file name; None if none is."""
    suffix = name[name.rfind(".") :].lower() if "." in name else ""
    return "code" if suffix in CODE_SUFFIXES else None


def recognise(features: FeatureArray) -> npt.NDArray[np.str_]:
    """The domain of each document: that of the first matching rule, else web."""
    words = np.maximum(features[:, Feature.WORDS], 1.0)

    def rate(feature: Feature) -> FeatureArray:
        return features[:, feature] / words

    num_bytes = np.maximum(features[:, Feature.NUM_BYTES], 1.0)
    symbols = features[:, Feature.SYMBOLS] / num_bytes
    rules = (
        ("code", (symbols > 0.06) & (rate(Feature.CODE) > 0.03) | (symbols > 0.1) & (rate(Feature.CODE) > 0.01)),
        ("qa", (features[:, Feature.QA] >= 4) & (rate(Feature.QA) > 0.06) & (rate(Feature.STOP) < 0.35)),
        ("maths", (features[:, Feature.MATHS] >= 3) & (rate(Feature.MATHS) > 0.012)),
        ("academic", (features[:, Feature.ACADEMIC] >= 4) & (rate(Feature.ACADEMIC) > 0.008)),
        ("books", (features[:, Feature.BOOKS] >= 3) & (features[:, Feature.WORDS] > 5000)),
    )
    return np.select([holds for _, holds in rules], [name for name, _ in rules], "web")


BATCH_BYTES = 1 << 19
BATCH_DOCUMENTS = 1 << 13
BELOW_THRESHOLD = "below_threshold"
"""Why a document was dropped, beside the names of rules."""


def domain_names(config: CorpusConfig) -> tuple[str, ...]:
    """All domains that documents may have; tables hold indices into it."""
    return tuple(sorted({*DOMAINS, *(source.domain for source in config.sources if source.domain is not None)}))


def num_bands(config: CorpusConfig) -> int:
    if not config.dedup.minhash:
        return 0
    return config.dedup.num_bands or bands_for(config.dedup.threshold, config.dedup.num_perm)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a batch, one row per document."""

    features: FeatureArray
    classified: npt.NDArray[np.float64]
    """Sums for the classifier; zero columns without one."""
    signature: SignatureArray
    topic: npt.NDArray[np.float64]


class Scanner:
    """Filters documents by one configuration."""

    def __init__(self, config: CorpusConfig, classifier: Classifier | None) -> None:
        self.config = config
        self.domains = domain_names(config)
        self._classifier = classifier
        self._num_bands = num_bands(config)
        self._minhash = MinHash(config.dedup.num_perm) if config.dedup.minhash else None
        self._topics = config.long is not None and config.long.related

    def measure(self, texts: Sequence[bytes]) -> Measured:
        pieces, owner = [], []
        for index, text in enumerate(texts):
            for window in windows(text):
                pieces.append(window)
                owner.append(index)
        rows = [self._measure(cut(chunk)) for chunk in _chunks(pieces)]
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        features, classified, signature, topic = (np.concatenate(column) for column in zip(*rows, strict=True))
        if len(starts) < len(owner):
            features, classified, topic = (np.add.reduceat(x, starts, axis=0) for x in (features, classified, topic))
            signature = np.minimum.reduceat(signature, starts, axis=0)
        return Measured(features, classified, signature, topic)

    def domains_of(
        self, documents: Sequence[Document], fixed: str | None, features: FeatureArray
    ) -> npt.NDArray[np.str_]:
        if fixed is not None:
            return np.full(len(documents), fixed)
        found = recognise(features).astype(object)
        for index, document in enumerate(documents):
            if document.name and (named := domain_of_name(document.name)):
                found[index] = named
        return found.astype(str)

    def write(self, documents: Sequence[Document], fixed: str | None, table: TableWriter, counts: Counter[str]) -> None:
        """Filter a batch and append the documents that pass to `table`."""
        measured = self.measure([document.text for document in documents])
        domains = self.domains_of(documents, fixed, measured.features)
        is_code = domains == "code"
        broken = broken_rules(measured.features, is_code, self.config.quality)
        # Empty documents are always dropped, whatever rules are enabled.
        broken[measured.features[:, Feature.NUM_BYTES] == 0] = list(Rule).index(Rule.TOO_SHORT)
        if self._classifier is None:
            scores = rule_scores(measured.features, is_code)
        else:
            scores = self._classifier.scores(measured.classified)
        low = (broken == PASSED) & (scores < self.config.quality.threshold)
        counts[BELOW_THRESHOLD] += int(low.sum())
        for index, rule in enumerate(Rule):
            counts[rule.value] += int((broken == index).sum())
        passed = np.flatnonzero((broken == PASSED) & ~low)
        counts["num_rows"] += len(passed)
        if not len(passed):
            return
        chosen = [documents[index] for index in passed.tolist()]
        digests = b"".join(hashlib.blake2b(document.text.strip(), digest_size=16).digest() for document in chosen)
        hashes = np.frombuffer(digests, "<u8").reshape(-1, 2)
        table.append("hash", hashes[:, 0])
        table.append("hash_rest", hashes[:, 1])
        table.append("domain", np.searchsorted(self.domains, domains[passed]).astype(np.uint8))
        texts = [document.text for document in chosen]
        # A name may be bytes that are not valid UTF-8.
        names = [document.name.encode(errors="backslashreplace") for document in chosen]
        table.append_stretches("text", b"".join(texts), np.array([len(text) for text in texts]))
        table.append_stretches("name", b"".join(names), np.array([len(name) for name in names]))
        if self._minhash is not None:
            self._write_signature(measured.signature[passed], hashes[:, 0], table)
        if self._topics:
            sketches: SketchArray = sketch(measured.topic[passed])
            table.append("sketch", sketches)

    def _measure(self, batch: TextBatch) -> tuple[npt.NDArray[np.generic], ...]:
        found = shingles(batch, self.config.dedup.shingle_words)
        none = np.zeros((batch.num_documents, 0))
        return (
            count_features(batch, found),
            none if self._classifier is None else self._classifier.sums(batch),
            none.astype(np.uint32) if self._minhash is None else self._minhash.sign(found, batch.num_documents),
            sketch_sums(batch) if self._topics else none,
        )

    def _write_signature(self, signature: SignatureArray, hashes: npt.NDArray[np.uint64], table: TableWriter) -> None:
        keys = band_keys(signature, self._num_bands)
        # A document without words is similar only to itself.
        empty = (signature == NOTHING).all(axis=1)
        keys[empty] = hashes[empty, None]
        table.append("signature", signature)
        for band in range(self._num_bands):
            table.append(f"band-{band:03d}", keys[:, band])


def scan_part(part: Part, config: CorpusConfig, classifier_path: Path | None, folder: Path) -> None:
    """Read `part` and write its table to `folder`, atomically."""
    scanner = Scanner(config, load_classifier(classifier_path) if classifier_path else None)
    source = config.sources[part.source]
    problems = Problems(config.strict)
    counts: Counter[str] = Counter(num_rows=0)
    num_read, num_bytes = 0, 0
    with staged_folder(folder) as staged, TableWriter(staged) as table:
        for batch in batches(document for span in part.spans for document in read_span(span, source, problems)):
            num_read += len(batch)
            num_bytes += sum(len(document.text) for document in batch)
            scanner.write(batch, source.domain, table, counts)
        num_rows = counts.pop("num_rows")
        dropped = {name: count for name, count in counts.items() if count}
        table.finish(
            {
                "source": part.source,
                "num_rows": num_rows,
                "num_read": num_read,
                "num_bytes": num_bytes,
                "dropped": dropped,
                "problems": problems.to_json(),
            }
        )


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about BATCH_BYTES."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES or len(group) >= BATCH_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _chunks(pieces: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Group consecutive pieces into chunks of about one window."""
    begin, size = 0, 0
    for index, piece in enumerate(pieces):
        if size and size + len(piece) > WINDOW_BYTES:
            yield pieces[begin:index]
            begin, size = index, 0
        size += len(piece)
    yield pieces[begin:]
