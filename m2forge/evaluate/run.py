"""One evaluation: a configuration in, a report out, with its table and plots in the output folder.

All configuration errors (a missing tokenizer, a length too short for its task, a prompt file without prompts, a chat
format that the tokenizer does not have) are raised before the first forward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from m2forge.config import write_resolved
from m2forge.corpus.reader import CorpusReader
from m2forge.errors import ConfigError, NotFoundError, suggest
from m2forge.evaluate.config import EvalConfig, HeldOutConfig
from m2forge.evaluate.predictor import ModelPredictor, Predictor, byte_lengths, held_out_loss
from m2forge.evaluate.prompts.prompt_file import RenderedPrompts, read_prompts
from m2forge.evaluate.prompts.scored_sample import Task
from m2forge.evaluate.report import Cell, DomainLoss, EvalReport, Failure, plots, render, show
from m2forge.evaluate.suites.exact_match import AnswerPrompt, parse_answer_prompt
from m2forge.evaluate.suites.suite import (
    Material,
    Measured,
    make_task,
    measure_exact_match,
    measure_suite,
    measure_tool_calls,
    render_answer_prompts,
    render_tool_prompts,
    sample_rng,
)
from m2forge.evaluate.suites.tool_call import ToolPrompt, parse_tool_prompt
from m2forge.files import write_atomic
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model
from m2forge.model.hub import find_folder, is_hub_id, pinned, refuse_revision
from m2forge.model.preset import PRESETS
from m2forge.model.transformer import Transformer
from m2forge.observe.progress import progress
from m2forge.text.format import ChatFormat, make_format
from m2forge.text.tokenizer import Tokenizer, load_tokenizer

CONFIG_FILE = "eval.toml"
TABLE_FILE = "table.txt"
TOKENIZER_FILE = "tokenizer.json"


def run_eval(
    config: EvalConfig,
    *,
    model: Transformer | None = None,
    tokenizer: Tokenizer | None = None,
    console: Console | None = None,
) -> EvalReport:
    """Run the evaluation of `config` and write the report to its output folder; the tables also go to `console`.

    A given `model` or `tokenizer` replaces the one that `config` names.
    """
    folder = Path(config.model)
    if config.model in PRESETS:
        refuse_revision(config.model, config.revision)
    elif model is None:
        if not (folder.is_dir() or is_hub_id(config.model)):
            known = suggest(config.model, PRESETS)
            raise NotFoundError(f"model {config.model!r} is neither a model folder nor a hub id nor a preset; {known}")
        config = pinned(config)
        folder = find_folder(config.model, config.revision)
    tokenizer = tokenizer or _find_tokenizer(config, folder)
    _refuse_without_tokenizer(config, tokenizer)
    notes: list[str] = []
    if model is None:
        model = _load_model(config, folder, notes)
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the network's vocabulary ends at "
            f"{model.config.vocab_size - 1}; give the tokenizer it was trained with"
        )
    material = Material(model.config.vocab_size, config.alphabet, tokenizer, config.begin_ids)
    tasks = [make_task(suite, material) for suite in config.suites]
    _refuse_short_lengths(config, tasks)
    corpus = None if config.held_out is None else _open_corpus(config.held_out, model, config.seed)
    prompts = None if tokenizer is None else _read_prompts(config, tokenizer)

    losses = (
        [] if corpus is None or config.held_out is None else _measure_loss(corpus, config.held_out, model, tokenizer)
    )
    predictor = ModelPredictor(model)
    cells = _measure_suites(config, tasks, predictor, tokenizer)
    failures: list[Failure] = []
    if tokenizer is not None and prompts is not None:
        for measured in _measure_completions(config, prompts, predictor, tokenizer):
            cells += measured.cells
            failures += measured.failures
            notes += measured.notes
    report = EvalReport(
        model=config.model,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        max_context=model.config.max_context,
        seed=config.seed,
        cells=tuple(cells),
        losses=tuple(losses),
        failures=tuple(failures),
        notes=(*notes, *_beyond_note(cells, model.config.max_context)),
    )
    write_report(report, config)
    if console is not None:
        show(report, console)
    return report


def write_report(report: EvalReport, config: EvalConfig) -> None:
    """Writes each file atomically, the report itself last."""
    write_resolved(config, config.output / CONFIG_FILE)
    for name, svg in plots(report).items():
        write_atomic(config.output / name, svg)
    write_atomic(config.output / TABLE_FILE, render(report))
    report.save(config.output)


# -- what is measured -------------------------------------------------------------------------------------------------


def _measure_loss(
    reader: CorpusReader, config: HeldOutConfig, model: Transformer, tokenizer: Tokenizer | None
) -> list[DomainLoss]:
    """Loss over the requested number of tokens, at most those of the held-out split."""
    bytes_of_id = None if tokenizer is None else byte_lengths(tokenizer, model.config.vocab_size)
    num_tokens = min(reader.num_tokens, config.num_packs * config.pack_tokens)
    packs = reader.packs(config.num_packs, num_tokens)
    with progress(num_tokens, "held-out loss") as bar:
        return held_out_loss(model, packs, reader.domains, bytes_of_id=bytes_of_id, advance=bar.advance)


def _measure_suites(
    config: EvalConfig, tasks: list[Task], predictor: Predictor, tokenizer: Tokenizer | None
) -> list[Cell]:
    cells: list[Cell] = []
    for name, suite, task in zip(config.suite_names, config.suites, tasks, strict=True):
        with progress(len(suite.sizes) * len(suite.positions) * suite.num_samples, name) as bar:
            cells += measure_suite(
                name,
                suite,
                task,
                predictor,
                seed=config.seed,
                max_pack_tokens=config.max_pack_tokens,
                tokenizer=tokenizer,
                advance=bar.advance,
            )
    return cells


@dataclass(frozen=True, slots=True)
class _Prompts:
    chat: ChatFormat | None
    """None if no prompt is a conversation."""
    tool_calls: RenderedPrompts[ToolPrompt] | None
    answers: RenderedPrompts[AnswerPrompt] | None


def _measure_completions(
    config: EvalConfig, prompts: _Prompts, predictor: Predictor, tokenizer: Tokenizer
) -> Iterator[Measured]:
    limits = {"seed": config.seed, "max_pack_tokens": config.max_pack_tokens}
    if config.tool_calls is not None and prompts.tool_calls is not None and prompts.chat is not None:
        yield measure_tool_calls(predictor, prompts.chat, prompts.tool_calls, config.tool_calls, **limits)
    if config.exact_match is not None and prompts.answers is not None:
        yield measure_exact_match(predictor, tokenizer, prompts.chat, prompts.answers, config.exact_match, **limits)


# -- inputs, validated first ------------------------------------------------------------------------------------------


def _load_model(config: EvalConfig, folder: Path, notes: list[str]) -> Transformer:
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device = "cuda": no CUDA device found; use "cpu" or "auto"')
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if config.model in PRESETS:
        notes.append(f"{config.model} is a preset: its weights are random")
        return build(PRESETS[config.model], device, dtype or torch.float32, config.seed)
    return load_model(folder, device=device, dtype=dtype)


def _find_tokenizer(config: EvalConfig, folder: Path) -> Tokenizer | None:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    return load_tokenizer(folder) if (folder / TOKENIZER_FILE).is_file() else None


def _refuse_without_tokenizer(config: EvalConfig, tokenizer: Tokenizer | None) -> None:
    needing = [name for name in ("tool_calls", "exact_match") if getattr(config, name) is not None]
    if needing and tokenizer is None:
        raise ConfigError(f"{needing[0]} needs a tokenizer and the model folder has none; give `tokenizer`")


def _refuse_short_lengths(config: EvalConfig, tasks: list[Task]) -> None:
    """Draw one sample of every suite and size, so that lengths that are too short fail here."""
    for suite, task in zip(config.suites, tasks, strict=True):
        for size in suite.sizes:
            task.sample(sample_rng(config.seed, suite.task, size, None, 0), size, suite.positions[0])


def _open_corpus(config: HeldOutConfig, model: Transformer, seed: int) -> CorpusReader:
    reader = CorpusReader(
        config.corpus,
        context=config.context or min(model.config.max_context, config.pack_tokens),
        pack_tokens=config.pack_tokens,
        seed=seed,
        split="held_out",
    )
    if reader.manifest.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"corpus {config.corpus} has ids up to {reader.manifest.vocab_size - 1}, the network's vocabulary ends at "
            f"{model.config.vocab_size - 1}; give the corpus of its tokenizer"
        )
    return reader


def _read_prompts(config: EvalConfig, tokenizer: Tokenizer) -> _Prompts:
    tools, answers = config.tool_calls, config.exact_match
    tool_file = None if tools is None else read_prompts(tools.prompts, parse_tool_prompt, tools.max_prompts)
    answer_file = None if answers is None else read_prompts(answers.prompts, parse_answer_prompt, answers.max_prompts)
    talks = answer_file is not None and any(prompt.messages for _, prompt in answer_file.prompts)
    chat = None
    if tool_file is not None or talks:
        chat = make_format(config.chat_format, tokenizer, drop_thinking=config.drop_thinking)
    return _Prompts(
        chat,
        None if tool_file is None or chat is None else render_tool_prompts(chat, tool_file),
        None if answer_file is None else render_answer_prompts(tokenizer, chat, answer_file, config.begin_ids),
    )


def _beyond_note(cells: list[Cell], max_context: int) -> tuple[str, ...]:
    if not any(cell.beyond_context for cell in cells):
        return ()
    return (f"lengths marked * are beyond the network's context of {max_context}",)
