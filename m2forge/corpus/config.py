"""The configuration of a corpus build: where documents come from, which are kept, how they are mixed and written."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.unpack import UnpackConfig

DOMAINS = ("academic", "books", "code", "maths", "qa", "web")
"""The domains that are recognised where a source does not name one: maths stands for maths and STEM."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
DomainName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class SourceKind(StrEnum):
    FOLDER = "folder"
    """Text and code files, one document each; `path` names folders, or files by a pattern."""
    JSONL = "jsonl"
    """One JSON object per line; .gz and .zst are unpacked."""
    PARQUET = "parquet"
    PDF = "pdf"
    """One document per file."""


class Source(Config):
    path: str
    """A file, a folder (taken whole) or a pattern such as `data/**/*.jsonl.gz`. Files are read in order of their names.
    Relative paths start at the current folder."""
    kind: SourceKind | None = None
    """None: by suffix, each file for itself."""
    text_key: str = "text"
    """The key, or Parquet column, that holds the text."""
    domain: DomainName | None = None
    """None: recognised per document."""
    suffixes: tuple[str, ...] = ()
    """Only files with these suffixes, such as ".py"; empty: all that are known to hold text."""
    exclude: tuple[str, ...] = ()
    """Names of folders that are left out of a folder taken whole, wherever in it they lie."""
    unpack: UnpackConfig = UnpackConfig()
    """What its .gz, .zst, Parquet and PDF files may unpack to."""


class TokenizerConfig(Config):
    path: str | None = None
    """A Hugging Face folder, tokenizer.json or GGUF file. None: one is trained on the documents kept."""
    vocab_size: Annotated[int, Field(ge=257)] = 8192
    """Of a trained tokenizer, specials included."""
    specials: tuple[str, ...] = ("<|endoftext|>",)
    """Of a trained tokenizer."""
    train_bytes: Count = 50_000_000
    """Text a tokenizer is trained on, about so much at most, drawn evenly over the corpus."""


class Rule(StrEnum):
    """Why a document is dropped before it is scored. Limits after Gopher, C4 and FineWeb; code has its own."""

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
    """Long runs without a break: encoded data, minified code."""


class ClassifierConfig(Config):
    labels: Literal["rules", "sources"] = "rules"
    """Where examples come from. `rules`: the corpus's own documents, those the rules score best against those they
    score worst. `sources`: the two lists below."""
    positive: tuple[Source, ...] = ()
    negative: tuple[Source, ...] = ()
    num_documents: Annotated[int, Field(ge=2)] = 4000
    """Examples, at most, over both classes."""

    @model_validator(mode="after")
    def _sources_on_both_sides(self) -> "ClassifierConfig":
        if (self.labels == "sources") != bool(self.positive and self.negative):
            raise ValueError('labels = "sources" needs positive and negative sources, and "rules" takes none')
        return self


class QualityConfig(Config):
    rules: tuple[Rule, ...] = tuple(Rule)
    """Those that may drop a document."""
    min_words: int = 20
    """Shorter documents are dropped; for code, a quarter of it."""
    threshold: Share = 0.0
    """Documents that score below are dropped. The score is the classifier's probability, or without a classifier the
    share of soft rules that a document keeps."""
    classifier: ClassifierConfig | None = None


class DedupConfig(Config):
    exact: bool = True
    minhash: bool = True
    threshold: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.8
    """Documents at least this alike (Jaccard, over shingles) are one; the first read is kept."""
    num_perm: Annotated[int, Field(ge=8, le=1024)] = 128
    num_bands: Count | None = None
    """Parts of a signature by which candidates are found. None: as many as find 19 of 20 pairs at the threshold."""
    shingle_words: Count = 5

    @model_validator(mode="after")
    def _bands_fit(self) -> "DedupConfig":
        if self.num_bands is not None and self.num_bands > self.num_perm:
            raise ValueError(f"num_bands = {self.num_bands} exceeds num_perm = {self.num_perm}")
        return self


class MixtureConfig(Config):
    weights: Mapping[DomainName, Annotated[float, Field(ge=0.0)]] = {}
    """Wished share of each domain, on any scale. Empty: as many as there are tokens, times `upsample`."""
    upsample: Mapping[DomainName, Annotated[float, Field(gt=0.0)]] = {}
    """A factor on the tokens of a domain, where weights are not given."""
    floor: Share = 0.0
    """The least share of any domain that has documents and a weight."""
    max_epochs: Annotated[float, Field(ge=1.0)] = 4.0
    """How often a domain may be repeated while as many tokens are read as the corpus has. It bounds the floor too."""

    @model_validator(mode="after")
    def _one_way(self) -> "MixtureConfig":
        if self.weights and self.upsample:
            raise ValueError("give weights or upsample, not both")
        return self


class LongConfig(Config):
    """Long samples: documents for the stages that extend the context."""

    min_tokens: Count = 4096
    """A sample is at least this long."""
    max_tokens: Count = 65536
    """Files and documents are joined up to this length. A document that is longer by itself stays whole."""
    code: bool = True
    """Join the code of a repository in the order of its imports."""
    repository_depth: Annotated[int, Field(ge=0)] = 1
    """Folders below a source that name a repository: 1 means that each folder directly in it is one."""
    natural: bool = True
    """Take documents that are long by themselves."""
    related: bool = True
    """Join documents on the same topic."""
    related_share: Share = 0.1
    """Of each domain's tokens, at most this much is joined by topic; the closest groups come first."""

    @model_validator(mode="after")
    def _ordered(self) -> "LongConfig":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}")
        return self


class CorpusConfig(Config):
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Of duplicates the first is kept, so trusted sources come first."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    quality: QualityConfig = QualityConfig()
    dedup: DedupConfig = DedupConfig()
    mixture: MixtureConfig = MixtureConfig()
    long: LongConfig | None = LongConfig()
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Share of documents kept from training, drawn by their content."""
    seed: int = 0
    """Draws what is held out and what a tokenizer or classifier is trained on."""
    strict: bool = False
    """Refuse the whole corpus for one broken line, file or archive, instead of counting and leaving it out."""
    part_bytes: Count = 64_000_000
    """Input is worked on in parts of about this size; a build that is killed loses at most the parts under way."""
