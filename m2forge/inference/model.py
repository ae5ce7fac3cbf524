"""Opens a model for inference: a model folder, a GGUF file, a hub id or a preset in; engine core, tokenizer and chat
format out.

A preset has random weights and a tokenizer of single bytes, so that everything runs and what it writes is noise; a
warning says so.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from m2forge.errors import ConfigError, FormatError, NotFoundError, suggest
from m2forge.inference.config import LLMConfig
from m2forge.model.build import build
from m2forge.model.count import count
from m2forge.model.hub import find_model, is_hub_id, refuse_revision
from m2forge.model.preset import PRESETS
from m2forge.rollout.core import Core
from m2forge.rollout.execution.cpu_dtype import available_bytes
from m2forge.rollout.server.model_server import DTYPES, core_of, decoder, find_device, make_core
from m2forge.text.format import MINIMAX_M2_SPECIALS, ChatFormat, FormatName, Rendered, make_format
from m2forge.text.message import Message, RewritePolicy, Tool
from m2forge.text.parser import CompletionParser
from m2forge.text.rewrite import check_rewrites
from m2forge.text.template import UnknownFormError
from m2forge.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

RANDOM_SEED = 0
"""Seed of a preset's weights."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    core: Core
    format: ChatFormat
    """Its tokenizer is the model's."""
    context: int
    """Maximum tokens of prompt and completion together that the core serves."""


class NoChatFormat:
    """See `ChatFormat`. The format of a tokenizer that has none, as a base model's: raw prompts work, messages are
    refused with the reason."""

    name = "none"
    stop_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, reason: str) -> None:
        self.tokenizer, self._reason = tokenizer, reason

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = False) -> Rendered:
        self._refuse()

    def extend(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation: bool = False,
    ) -> Rendered:
        self._refuse()

    def parser(self, tools: Sequence[Tool] = ()) -> CompletionParser:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FormatError(f"this model has no chat format: {self._reason}; give it a raw prompt instead of messages")


def open_model(model: str, config: LLMConfig, revision: str | None = None) -> OpenedModel:
    """`revision`: branch, tag or commit of a hub model."""
    if Path(model).exists() or is_hub_id(model):
        path = find_model(model, revision)
        format = find_format(path, config.format, config.prefix_rewrites)
        core = make_core(path, config.serving(), Path(model).absolute().name)
    elif model in PRESETS:
        refuse_revision(model, revision)
        core, tokenizer = _make_random(model, config)
        format = make_format("auto", tokenizer)
    else:
        raise NotFoundError(
            f"{model!r} is neither a model folder or GGUF file that exists nor a preset, nor a hub id (OWNER/NAME); "
            f"presets: {suggest(model, PRESETS)}"
        )
    return OpenedModel(core, format, context_of(core))


def context_of(core: Core) -> int:
    """Maximum tokens of prompt and completion together that a core serves."""
    return min(core.max_context, core.config.num_blocks * core.config.block_tokens)


def find_format(path: Path, name: FormatName, prefix_rewrites: RewritePolicy) -> ChatFormat:
    """The chat format of a model folder or GGUF file. With `auto`, a tokenizer without a chat template, or with one
    whose completions cannot be parsed, gets `NoChatFormat`. Raises `NotFoundError` if there is no tokenizer."""
    tokenizer = load_tokenizer(path)
    try:
        format = make_format(name, tokenizer)
    except FormatError as error:
        is_unknown = tokenizer.chat_template is None or isinstance(error, UnknownFormError)
        if name != "auto" or not is_unknown:
            raise
        if tokenizer.chat_template is not None:
            _log.warning("messages are refused, raw prompts are served: %s", error)
        return NoChatFormat(tokenizer, str(error))
    cost = "then the prefix cache serves a conversation only up to there, and the rest is prefilled again"
    check_rewrites(format, prefix_rewrites, key="prefix_rewrites", cost=cost)
    return format


def _make_random(name: str, config: LLMConfig) -> tuple[Core, Tokenizer]:
    serving, sizes = config.serving(), PRESETS[name]
    device, dtype = find_device(serving), DTYPES[serving.dtype] or torch.float32
    num_bytes, available = count(sizes).total_with_mtp * dtype.itemsize, _memory_bytes(device)
    if num_bytes > available:
        raise ConfigError(
            f"preset {name}: its weights take {num_bytes / 1e9:.0f} GB and {available / 1e9:.0f} GB of memory are "
            f"available; use a smaller one of {', '.join(PRESETS)}"
        )
    _log.warning(
        "preset %s: random weights of seed %d and a tokenizer of single bytes, so what it writes is noise; give a "
        "model folder for a trained model",
        name,
        RANDOM_SEED,
    )
    # Without texts to merge, the vocabulary is the specials and the 256 bytes.
    tokenizer = train_tokenizer((), 256 + len(MINIMAX_M2_SPECIALS), MINIMAX_M2_SPECIALS)
    return core_of(build(sizes, device, dtype, RANDOM_SEED), serving, name, decoder(tokenizer)), tokenizer


def _memory_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(available_bytes())
