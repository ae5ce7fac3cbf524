"""Configuration of fine-tuning: which trajectories, how they fit the context, what of the prompt is dropped."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.train.config import Count, Curve, TrainConfig
from m2forge.unpack import UnpackConfig

SourceKind = Literal["auto", "jsonl", "atif"]
Rate = Annotated[float, Field(ge=0, le=1)]


class SourceConfig(Config):
    """One file or folder of trajectories."""

    path: str = Field(min_length=1)
    kind: SourceKind = "auto"
    """auto: *.jsonl files hold OpenAI-style messages, *.json files hold ATIF; either may go on with .gz or .zst."""
    weight: float = Field(default=1.0, ge=0.01, le=1000)
    """How often each trajectory is seen in an epoch; what lies above a whole number is drawn anew in each epoch."""
    unpack: UnpackConfig = UnpackConfig()
    """What its .gz and .zst files may unpack to."""


class PromptPart(Config):
    """A part of the system prompt that training drops at a rate, so that the model learns to do without it."""

    kind: Literal["text", "regex", "heading"]
    """text: this exact text; regex: what the pattern matches, `^` and `$` at line ends; heading: a Markdown section,
    from its heading to the next one of the same or a higher level."""
    match: str = Field(min_length=1)
    """The text, the pattern, or the heading as it stands in the prompt, such as `## Rules`."""
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
    """From sources to encoded trajectories."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    context: int = Field(gt=1, le=1 << 24)
    """Longest trajectory in tokens."""
    too_long: Literal["cut", "drop"] = "cut"
    """cut: keep the first whole turns that fit; drop: leave the trajectory out."""
    strict: bool = False
    """Refuse the data before training if any trajectory is broken, instead of counting it and going on."""
    prompt_parts: tuple[PromptPart, ...] = ()
    num_prompt_draws: int = Field(default=4, gt=0, le=256)
    """Epochs that draw the dropped parts anew; then the draws repeat. Each distinct prompt is encoded once."""


class SFTConfig(Config):
    """A fine-tuning run: a model, its trajectories, and how long to train on them."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """The run lives in RUNS/NAME; started again, it goes on."""
    model: str = Field(min_length=1)
    """Folder of the model to start from, its tokenizer included."""
    chat_format: Literal["auto", "minimax_m2", "chatml"] = "auto"
    drop_thinking: bool = False
    """Leave out the thinking of turns before the last question, as the published template does; for ablations."""
    seed: int = Field(default=0, ge=0)
    data: SFTDataConfig
    num_epochs: Count = 1
    pack_tokens: Count
    """Tokens that go through the network at once; at least the context."""
    packs_per_step: Count = 1
    rate: Curve
    warmup_steps: int = Field(default=0, ge=0)
    mtp_weight: Curve = Curve(start=0.1)
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pack_tokens < self.data.context:
            raise ValueError(
                f"pack_tokens ({self.pack_tokens}) must hold one trajectory of data.context ({self.data.context})"
            )
        return self
