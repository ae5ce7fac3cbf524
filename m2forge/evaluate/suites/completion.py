"""Suites that decode completions of prompts from a file: tool calls and exact match."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from m2forge.errors import DataError
from m2forge.evaluate.config import CompletionConfig
from m2forge.evaluate.predictor import Predictor, complete
from m2forge.evaluate.prompts.prompt_file import PromptFile, RenderedPrompts, render_prompts
from m2forge.evaluate.report import Cell, Failure, make_cell, readable_bytes, readable_text
from m2forge.evaluate.suites.exact_match import AnswerPrompt, matches
from m2forge.evaluate.suites.tool_call import ToolPrompt, judge
from m2forge.observe.progress import progress
from m2forge.text.format import ChatFormat
from m2forge.text.message import Tool
from m2forge.text.parser import Completion
from m2forge.text.tokenizer import Tokenizer

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
