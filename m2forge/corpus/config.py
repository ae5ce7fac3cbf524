"""Configuration of a corpus build: sources, filters, deduplication, mixture and long samples."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.unpack import UnpackConfig

DOMAINS = ("academic", "books", "code", "maths", "qa", "web")
"""Domains recognized automatically where a source does not name one; maths covers maths and STEM."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
DomainName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class SourceKind(StrEnum):
    FOLDER = "folder"
    """Text and code files, one document each; `path` is a folder or a glob pattern."""
    JSONL = "jsonl"
    """One JSON object per line; .gz and .zst are decompressed."""
    PARQUET = "parquet"
    PDF = "pdf"
    """One document per file."""


class Source(Config):
    path: str
    """A file, a folder (read recursively) or a glob pattern such as `data/**/*.jsonl.gz`. Files are read in name order.
    Relative paths are relative to the current directory."""
    kind: SourceKind | None = None
    """File format; None: chosen per file by its suffix."""
    text_key: str = "text"
    """The key, or Parquet column, that holds the text."""
    domain: DomainName | None = None
    """Domain of all its documents; None: recognized per document."""
    suffixes: tuple[str, ...] = ()
    """Read only files with these suffixes, such as ".py"; empty: all suffixes known to hold text."""
    exclude: tuple[str, ...] = ()
    """Names of subfolders to skip, at any depth, when `path` is a folder."""
    unpack: UnpackConfig = UnpackConfig()
    """Limits on the decompressed size of its .gz, .zst, Parquet and PDF files."""


class TokenizerConfig(Config):
    path: str | None = None
    """A Hugging Face folder, tokenizer.json or GGUF file. None: train a tokenizer on the surviving documents."""
    vocab_size: Annotated[int, Field(ge=257)] = 8192
    """Vocabulary size of a trained tokenizer, special tokens included."""
    specials: tuple[str, ...] = ("<|endoftext|>",)
    """Special tokens of a trained tokenizer."""
    train_bytes: Count = 50_000_000
    """Approximate maximum of text to train a tokenizer on, sampled evenly over the corpus."""


class Rule(StrEnum):
    """Reasons to drop a document before scoring. Limits follow Gopher, C4 and FineWeb; code has its own."""

    TOO_SHORT = "too_short"
    WORD_LENGTH = "word_length"
    SYMBOLS = "symbols"
    ALPHABETIC = "alphabetic"
    BULLETS = "bullets"
    ELLIPSES = "ellipses"
    REPEATED_LINES = "repeated_lines"
    REPEATED_WORDS = "repeated_words"
    BOILERPLATE = "boilerplate"
    BLOB = "blob"
    """Long runs without whitespace: encoded data, minified code."""


class ClassifierConfig(Config):
    labels: Literal["rules", "sources"] = "rules"
    """Source of the examples. `rules`: the corpus's own documents, those with the best rule scores against those with
    the worst. `sources`: the two lists below."""
    positive: tuple[Source, ...] = ()
    negative: tuple[Source, ...] = ()
    num_documents: Annotated[int, Field(ge=2)] = 4000
    """Maximum number of examples over both classes."""

    @model_validator(mode="after")
    def _sources_on_both_sides(self) -> "ClassifierConfig":
        if (self.labels == "sources") != bool(self.positive and self.negative):
            raise ValueError('labels = "sources" needs positive and negative sources, and "rules" takes none')
        return self


class QualityConfig(Config):
    rules: tuple[Rule, ...] = tuple(Rule)
    """Rules that may drop a document."""
    min_words: int = 20
    """Documents with fewer words are dropped; for code the limit is a quarter of it."""
    threshold: Share = 0.0
    """Documents with a lower score are dropped. The score is the classifier's probability, or without a classifier the
    share of soft rules that the document satisfies."""
    classifier: ClassifierConfig | None = None


class DedupConfig(Config):
    exact: bool = True
    minhash: bool = True
    threshold: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.8
    """Jaccard similarity of shingle sets from which documents are near-duplicates; the first one read survives."""
    num_perm: Annotated[int, Field(ge=8, le=1024)] = 128
    num_bands: Count | None = None
    """LSH bands of a signature. None: the fewest that find 19 of 20 pairs whose similarity equals the threshold."""
    shingle_words: Count = 5

    @model_validator(mode="after")
    def _bands_fit(self) -> "DedupConfig":
        if self.num_bands is not None and self.num_bands > self.num_perm:
            raise ValueError(f"num_bands = {self.num_bands} exceeds num_perm = {self.num_perm}")
        return self


class MixtureConfig(Config):
    weights: Mapping[DomainName, Annotated[float, Field(ge=0.0)]] = {}
    """Target share of each domain, on any scale. Empty: proportional to its tokens, times `upsample`."""
    upsample: Mapping[DomainName, Annotated[float, Field(gt=0.0)]] = {}
    """Factor on the tokens of a domain, if `weights` is empty."""
    floor: Share = 0.0
    """Minimum share of any domain that has documents and a weight."""
    max_epochs: Annotated[float, Field(ge=1.0)] = 4.0
    """Maximum epochs over a domain while as many tokens are read as the corpus has. It bounds the floor too."""

    @model_validator(mode="after")
    def _one_way(self) -> "MixtureConfig":
        if self.weights and self.upsample:
            raise ValueError("give weights or upsample, not both")
        return self


class LongConfig(Config):
    """Long samples: documents for context-extension phases."""

    min_tokens: Count = 4096
    """Minimum length of a sample."""
    max_tokens: Count = 65536
    """Maximum length of joined documents. A single document that is longer stays whole."""
    code: bool = True
    """Join the code files of a repository in import order."""
    repository_depth: Annotated[int, Field(ge=0)] = 1
    """Folder depth below a source that identifies a repository: 1 means each folder directly in it is one."""
    natural: bool = True
    """Use documents that are long by themselves."""
    related: bool = True
    """Join documents on the same topic."""
    related_share: Share = 0.1
    """Maximum share of each domain's tokens that is joined by topic; the most similar groups come first."""

    @model_validator(mode="after")
    def _ordered(self) -> "LongConfig":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}")
        return self


class CorpusConfig(Config):
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Input sources; the first of several duplicates survives, so list trusted sources first."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    quality: QualityConfig = QualityConfig()
    dedup: DedupConfig = DedupConfig()
    mixture: MixtureConfig = MixtureConfig()
    long: LongConfig | None = LongConfig()
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Share of documents held out from training, chosen by content hash."""
    seed: int = 0
    """Selects the held-out documents and the training samples of a tokenizer."""
    strict: bool = False
    """Fail on the first broken line, file or archive, instead of counting and skipping it."""
    part_bytes: Count = 64_000_000
    """Input is processed in parts of about this size; a killed build loses at most the parts in progress."""
