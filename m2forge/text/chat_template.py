"""Runs a model's Jinja chat template: plain data in, text or segments out.

The template gets the names that transformers provides: `tojson`, `raise_exception`, `strftime_now`, loop controls, the
`generation` block and the special tokens by name. It runs in jinja2's sandbox, which denies it Python's internals, and
within limits, since a model folder may come from anywhere: `MAX_S` seconds and `MAX_CHARS` characters per rendering.
Every loop and macro of the template counts a step, and every operation that can make a text much longer is checked
before it runs.

The template's own text may contain special tokens; the messages' must not. So before rendering, a `Guard` breaks every
such name inside a message with a character that occurs nowhere in the conversation; after the template's markers have
been found, that character is removed. Apart from it the template sees the real text.
"""

import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NoReturn, TypeAlias

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from m2forge.errors import FormatError
from m2forge.records import JsonValue
from m2forge.text.tokenizer import Segment, mark, plain
from m2forge.text.vocabulary import SpecialNames

Data: TypeAlias = Mapping[str, JsonValue]

MAX_S = 5.0
"""Maximum seconds of one rendering; a conversation of thousands of messages takes well under one."""
MAX_CHARS = 1 << 27
"""Maximum characters of one rendering, and of any text that a template makes on the way."""
MAX_SOURCE_CHARS = 1 << 20
_MAX_WIDTH = 1 << 16
"""Maximum width, indent or count that a template may give to a filter or to a method of a text."""

_BREAKERS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xE000, 0xF900))]
"""Noncharacters and private-use characters."""
# Exceptions that a template can raise on data it was not written for.
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class Guard:
    """Breaks the markers inside the texts of one conversation."""

    def __init__(self, markers: re.Pattern[str], texts: Iterable[str]) -> None:
        joined = "\0".join(texts)
        breaker = next((sign for sign in _BREAKERS if sign not in joined and _escape(sign) not in joined.lower()), None)
        if breaker is None:
            raise FormatError(
                "the messages use every private character of Unicode, so markers cannot be distinguished from text"
            )
        self._breaker = breaker
        self._markers = markers

    def text(self, text: str) -> str:
        if any(len(found.group()) == 1 for found in self._markers.finditer(text)):
            raise FormatError(
                "a message holds a special token of one character, which cannot be distinguished from its text"
            )
        # Breaking a marker may expose one that overlapped it.
        while self._markers.search(text):
            text = self._markers.sub(lambda found: found.group()[0] + self._breaker + found.group()[1:], text)
        return text

    def data(self, data: Data) -> dict[str, JsonValue]:
        return {self.text(key): self._value(value) for key, value in data.items()}

    def clean(self, text: str) -> str:
        """The text without what `text` inserted; a template may have written it as a JSON escape."""
        return text.replace(self._breaker, "").replace(_escape(self._breaker), "")

    def _value(self, value: JsonValue) -> JsonValue:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return self.data(value)
        return [self._value(inner) for inner in value] if isinstance(value, Sequence) else value


class ChatTemplate:
    def __init__(self, source: str, names: SpecialNames, specials: Iterable[str]) -> None:
        """`specials`: all tokens that the template may write by name."""
        if len(source) > MAX_SOURCE_CHARS:
            raise FormatError(
                f"the model's chat template has {len(source)} characters, expected at most {MAX_SOURCE_CHARS}"
            )
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            variables = meta.find_undeclared_variables(tree)
            self._template = self._environment.from_string(_counted(tree))
        except (*_FAILURES, SyntaxError) as error:
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

    def text(self, messages: Sequence[Data], tools: Sequence[Data], *, generation: bool) -> str:
        """The template's text. Of data that has passed through a guard, it still has the guard's characters."""
        pieces: list[str] = []
        try:
            with self._environment.limits():
                for piece in self._template.generate(
                    messages=messages,
                    tools=tools or None,
                    documents=None,
                    add_generation_prompt=generation,
                    **self._names,
                ):
                    self._environment.write(piece)
                    pieces.append(piece)
        except _FAILURES as error:
            raise FormatError(f"the model's chat template cannot express these messages: {error}") from error
        return "".join(pieces)

    def split(self, text: str, guard: Guard, cuts: Sequence[int] = ()) -> Iterator[tuple[int, Segment]]:
        """Markers and the texts between them, each with its position in `text`; texts are also split at `cuts`."""
        edges = [0, *(edge for found in self._markers.finditer(text) for edge in found.span()), len(text)]
        for number in range(len(edges) - 1):
            start, end = edges[number], edges[number + 1]
            if number % 2:
                yield start, mark(text[start:end])
                continue
            borders = [start, *(cut for cut in cuts if start < cut < end), end]
            for at, to in itertools.pairwise(borders):
                if at < to:
                    yield at, plain(guard.clean(text[at:to]))

    def render(
        self, messages: Sequence[Data], tools: Sequence[Data], guard: Guard, *, generation: bool
    ) -> list[Segment]:
        """Segments of the conversation, none trained; `messages` and `tools` have passed through `guard`."""
        text = self.text(messages, tools, generation=generation)
        return [segment for _, segment in self.split(text, guard)]


# -- the sandbox -------------------------------------------------------------------------------------------------------


class _Limits(threading.local):
    """What the rendering in this thread has used."""

    deadline_s = float("inf")
    num_chars = 0


class _Environment(ImmutableSandboxedEnvironment):
    # jinja2 calls `call_binop` for these, and does not evaluate them while it compiles.
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self._limits = _Limits()
        # One time for all renderings: a template that writes the date must not rewrite it at midnight.
        now = datetime.now()
        self.filters["tojson"] = _to_json
        for name in _SIZED_FILTERS:
            self.filters[name] = _checked(self.filters[name])
        self.globals.update(raise_exception=_raise, strftime_now=now.strftime)
        self.globals.update(dict=_TemplateDict(), namespace=_TemplateNamespace)
        # It writes random text, as long as the template asks for.
        del self.globals["lipsum"]

    def limits(self) -> "_Environment":
        self._limits.deadline_s, self._limits.num_chars = time.monotonic() + MAX_S, 0
        return self

    def __enter__(self) -> "_Environment":
        return self

    def __exit__(self, *error: object) -> None:
        self._limits.deadline_s = float("inf")

    def count_step(self) -> None:
        """Called at the start of each pass of a loop and of each call of a macro."""
        if time.monotonic() > self._limits.deadline_s:
            raise TemplateError(f"it ran for more than {MAX_S:g} s")

    def write(self, piece: str) -> None:
        self.count_step()
        self._limits.num_chars += len(piece)
        _check_size(self._limits.num_chars)

    def join_texts(self, *values: object) -> str:
        """The operator ~."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        counts = [abs(side) for side in (left, right) if isinstance(side, int)]
        if operator == "*" and sizes:
            _check_size(sizes[0] * max(counts, default=1))
        elif operator in ("*", "**") and max(counts, default=0) > (1 << 64 if operator == "*" else 1 << 8):
            raise TemplateError(f"{left!r:.30} {operator} {right!r:.30} is too large a number")
        elif operator == "+":
            _check_size(sum(sizes))
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(str(getattr(value, "__self__", "")))
        return wrapped

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:
        # Named as in jinja2, so that a template may call with any keyword.
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_text_method(text, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)


class _TemplateDict:
    """`dict(…)` for templates: the call and `fromkeys` alone."""

    def __call__(self, values: Iterable[tuple[str, object]] = (), **named: object) -> dict[str, object]:
        return dict(values) | named

    def fromkeys(self, keys: Iterable[str], value: object = None) -> dict[str, object]:
        return dict.fromkeys(keys, value)


class _TemplateNamespace(Namespace):
    """`namespace(…)` for templates: no name may begin with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise TemplateError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as the call block that transformers makes of it: what is set inside stays inside.
        return nodes.Scope(body, lineno=line)


class _Concats(NodeTransformer):
    """Replaces the operator ~, which jinja2 does not intercept."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join_texts", node.nodes, node.lineno)


def _counted(tree: nodes.Template) -> nodes.Template:
    """The template with its steps counted and its concatenations checked."""
    _Concats().visit(tree)
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        node.body.insert(0, nodes.ExprStmt(_call("count_step", [], node.lineno), lineno=node.lineno))
    return tree


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    """A call of a method of the environment."""
    method = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(method, arguments, [], None, None, lineno=line)


_SIZED_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "tojson", "truncate", "wordwrap")
_WIDTH = re.compile(r"\d{6}")


def _checked(filter: Callable[..., object]) -> Callable[..., object]:
    num_passed = 2 if hasattr(filter, "jinja_pass_arg") else 1

    @functools.wraps(filter)
    def run(*args: object, **kwargs: object) -> object:
        value, rest = args[num_passed - 1], [*args[num_passed:], *kwargs.values()]
        if isinstance(value, str):
            _check_text_method(value, filter.__name__.removeprefix("do_"), rest)
        elif filter.__name__ in ("do_join", "sync_do_join") and isinstance(value, Sequence):
            _check_size(len(value) * max((len(one) for one in rest if isinstance(one, str)), default=0))
        _check_numbers(rest)
        return filter(*args, **kwargs)

    return run


def _check_text_method(text: str, name: str, args: Sequence[object]) -> None:
    """Raises TemplateError if a method or filter of `text` would make a much longer one."""
    _check_numbers(args)
    texts = [one for one in args if isinstance(one, str)]
    if name == "replace" and len(texts) > 1:
        _check_size(text.count(texts[0]) * len(texts[1]))
    elif "join" in name:
        _check_size(len(text) * max(map(len, texts), default=0))
        _check_size(len(text) * max((len(one) for one in args if isinstance(one, list | tuple | str)), default=0))
    elif name == "format":
        _check_widths(text)


def _check_numbers(values: Iterable[object]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values):
        raise TemplateError(f"a width or count is over {_MAX_WIDTH}")


def _check_widths(pattern: str) -> None:
    if _WIDTH.search(pattern):
        raise TemplateError(f"the width of a formatted text is over {_MAX_WIDTH}")


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise TemplateError(f"it makes a text of over {MAX_CHARS} characters")


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


def _escape(sign: str) -> str:
    """A character as JSON in ASCII writes it."""
    return f"\\u{ord(sign):04x}"


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
