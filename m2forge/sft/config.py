"""Configuration of SFT: the trajectories, how they fit the context, and which prompt parts are dropped."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.sft.row import RowFormat
from m2forge.text.message import FormatName, RewritePolicy
from m2forge.train.config import Count, Curve, EvalConfig, TuneConfig
from m2forge.unpack import UnpackConfig

SourceKind = Literal["auto", "jsonl", "atif", "parquet", "arrow"]
Rate = Annotated[float, Field(ge=0, le=1)]


class SourceConfig(Config):
    """One file or folder of trajectories."""

    path: str = Field(min_length=1)
    kind: SourceKind = "auto"
    """auto: *.jsonl files hold rows, *.json files hold ATIF, and either may end with .gz or .zst; *.parquet and *.arrow
    files hold rows. A folder that `save_to_disk` of the datasets library wrote is recognized."""
    row_format: RowFormat | None = None
    """Format of the rows of JSONL files and tables; None: detected from the names of their columns."""
    split: str | None = Field(default=None, min_length=1)
    """Split of a dataset folder to read, such as "train"; None: the folder has only one, or no tables."""
    weight: float = Field(default=1.0, ge=0.01, le=1000)
    """Repetitions of each trajectory per epoch; the fractional part is a probability, resampled each epoch."""
    unpack: UnpackConfig = UnpackConfig()
    """Limits on the decompressed size of its .gz, .zst, .parquet and .arrow files."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "atif" and self.row_format is not None:
            raise ValueError(f"row_format ({self.row_format!r}) is of rows, which ATIF files do not have; leave it out")
        return self


class PromptPart(Config):
    """A part of the system prompt that training drops at a given rate, so that the model learns to do without it."""

    kind: Literal["text", "regex", "heading"]
    """text: this exact text; regex: what the pattern matches, with `^` and `$` at line ends; heading: a Markdown
    section, from its heading to the next one of the same or a higher level."""
    match: str = Field(min_length=1)
    """The text, the pattern, or the heading as written in the prompt, such as `## Rules`."""
    rate: Rate

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "regex":
            try:
                re.compile(self.match)
            except re.error as error:
                raise ValueError(f"match ({self.match!r}) must be a regular expression ({error})") from error
        if self.kind == "heading" and not re.fullmatch(r"#{1,6} +\S.*", self.match):
            raise ValueError(f"match ({self.match!r}) must be a heading with its marks, such as '## Rules'")
        return self


class SFTDataConfig(Config):
    """How sources become encoded trajectories."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    context: int = Field(gt=1, le=1 << 24)
    """Maximum trajectory length in tokens."""
    too_long: Literal["cut", "drop"] = "cut"
    """cut: keep the leading whole turns that fit; drop: skip the trajectory."""
    strict: bool = False
    """Fail before training if any trajectory is broken, instead of counting and skipping it."""
    prompt_parts: tuple[PromptPart, ...] = ()
    num_prompt_draws: int = Field(default=4, gt=0, le=256)
    """Number of epochs with independent draws of the dropped parts; then the draws repeat. Each distinct prompt is
    encoded once."""


class SFTEvalConfig(EvalConfig):
    """Loss on held-out trajectories; either `share` or `sources` says which."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the conversations in `data.sources` to hold out, selected by their hash."""
    sources: tuple[SourceConfig, ...] = ()
    """Trajectories to evaluate. A conversation that is also in `data.sources` is not trained on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.share is None) == (not self.sources):
            raise ValueError("set either share or sources, exactly one of them")
        if any(source.weight != 1 for source in self.sources):
            raise ValueError("sources are evaluated once each; leave weight out")
        return self


class SFTConfig(Config):
    """An SFT run: a model, its trajectories, and the training schedule."""

    renamed_keys: ClassVar[Mapping[str, str]] = {"rate": "lr"}

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """The run's directory is RUNS/NAME; starting it again resumes it."""
    model: str = Field(min_length=1)
    """Folder of the model to start from, including its tokenizer, or a hub id such as Qwen/Qwen3-0.6B."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a hub model; None: its main branch. A run's resolved config holds the commit."""
    chat_format: FormatName = "auto"
    prefix_rewrites: RewritePolicy = "allow"
    """Whether the chat format may render earlier answers differently because of later messages; answers up to the last
    such one have no loss. allow: a message at the start says when. refuse: such a format is refused."""
    drop_thinking: bool = False
    """Drop the thinking of turns before the last user message, as the published chat template does; for ablations."""
    seed: int = Field(default=0, ge=0)
    data: SFTDataConfig
    num_epochs: Count = 1
    pack_tokens: Count
    """Tokens per forward pass (micro-batch); at least the context."""
    packs_per_step: Count = 1
    lr: Curve
    """Learning rate over the run's steps."""
    warmup_steps: int = Field(default=0, ge=0)
    mtp_weight: Curve = Curve(start=0.1)
    train: TuneConfig = TuneConfig()
    eval: SFTEvalConfig | None = None
    """Held-out loss during training; None: nothing is held out or evaluated."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pack_tokens < self.data.context:
            raise ValueError(
                f"pack_tokens ({self.pack_tokens}) must hold one trajectory of data.context ({self.data.context})"
            )
        return self
