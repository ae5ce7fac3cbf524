"""What to measure, of which network: one TOML.

    model = "runs/nano/model"
    output = "runs/nano/eval"

    [held_out]
    corpus = "corpus"

    [[suites]]
    task = "needle"
    lengths = [1024, 4096]

Every suite is measured at each of its lengths (or numbers of examples) and, where the task has one, each depth.
"""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from m2forge.config import Config

Count = Annotated[int, Field(gt=0, le=1 << 40)]
Share = Annotated[float, Field(ge=0, le=1)]
Width = Annotated[int, Field(ge=1, le=4)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=60)]
"""Names a file too."""


def _different(values: tuple[float, ...]) -> tuple[float, ...]:
    if not values or len(set(values)) != len(values):
        raise ValueError("expected one or more different values")
    return values


Counts = Annotated[tuple[Count, ...], AfterValidator(_different)]
Depths = Annotated[tuple[Share, ...], AfterValidator(_different)]


class SuiteConfig(Config):
    """What all synthetic suites share."""

    name: Name | None = None
    """In table, files and plots; the task's name unless several suites have the same task."""
    material: Literal["tokens", "text"] = "tokens"
    """tokens: bare ids, for any network; text: English through the tokenizer."""
    decoding: Literal["forced", "free"] = "forced"
    """forced: one pass over prompt and answers, each answer judged after the right earlier ones; free: the network
    completes the prompt and an answer counts wherever it occurs, as RULER counts."""
    num_samples: Count = 20
    """Per length and depth."""
    max_new_tokens: Count | None = None
    """Of a free completion; by default as many as the answers take."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths in tokens, or the numbers of examples."""
        raise NotImplementedError

    @property
    def places(self) -> tuple[float | None, ...]:
        return (None,)


class _LengthSuite(SuiteConfig):
    lengths: Counts
    """Tokens of a sample, answers included. Lengths beyond the network's max_context are measured and marked."""
    haystack: Path | None = None
    """A text file to hide things in, through the tokenizer; else random ids, or sentences that say nothing."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.lengths


class NeedleConfig(_LengthSuite):
    task: Literal["needle"]
    depths: Depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Share of the haystack before the needle."""

    @property
    def places(self) -> tuple[float | None, ...]:
        return self.depths


class MultiKeyConfig(_LengthSuite):
    task: Literal["multi_key"]
    depths: Depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    num_needles: Annotated[int, Field(ge=2, le=1 << 16)] = 4

    @property
    def places(self) -> tuple[float | None, ...]:
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
            raise ValueError('a multi_query of tokens puts its questions one by one: it needs decoding = "forced"')
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
    """Which ids the suites of tokens use. What a network was trained on with token_wording.py must agree."""

    first_id: Annotated[int, Field(ge=0)] = 0
    num_symbols: Count = 256
    """Ids that keys, values and labels are made of; fewer are easier to learn."""
    marker_ids: tuple[int, ...] = ()
    """Reserved ids, one per marker; the last of the vocabulary unless named."""
    key_tokens: Width = 2
    value_tokens: Width = 2


class HeldOutConfig(Config):
    """Loss on documents that training did not see."""

    corpus: Path
    context: Count | None = None
    """Longest document, a longer one is read in pieces; the network's max_context, as far as a pack holds it, unless
    given."""
    pack_tokens: Count = 16_384
    num_packs: Count = 16
    """At most; no more tokens are read than the held-out part has."""


class CompletionConfig(Config):
    """Prompts from a file, completed by the network."""

    prompts: Path
    """JSON lines."""
    max_prompts: Count | None = None
    max_new_tokens: Count = 256
    temperature: Annotated[float, Field(ge=0)] = 0.0


CHARTS = ("by_length", "by_shots")
"""Names of the charts that all suites share."""
COMPLETION_SUITES = ("tool_calls", "tool_calls_equal", "exact_match")
"""Names of the suites that read their prompts from a file."""


class EvalConfig(Config):
    model: str
    """A model folder, or a preset's name for a network with random weights."""
    output: Path
    """The folder for eval.json, eval.toml, table.txt and the plots; files of these names are replaced."""
    tokenizer: Path | None = None
    """A folder or file with the tokenizer; the model folder's own unless given."""
    chat_format: Literal["auto", "minimax_m2", "chatml"] = "auto"
    drop_thinking: bool = False
    """Leave out the thinking of turns before the last question, for a network that was trained so."""
    begin_ids: tuple[int, ...] = ()
    """What a text begins with for this network, such as its begin-of-text token; for suites of text and the plain
    prompts of exact_match."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: as the weights are stored."""
    seed: Annotated[int, Field(ge=0)] = 0
    max_pack_tokens: Count = 65_536
    """Tokens of one forward pass; a longer sample goes alone."""
    alphabet: AlphabetConfig = AlphabetConfig()
    held_out: HeldOutConfig | None = None
    suites: tuple[Suite, ...] = ()
    tool_calls: CompletionConfig | None = None
    """Lines of {"messages", "tools"}: is the last call of the assistant made, well-formed and the same?"""
    exact_match: CompletionConfig | None = None
    """Lines of {"prompt" or "messages", "answer"}; "answer" is a text or a list of accepted ones."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.suites or self.held_out or self.tool_calls or self.exact_match):
            raise ValueError("nothing to measure: give suites, held_out, tool_calls or exact_match")
        names = [*self.suite_names, *COMPLETION_SUITES]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"several suites are called {repeated[0]!r}; give each its own `name`")
        taken = [name for name in self.suite_names if name in CHARTS]
        if taken:
            raise ValueError(f"{taken[0]!r} is a chart of all suites; give the suite another `name`")
        return self

    @property
    def suite_names(self) -> tuple[str, ...]:
        return tuple(suite.name or suite.task for suite in self.suites)
