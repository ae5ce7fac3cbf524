"""What a dialect does not honour of a request that its vendor would, and says so.

A request that is legal for its vendor is answered even if the gateway cannot do all that it asks for. Each thing that
is not done is a `Notice`: a short constant text that begins with the name of the field. The client receives the notices
in the response header `x-m2forge-notice`, joined by "; ", and the record of the call holds them. With `gateway.strict`
a request with a notice is refused instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from m2forge.records import JsonValue

HEADER = "x-m2forge-notice"
SEPARATOR = "; "


class Notice(StrEnum):
    TOOL_CHOICE = "tool_choice: treated as auto"
    PARALLEL_TOOL_CALLS = "parallel_tool_calls: not limited to one call"
    DISABLE_PARALLEL_TOOL_USE = "disable_parallel_tool_use: not limited to one call"
    RESPONSE_FORMAT = "response_format: written into the prompt, not enforced"
    TEXT_FORMAT = "text.format: written into the prompt, not enforced"
    OUTPUT_FORMAT = "output_config.format: written into the prompt, not enforced"
    REASONING_EFFORT = "reasoning_effort: not applied"
    RESPONSES_EFFORT = "reasoning.effort: not applied"
    OUTPUT_EFFORT = "output_config.effort: not applied"
    VERBOSITY = "verbosity: not applied"
    TEXT_VERBOSITY = "text.verbosity: not applied"
    THINKING = "thinking: not switched off"
    SYSTEM_TURN = "messages: a system message after the first turn is shown as a user turn"
    IMAGE = "image: replaced by a text placeholder"
    ASSISTANT_NAME = "name: not shown on the assistant's messages"
    VENDOR_TOOL = "tools: the vendor's own tools are not shown to the model"
    WEB_SEARCH = "web_search_options: there is no web search"
    STRICT_TOOL = "tools.strict: arguments are not constrained"
    SAMPLING = "sampling: replaced by the run's"

    @property
    def field(self) -> str:
        """The request's field that it is about."""
        return self.value.partition(":")[0]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a dialect needs besides the body; picklable."""

    image_placeholder: str = "[image]"
    """Text that the model reads in place of an image."""
    items: Mapping[str, JsonValue] = field(default_factory=dict)
    """Items of earlier responses by id, for requests that refer to them."""


READ_DEFAULTS = ReadOptions()


class Reading:
    """One request while a dialect reads it."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self._notices: dict[Notice, None] = {}
        self.answer_format = ""
        """Instruction to answer in the form that the request demands; empty without one."""

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Each notice once, in the order in which they were noted."""
        return tuple(self._notices)

    def note(self, notice: Notice) -> None:
        self._notices[notice] = None

    def image(self) -> str:
        """Return the text that stands for an image."""
        self.note(Notice.IMAGE)
        return self.options.image_placeholder


def notice_headers(notices: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return the response header, if there is a notice."""
    return [(HEADER.encode(), SEPARATOR.join(notices).encode())] if notices else []
