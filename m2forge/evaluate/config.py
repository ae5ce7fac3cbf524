"""Configuration of an evaluation: one TOML.

    model = "runs/nano/model"
    output = "runs/nano/eval"

    [held_out]
    corpus = "corpus"

    [[suites]]
    task = "needle"
    lengths = [1024, 4096]

Every suite is measured at each of its lengths (or numbers of shots) and, if the task has depths, at each depth.
"""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from m2forge.config import Config
from m2forge.text.message import FormatName

Count = Annotated[int, Field(gt=0, le=1 << 40)]
Share = Annotated[float, Field(ge=0, le=1)]
Width = Annotated[int, Field(ge=1, le=4)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=60)]
"""Also used as a file name."""


def _different(values: tuple[float, ...]) -> tuple[float, ...]:
    if not values or len(set(values)) != len(values):
        raise ValueError("expected one or more different values")
    return values


Counts = Annotated[tuple[Count, ...], AfterValidator(_different)]
Depths = Annotated[tuple[Share, ...], AfterValidator(_different)]


class SuiteConfig(Config):
    """Settings that all synthetic suites share."""

    name: Name | None = None
    """Name in tables, files and plots; by default the task's name, which must be unique among suites."""
    material: Literal["tokens", "text"] = "tokens"
    """tokens: bare ids, for any model; text: English through the tokenizer."""
    decoding: Literal["forced", "free"] = "forced"
    """forced: teacher forcing, one forward pass over prompt and answers, each answer scored given the correct earlier
    ones; free: the model decodes a completion and an answer counts anywhere in it, as in RULER."""
    num_samples: Count = 20
    """Samples per length and depth."""
    max_new_tokens: Count | None = None
    """Maximum length of a free completion; by default the length of the answers."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths in tokens, or the numbers of shots."""
        raise NotImplementedError

    @property
    def positions(self) -> tuple[float | None, ...]:
        return (None,)


class _LengthSuite(SuiteConfig):
    lengths: Counts
    """Tokens per sample, answers included. Lengths beyond the model's max_context are measured and marked."""
    haystack: Path | None = None
    """A text file to use as haystack, through the tokenizer; by default random ids, or meaningless sentences."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.lengths


class NeedleConfig(_LengthSuite):
    task: Literal["needle"]
    depths: Depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Relative positions of the needle in the haystack."""

    @property
    def positions(self) -> tuple[float | None, ...]:
        return self.depths


class MultiKeyConfig(_LengthSuite):
    task: Literal["multi_key"]
    depths: Depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    num_needles: Annotated[int, Field(ge=2, le=1 << 16)] = 4

    @property
    def positions(self) -> tuple[float | None, ...]:
        return self.depths


class MultiQueryConfig(_LengthSuite):
    task: Literal["multi_query"]
    num_needles: Annotated[int, Field(ge=2, le=1 << 16)] = 4
    num_queries: Annotated[int, Field(ge=2, le=1 << 16)] = 4

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_queries > self.num_needles:
            raise ValueError(f"num_queries ({self.num_queries}) exceeds num_needles ({self.num_needles})")
        if self.material == "tokens" and self.decoding == "free":
            raise ValueError('multi_query on tokens scores one question at a time: it needs decoding = "forced"')
        return self


class MultiHopConfig(_LengthSuite):
    task: Literal["multi_hop"]
    decoding: Literal["forced", "free"] = "free"
    num_chains: Annotated[int, Field(ge=1, le=1024)] = 1
    num_hops: Annotated[int, Field(ge=1, le=1024)] = 4


class WordCountConfig(_LengthSuite):
    task: Literal["common_words"]
    decoding: Literal["forced", "free"] = "free"
    num_common: Annotated[int, Field(ge=1, le=1024)] = 10

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.haystack is not None:
            raise ValueError("common_words has no haystack: its list fills the length")
        return self


class ManyShotConfig(SuiteConfig):
    task: Literal["many_shot"]
    shots: Counts = (1, 2, 4, 8, 16, 32)
    num_inputs: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    num_labels: Annotated[int, Field(ge=2, le=1 << 16)] = 4

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.shots


Suite: TypeAlias = Annotated[
    NeedleConfig | MultiKeyConfig | MultiQueryConfig | MultiHopConfig | WordCountConfig | ManyShotConfig,
    Field(discriminator="task"),
]


class AlphabetConfig(Config):
    """Ids used by token suites. They must match those used to train a model with prompts/wording.py."""

    first_id: Annotated[int, Field(ge=0)] = 0
    num_symbols: Count = 256
    """Number of ids that keys, values and labels are made of; fewer are easier to learn."""
    marker_ids: tuple[int, ...] = ()
    """Reserved ids, one per marker; by default the last of the vocabulary."""
    key_tokens: Width = 2
    value_tokens: Width = 2


class HeldOutConfig(Config):
    """Loss on held-out documents."""

    corpus: Path
    context: Count | None = None
    """Maximum document length, longer ones are read in pieces; by default the model's max_context, or pack_tokens if
    smaller."""
    pack_tokens: Count = 16_384
    num_packs: Count = 16
    """Maximum number of packs; at most the tokens of the held-out split are read."""


class CompletionConfig(Config):
    """Prompts from a file, completed by the model."""

    prompts: Path
    """A JSONL file."""
    max_prompts: Count | None = None
    max_new_tokens: Count = 256
    temperature: Annotated[float, Field(ge=0)] = 0.0


CHARTS = ("by_length", "by_shots")
"""Names of the charts that combine all suites."""
COMPLETION_SUITES = ("tool_calls", "tool_calls_equal", "exact_match")
"""Names of the suites that read prompts from a file."""


class EvalConfig(Config):
    model: str
    """A model folder, a hub id such as Qwen/Qwen3-0.6B, or a preset's name for a model with random weights."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a hub model; None: its main branch. The resolved config, eval.toml, holds the commit."""
    output: Path
    """The folder for eval.json, eval.toml, table.txt and the plots; existing files of these names are replaced."""
    tokenizer: Path | None = None
    """A folder or file with the tokenizer; by default the model folder's own."""
    chat_format: FormatName = "auto"
    drop_thinking: bool = False
    """Drop the thinking of turns before the last user message, for a model that was trained that way."""
    begin_ids: tuple[int, ...] = ()
    """Ids that start a text for this model, such as its BOS token; for text suites and the plain prompts of
    exact_match."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """dtype of the weights; auto: as stored."""
    seed: Annotated[int, Field(ge=0)] = 0
    max_pack_tokens: Count = 65_536
    """Maximum tokens per forward pass, and of the KV cache in decoding; a longer sample runs alone."""
    alphabet: AlphabetConfig = AlphabetConfig()
    held_out: HeldOutConfig | None = None
    suites: tuple[Suite, ...] = ()
    tool_calls: CompletionConfig | None = None
    """Lines of {"messages", "tools"}: does the model make the assistant's last tool call, well-formed and equal?"""
    exact_match: CompletionConfig | None = None
    """Lines of {"prompt" or "messages", "answer"}; "answer" is a text or a list of accepted ones."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_empty:
            raise ValueError("nothing to measure: give suites, held_out, tool_calls, exact_match or trials")
        names = [*self.suite_names, *COMPLETION_SUITES]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"several suites are called {repeated[0]!r}; give each its own `name`")
        taken = [name for name in self.suite_names if name in CHARTS]
        if taken:
            raise ValueError(f"{taken[0]!r} is a chart of all suites; give the suite another `name`")
        return self

    @property
    def measures(self) -> bool:
        """Whether there is something to measure by forward passes of the model."""
        return bool(self.suites or self.held_out or self.tool_calls or self.exact_match)

    @property
    def is_empty(self) -> bool:
        return not self.measures

    @property
    def suite_names(self) -> tuple[str, ...]:
        return tuple(suite.name or suite.task for suite in self.suites)
