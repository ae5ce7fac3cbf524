"""The suites: a configuration in, cells out.

**Synthetic suites** draw their samples. Each sample has its own random generator, seeded by the run's seed, task, size,
depth and index: adding a length to a suite does not change the samples of the others. A sample's answers are scored by
teacher forcing or by free decoding.

Forced: one forward pass over prompt and answers; an answer is correct if the argmax at every position before one of its
tokens is that token. For a single answer this equals greedy decoding at the cost of one pass: greedy decoding gives
a[0] exactly if argmax p(·|prompt) = a[0], then a[1] exactly if argmax p(·|prompt, a[0]) = a[1], and so on, and these
are the argmaxes that the forced pass computes, since attention is causal. If a sample has several answers, each is
scored given the correct earlier ones. Equal up to the rounding of differently shaped passes.

Free: the model decodes a completion of the prompt; an answer is correct if the completion contains it anywhere: RULER's
rule for answers that are sets. Text is compared as text, ignoring case, ids as ids.

The score of a sample is the share of its answers that are correct (RULER's recall); `exact` is whether all are.

**Suites over prompt files** decode completions of the prompts: tool calls (tool_call.py) and exact match
(exact_match.py).
"""

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from m2forge.errors import ConfigError, DataError
from m2forge.evaluate.config import (
    AlphabetConfig,
    CompletionConfig,
    ManyShotConfig,
    MultiHopConfig,
    MultiKeyConfig,
    MultiQueryConfig,
    NeedleConfig,
    Suite,
    WordCountConfig,
)
from m2forge.evaluate.predictor import Predictor, batches, complete
from m2forge.evaluate.prompts.prompt_file import PromptFile, RenderedPrompts, render_prompts
from m2forge.evaluate.prompts.scored_sample import Sample, Task
from m2forge.evaluate.prompts.wording import ShotTask, TextWording, TokenWording, Wording, make_alphabet
from m2forge.evaluate.report import Cell, Failure, make_cell, readable_bytes, readable_text
from m2forge.evaluate.suites.exact_match import AnswerPrompt, matches
from m2forge.evaluate.suites.ruler import (
    Filler,
    HopTask,
    NeedleTask,
    RandomFiller,
    WindowFiller,
    WordCountTask,
    noise_filler,
    text_filler,
)
from m2forge.evaluate.suites.tool_call import ToolPrompt, judge
from m2forge.observe.progress import progress
from m2forge.text.format import ChatFormat
from m2forge.text.message import Tool
from m2forge.text.parser import Completion
from m2forge.text.tokenizer import Tokenizer

# -- synthetic suites -------------------------------------------------------------------------------------------------

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    sample: Sample
    right: tuple[bool, ...]
    """Whether each answer is correct."""

    @property
    def recall(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def is_exact(self) -> bool:
        return all(self.right)


def score_forced(predictor: Predictor, samples: Sequence[Sample], *, max_pack_tokens: int = 1 << 16) -> list[Outcome]:
    outcomes: list[Outcome | None] = [None] * len(samples)
    for batch in batches([len(sample.ids) for sample in samples], max_pack_tokens):
        members = [samples[index] for index in batch]
        logits_MV = predictor.logits([sample.ids for sample in members], [sample.predicting for sample in members])
        likeliest = logits_MV.argmax(-1).cpu().numpy()
        bounds = np.cumsum([len(sample.predicting) for sample in members])[:-1]
        for index, sample, chosen in zip(batch, members, np.split(likeliest, bounds), strict=True):
            outcomes[index] = Outcome(sample, _right_spans(sample, chosen.tolist()))
    return [outcome for outcome in outcomes if outcome is not None]


def score_free(
    predictor: Predictor,
    samples: Sequence[Sample],
    *,
    decode: Decode | None = None,
    max_new_tokens: int | None = None,
    max_pack_tokens: int = 1 << 16,
) -> list[Outcome]:
    """`decode` is required for text samples. Without `max_new_tokens` a completion is as long as everything after the
    prompt in its sample."""
    bounds = [max_new_tokens or len(sample.ids) - len(sample.prompt_ids) for sample in samples]
    prompts = [sample.prompt_ids for sample in samples]
    completions = complete(predictor, prompts, max_new_tokens=bounds, max_pack_tokens=max_pack_tokens)
    return [
        Outcome(sample, _contained(sample, completion, decode))
        for sample, completion in zip(samples, completions, strict=True)
    ]


def _right_spans(sample: Sample, chosen: Sequence[int]) -> tuple[bool, ...]:
    right, cursor = [], 0
    for answer in sample.answers:
        right.append(tuple(chosen[cursor : cursor + len(answer)]) == answer)
        cursor += len(answer)
    return tuple(right)


def _contained(sample: Sample, completion: list[int], decode: Decode | None) -> tuple[bool, ...]:
    if sample.references:
        if decode is None:
            raise ValueError("samples of text need `decode` to be scored by free completion")
        text = decode(completion).casefold()
        return tuple(reference.casefold() in text for reference in sample.references)
    return tuple(_contains(completion, answer) for answer in sample.answers)


def _contains(row: Sequence[int], part: tuple[int, ...]) -> bool:
    return any(tuple(row[start : start + len(part)]) == part for start in range(len(row) - len(part) + 1))


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


# -- suites over prompt files -----------------------------------------------------------------------------------------

MAX_FAILURES = 5


@dataclass(frozen=True, slots=True)
class Measured:
    cells: tuple[Cell, ...]
    failures: tuple[Failure, ...]
    """The first few failures."""
    notes: tuple[str, ...]


def render_tool_prompts(chat: ChatFormat, file: PromptFile[ToolPrompt]) -> RenderedPrompts[ToolPrompt]:
    return render_prompts(file, lambda prompt: chat.render(prompt.messages, prompt.tools, generation=True).ids)


def measure_tool_calls(
    predictor: Predictor,
    chat: ChatFormat,
    rendered: RenderedPrompts[ToolPrompt],
    config: CompletionConfig,
    *,
    seed: int,
    max_pack_tokens: int,
) -> Measured:
    """Share of valid calls and, if the file has references, share of calls equal to them."""
    completions = _complete("tool_calls", predictor, rendered.ids, chat.stop_ids, config, seed, max_pack_tokens)
    parsed = [_parse(chat, prompt.tools, ids) for prompt, ids in zip(rendered.prompts, completions, strict=True)]
    verdicts = [
        judge(completion, prompt.tools, prompt.reference)
        for prompt, completion in zip(rendered.prompts, parsed, strict=True)
    ]
    valid = [verdict.is_valid for verdict in verdicts]
    cells = [make_cell("tool_calls", "tool_calls", [float(each) for each in valid], valid)]
    equal = [verdict.is_equal for prompt, verdict in zip(rendered.prompts, verdicts, strict=True) if prompt.reference]
    if equal:
        cells.append(make_cell("tool_calls_equal", "tool_calls", [float(each) for each in equal], equal))
    failures = [
        Failure(suite="tool_calls", line=line, completion=readable_text(chat.tokenizer, ids), reasons=verdict.reasons)
        for line, ids, verdict in zip(rendered.lines, completions, verdicts, strict=True)
        if not verdict.is_valid
    ]
    return Measured(tuple(cells), tuple(failures[:MAX_FAILURES]), _skipped(rendered.problems))


def render_answer_prompts(
    tokenizer: Tokenizer, chat: ChatFormat | None, file: PromptFile[AnswerPrompt], begin_ids: Sequence[int] = ()
) -> RenderedPrompts[AnswerPrompt]:
    """`chat` is required if the file holds messages; `begin_ids` are prepended to plain prompts."""
    if chat is None and any(prompt.messages for _, prompt in file.prompts):
        raise DataError(f"{file.path}: holds messages, but the network has no chat format; give `chat_format`")

    def render(prompt: AnswerPrompt) -> list[int]:
        if chat is not None and prompt.messages:
            return chat.render(prompt.messages, generation=True).ids
        return [*begin_ids, *tokenizer.encode(prompt.prompt)]

    return render_prompts(file, render)


def measure_exact_match(
    predictor: Predictor,
    tokenizer: Tokenizer,
    chat: ChatFormat | None,
    rendered: RenderedPrompts[AnswerPrompt],
    config: CompletionConfig,
    *,
    seed: int,
    max_pack_tokens: int,
) -> Measured:
    stop_ids = {*(chat.stop_ids if chat else ())}
    if tokenizer.end_of_text_id is not None:
        stop_ids.add(tokenizer.end_of_text_id)
    completions = _complete("exact_match", predictor, rendered.ids, sorted(stop_ids), config, seed, max_pack_tokens)
    texts = [
        _parse(chat, (), ids).content if chat and prompt.messages else _plain(tokenizer, ids, stop_ids)
        for prompt, ids in zip(rendered.prompts, completions, strict=True)
    ]
    right = [matches(text, prompt) for prompt, text in zip(rendered.prompts, texts, strict=True)]
    failures = [
        Failure(suite="exact_match", line=line, completion=text, reasons=(f"expected {prompt.answers[0]!r}",))
        for line, prompt, text, is_right in zip(rendered.lines, rendered.prompts, texts, right, strict=True)
        if not is_right
    ]
    cell = make_cell("exact_match", "exact_match", [float(each) for each in right], right)
    return Measured((cell,), tuple(failures[:MAX_FAILURES]), _skipped(rendered.problems))


def _complete(
    suite: str,
    predictor: Predictor,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    config: CompletionConfig,
    seed: int,
    max_pack_tokens: int,
) -> list[list[int]]:
    with progress(len(prompts), suite) as bar:
        return complete(
            predictor,
            prompts,
            max_new_tokens=config.max_new_tokens,
            stop_ids=stop_ids,
            temperature=config.temperature,
            seed=seed,
            max_pack_tokens=max_pack_tokens,
            advance=bar.advance,
        )


def _parse(chat: ChatFormat, tools: Sequence[Tool], ids: Sequence[int]) -> Completion:
    parser = chat.parser(tools)
    parser.feed(readable_bytes(chat.tokenizer, ids))
    return parser.finish()


def _plain(tokenizer: Tokenizer, ids: Sequence[int], stop_ids: Collection[int]) -> str:
    return readable_text(tokenizer, [token for token in ids if token not in stop_ids])


def _skipped(problems: Sequence[str]) -> tuple[str, ...]:
    if not problems:
        return ()
    return (f"{len(problems)} lines were left out; the first: {problems[0]}",)
