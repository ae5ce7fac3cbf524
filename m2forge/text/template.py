"""A model's Jinja chat template: plain data in, segments out.

The template runs in a sandbox, with the globals that transformers provides: `tojson`, `raise_exception`, `strftime_now`
and the names of special tokens. The template's own text may contain special tokens; the messages' must not. So before
rendering, a `Guard` breaks every such name inside a message with a character that occurs nowhere in the conversation;
after the template's markers have been found, that character is removed. Apart from it the template sees the real text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NoReturn, TypeAlias

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from m2forge.errors import FormatError
from m2forge.records import JsonValue
from m2forge.text.segment import Segment, mark, plain
from m2forge.text.vocabulary import SpecialNames

Data: TypeAlias = Mapping[str, JsonValue]

_BREAKERS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xE000, 0xF900))]
"""Noncharacters and private-use characters."""
# Exceptions that a template can raise on data it was not written for.
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Guard:
    """Breaks the markers inside the texts of one conversation."""

    def __init__(self, markers: re.Pattern[str], texts: Iterable[str]) -> None:
        used = set().union(*texts)
        breaker = next((sign for sign in _BREAKERS if sign not in used), None)
        if breaker is None:
            raise FormatError(
                "the messages use every private character of Unicode, so markers cannot be told from text"
            )
        self.breaker = breaker
        self._markers = markers

    def text(self, text: str) -> str:
        if any(len(found.group()) == 1 for found in self._markers.finditer(text)):
            raise FormatError("a message holds a special token of one character, which cannot be told from its text")
        # Breaking a marker may expose one that overlapped it.
        while self._markers.search(text):
            text = self._markers.sub(lambda found: found.group()[0] + self.breaker + found.group()[1:], text)
        return text

    def data(self, data: Data) -> dict[str, JsonValue]:
        return {self.text(key): self._value(value) for key, value in data.items()}

    def _value(self, value: JsonValue) -> JsonValue:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return self.data(value)
        return [self._value(inner) for inner in value] if isinstance(value, Sequence) else value


class ChatTemplate:
    def __init__(self, source: str, names: SpecialNames, specials: Iterable[str]) -> None:
        """`specials`: all tokens that the template may write by name."""
        # One time for all renderings: a template that writes the date must not rewrite it at midnight.
        now = datetime.now()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = now.strftime
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise FormatError(f"the model's chat template cannot be compiled: {error}") from error
        self.takes_tools = "tools" in variables
        self.takes_thinking = "reasoning_content" in source
        parts = {"bos_token": names.bos, "eos_token": names.eos, "pad_token": names.pad, "unk_token": names.unk}
        self._names = {part: name for part, name in parts.items() if name is not None}
        ordered = sorted(specials, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")

    def guard(self, data: Sequence[JsonValue]) -> Guard:
        """A guard for all texts in `data`."""
        return Guard(self._markers, _texts(data))

    def render(
        self, messages: Sequence[Data], tools: Sequence[Data], guard: Guard, *, generation: bool
    ) -> list[Segment]:
        """Segments of the conversation, none trained; `messages` and `tools` have passed through `guard`."""
        try:
            text = self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=generation,
                **self._names,
            )
        except _FAILURES as error:
            raise FormatError(f"the model's chat template cannot express these messages: {error}") from error
        return list(self._split(text, guard.breaker))

    def _split(self, text: str, breaker: str) -> Iterator[Segment]:
        at = 0
        for found in self._markers.finditer(text):
            if at < found.start():
                yield plain(text[at : found.start()].replace(breaker, ""))
            yield mark(found.group())
            at = found.end()
        if at < len(text):
            yield plain(text[at:].replace(breaker, ""))


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: JsonValue,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _texts(value: JsonValue) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)
