"""Settings of requests that OpenAI's dialects share: sampling, stop texts, streaming, tool choice, answer format."""

from collections.abc import Mapping, Sequence
from typing import Literal

from m2forge.gateway.dialects.conversation import answer_format
from m2forge.gateway.dialects.notice import Notice, Reading
from m2forge.gateway.dialects.types import Fields, read_object, read_text, refuse_value, shown
from m2forge.records import MAX_INT32, JsonValue, Sampling
from m2forge.text.message import Tool

SAMPLING_FIELDS = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty"}
)
MAX_STOPS, MAX_SEED = 4, 2**63 - 1
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
DEFAULT_VERBOSITY = "medium"
SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})
CHOICE_FIELDS = frozenset({"type", "function", "custom", "name", "mode", "tools", "allowed_tools", "server_label"})
CHOICE_FIELDS |= {"namespace"}


def read_sampling(fields: Fields) -> Sampling:
    numbers = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 0, 10),
    }
    numbers_set = {name: value for name, value in numbers.items() if value is not None}
    for name in ("top_p", "repetition_penalty"):
        if numbers_set.get(name) == 0:
            fields.refuse(name, "expected a number above 0, received 0; set temperature to 0 for the likeliest tokens")
    # Open source servers use -1 for no limit, which is 0 here.
    top_k = max(fields.integer("top_k", -1, MAX_INT32) or 0, 0)
    return Sampling(**numbers_set, top_k=top_k)


def requested_sampling(fields: Fields) -> frozenset[str]:
    return frozenset(name for name in SAMPLING_FIELDS if fields.has(name))


def read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    values = (value,) if isinstance(value, str) else fields.items("stop")
    if len(values) > MAX_STOPS:
        fields.refuse("stop", f"expected at most {MAX_STOPS} texts, received {len(values)}")
    texts = tuple(read_text(value, f"stop[{index}]") for index, value in enumerate(values))
    if "" in texts:
        fields.refuse("stop", "expected text, received an empty one, which would end every completion at once")
    return texts


def read_seed(fields: Fields) -> int | None:
    return fields.integer("seed", -MAX_SEED - 1, MAX_SEED)


def read_num_samples(fields: Fields) -> int:
    """The gateway checks the upper limit."""
    return fields.integer("n", 1, MAX_INT32) or 1


def read_stream(fields: Fields) -> tuple[bool, dict[str, JsonValue]]:
    """Return whether the response is streamed, and the options that shape its chunks."""
    is_streamed = bool(fields.boolean("stream"))
    options = fields.object("stream_options", frozenset({"include_usage", "include_obfuscation"}))
    if options is None:
        return is_streamed, {}
    if not is_streamed:
        fields.refuse("stream_options", "only a streamed answer has options of its stream; set stream to true")
    if options.boolean("include_obfuscation"):
        options.refuse("include_obfuscation", "chunks are not padded; leave it out or send false")
    return is_streamed, {"include_usage": True} if options.boolean("include_usage") else {}


def read_tool_choice(fields: Fields, tools: Sequence[Tool], reading: Reading) -> Literal["auto", "none"]:
    """A sampled model cannot be forced to call a tool, nor prevented from calling one that is offered: anything but
    `none` offers the tools."""
    choice = fields.value("tool_choice")
    if choice in (None, "auto", "none"):
        return "none" if choice == "none" else "auto"
    if isinstance(choice, Mapping):
        _check_named(choice, tools)
    elif choice not in ("required", "any"):
        refuse_value("tool_choice", "'auto', 'none', 'required' or a tool", choice)
    reading.note(Notice.TOOL_CHOICE)
    return "auto"


def _check_named(choice: Mapping[str, JsonValue], tools: Sequence[Tool]) -> None:
    """Refuse a choice of a tool that is not offered; one that the vendor runs has no name."""
    fields = Fields(choice, CHOICE_FIELDS, "tool_choice")
    kind = fields.required_text("type")
    if kind not in ("function", "custom"):
        return
    named = fields.object(kind, {"name"}) or fields
    name = named.required_text("name")
    if not any(name in (tool.name, tool.name.rpartition(".")[2]) for tool in tools):
        named.refuse("name", f"no tool {shown(name)} is offered")


def refuse_bias(fields: Fields) -> None:
    """Refuse logit biases; an empty object is allowed."""
    if fields.value("logit_bias") not in (None, {}):
        fields.refuse("logit_bias", "tokens cannot be biased: they would not be samples of the policy; leave it out")


def read_format(schema: Fields | None) -> str:
    """Return the instruction that stands for a response format; `schema`: None for any JSON object."""
    if schema is None:
        return answer_format(None)
    schema.required_text("name")
    schema.boolean("strict")
    form = read_object(schema.value("schema"), schema.path("schema")) if schema.has("schema") else None
    return answer_format(form, schema.text("description") or "")
