"""Chat formats: messages in, token ids out, one file each; here their interface and how one is chosen.

    render(messages)                 the whole conversation
    extend(history, new)             the ids to append for new messages: render(history) + extend(history, new) equals
                                     render(history + new), and so does a sampled completion that ended in a stop token
                                     followed by them. History is never encoded again.
    parser(tools)                    a streaming parser of completions

render(messages, generation=True) followed by the assistant's sampled tokens equals render(messages + [its message]) up
to the sampler's tokenization of the text; `trained` marks exactly those ids.
"""

from collections.abc import Sequence
from typing import Protocol

from m2forge.errors import FormatError
from m2forge.text.chatml import ChatMLFormat
from m2forge.text.message import FormatName, Message, Tool
from m2forge.text.minimax_m2 import MINIMAX_M2_SPECIALS, OPEN, MiniMaxM2Format
from m2forge.text.parser import CompletionParser
from m2forge.text.template import TemplateFormat
from m2forge.text.tokenizer import Rendered, Tokenizer

__all__ = ["MINIMAX_M2_SPECIALS", "ChatFormat", "FormatName", "Rendered", "make_format"]


class ChatFormat(Protocol):
    name: str
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    """Stop tokens: a sampled completion ends with one of these."""
    closing_ids: tuple[int, ...]
    """Stop tokens with which an answer ends in a conversation, the usual one first: it is appended to a completion that
    did not end in any of these before the conversation goes on."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = False) -> Rendered:
        """The conversation from its first token; with `generation`, including the generation prompt."""
        ...

    def extend(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation: bool = False,
    ) -> Rendered:
        """The ids that follow render(history). Raises `PrefixError` if `new` would change the rendering of the
        history."""
        ...

    def parser(self, tools: Sequence[Tool] = ()) -> CompletionParser: ...


def make_format(name: FormatName, tokenizer: Tokenizer, *, drop_thinking: bool = False) -> ChatFormat:
    """`auto`: minimax_m2 if the tokenizer has its markers; chatml if the model's chat template is ChatML with tool
    calls of Hermes or none; else template, if there is a template."""
    if name == "auto":
        name = _choose(tokenizer)
    if name == "minimax_m2":
        return MiniMaxM2Format(tokenizer, drop_thinking=drop_thinking)
    if name == "chatml":
        return ChatMLFormat(tokenizer, drop_thinking=drop_thinking)
    if name == "template":
        if drop_thinking:
            raise FormatError(
                "drop_thinking: the chat format template renders thinking as the model's own template does; leave it "
                "out, or choose chatml or minimax_m2"
            )
        return TemplateFormat(tokenizer)
    raise FormatError(f"chat format {name!r} is not known; known: auto, chatml, minimax_m2, template")


def _choose(tokenizer: Tokenizer) -> FormatName:
    if OPEN in tokenizer.special_ids:
        return "minimax_m2"
    if tokenizer.chat_template is None:
        return "chatml"
    try:
        is_chatml = ChatMLFormat(tokenizer).is_readable
    except FormatError:
        is_chatml = False
    return "chatml" if is_chatml else "template"
