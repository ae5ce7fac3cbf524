"""Exact-match accuracy: prompts with known answers; is the completion one of them?

Both are normalized first: Unicode NFKC and case folding, whitespace collapsed, and quotes, emphasis and punctuation
stripped at both ends, except a leading full stop: .5 is not 5. Of a plain prompt's completion only the first line
counts, since a base model continues writing; of a conversation's, the content without the thinking.
"""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from m2forge.errors import DataError
from m2forge.evaluate.prompts.prompt_file import require_list
from m2forge.records import JsonValue
from m2forge.text.message import Message, message_from_openai

_EDGES = " ,;:!?\"'`*“”‘’"


@dataclass(frozen=True, slots=True)
class AnswerPrompt:
    prompt: str
    """Plain text to continue; empty if there are messages."""
    messages: tuple[Message, ...]
    answers: tuple[str, ...]
    """Accepted answers."""


def parse_answer_prompt(record: Mapping[str, JsonValue]) -> AnswerPrompt:
    """Parse a line of {"prompt" or "messages", "answer"}."""
    answer, prompt = record.get("answer"), record.get("prompt", "")
    answers = tuple(answer) if isinstance(answer, list) else (answer,)
    if not answers or not all(isinstance(text, str) and normalised(text) for text in answers):
        raise DataError(f"answer: expected a text or a list of them, received {str(answer)[:60]!r}")
    if not isinstance(prompt, str) or bool(prompt) == ("messages" in record):
        raise DataError('expected either "prompt", a text, or "messages"')
    turns = require_list(record, "messages") if "messages" in record else []
    messages = tuple(message_from_openai(message) for message in turns)
    if not prompt and (not messages or messages[-1].role == "assistant"):
        raise DataError("messages: expected a conversation that the assistant is to answer")
    return AnswerPrompt(prompt, messages, tuple(str(text) for text in answers))


def matches(completion: str, prompt: AnswerPrompt) -> bool:
    """`completion`: the text after a plain prompt, or the content of the assistant's turn."""
    text = completion.lstrip()
    if prompt.prompt and not any("\n" in answer.strip() for answer in prompt.answers):
        text = text.partition("\n")[0]
    return normalised(text) in {normalised(answer) for answer in prompt.answers}


def normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).lstrip(_EDGES).rstrip(f".{_EDGES}")
