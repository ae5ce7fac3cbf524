"""Anthropic Messages, the request: JSON in, `Ask` out, or `AskError` naming the field.

Fields in `READ` are honoured. Fields in `ALLOWED` cannot change the response, or are accepted only with a no-op value.
Fields in `REFUSED` cannot be honoured. `anthropic_messages_block.py` reads the messages' blocks.

Thinking cannot be disabled or limited: the policy is sampled as it is. `enabled` and `adaptive` are accepted as no-ops
(the vendor treats `budget_tokens` as a target; `max_tokens` is the limit); `disabled` and `between_tools` are refused.
`display` is honoured; the "summary" is the full thinking.

Only the client's own tools are accepted. The vendor's server-side tools, response prefill by the client, forced tool
calls and structured output are refused.
"""

from collections.abc import Mapping
from typing import Literal

from m2forge.errors import RecordError
from m2forge.gateway.anthropic_messages_block import check_cache_control, read_conversation
from m2forge.gateway.exchange import Ask, AskError
from m2forge.gateway.reading import Fields, read_object, refuse_value, shown
from m2forge.gateway.tool_list import make_tool, read_tools
from m2forge.records import MAX_INT32, JsonValue, Sampling
from m2forge.text.message import Tool

READ = frozenset({"max_tokens", "messages", "model", "stop_sequences", "stream", "system", "temperature", "thinking"})
READ |= {"tool_choice", "tools", "top_k", "top_p"}
ALLOWED = frozenset({"cache_control", "context_management", "metadata", "output_config", "service_tier", "speed"})
REFUSED: Mapping[str, str] = {
    "container": "there are no containers here; offer a custom tool instead",
    "diagnostics": "no diagnostics of the prompt cache are kept; leave it out",
    "inference_geo": "where the model runs cannot be chosen; leave it out",
    "mcp_servers": "the gateway calls no servers; offer their tools as custom tools",
    "user_profile_id": "is a header, not a field of the body",
    "workspace_id": "is a header, not a field of the body",
}
FIELDS = READ | ALLOWED | REFUSED.keys()
NOT_COUNTED = frozenset({"max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p"})
NOT_COUNTED |= {"container", "diagnostics", "inference_geo", "metadata", "service_tier"}
COUNT_FIELDS = FIELDS - NOT_COUNTED

DISPLAY = "display"
"""Key of `Ask.echo`: whether the response shows the thinking, `summarized` or `omitted`."""
MIN_BUDGET = 1024
MAX_STOPS = 256
"""Limits the cost of searching the sampled text for every stop sequence."""
TOOL_FIELDS = frozenset({"name", "description", "input_schema", "type", "cache_control", "allowed_callers", "strict"})
TOOL_FIELDS |= {"defer_loading", "eager_input_streaming", "input_examples"}


def read_ask(body: Mapping[str, JsonValue]) -> Ask:
    """Read a POST /v1/messages request."""
    fields = Fields(body, FIELDS)
    max_tokens = fields.integer("max_tokens", 1, MAX_INT32)
    if max_tokens is None:
        refuse_value("max_tokens", f"an integer from 1 to {MAX_INT32}", None)
    conversation = read_conversation(fields)
    if conversation.ends_with_turn():
        fields.refuse("messages", "the last is the assistant's; to begin its answer for it (prefill) is not supported")
    _check_allowed(fields)
    return Ask(
        messages=conversation.messages(),
        tools=read_tools(fields, _tool),
        max_tokens=max_tokens,
        sampling=_sampling(fields),
        stop_texts=_stop_texts(fields),
        is_streamed=bool(fields.boolean("stream")),
        tool_choice=_tool_choice(fields),
        model=fields.required_text("model"),
        echo={DISPLAY: _display(fields)},
    )


def read_count(body: Mapping[str, JsonValue]) -> Ask:
    """Read a POST /v1/messages/count_tokens request: the prompt without sampling parameters."""
    fields = Fields(body, COUNT_FIELDS)
    conversation = read_conversation(fields)
    _check_allowed(fields)
    _display(fields)
    return Ask(
        messages=conversation.messages(),
        tools=read_tools(fields, _tool),
        tool_choice=_tool_choice(fields),
        model=fields.required_text("model"),
    )


# -- settings ---------------------------------------------------------------------------------------------------------


def _check_allowed(fields: Fields) -> None:
    for name, reason in REFUSED.items():
        if fields.has(name):
            fields.refuse(name, reason)
    check_cache_control(fields)
    metadata = fields.object("metadata", {"user_id"})
    if metadata is not None:
        metadata.text("user_id")
    fields.choice("service_tier", ("auto", "standard_only"))
    if fields.choice("speed", ("standard", "fast")) == "fast":
        fields.refuse("speed", "'fast' cannot be had: there is one speed; leave it out")
    output = fields.object("output_config", {"effort", "format"})
    if output is not None:
        if output.has("format"):
            output.refuse("format", "the answer's form cannot be enforced; leave it out and ask for it in a message")
        if output.choice("effort", ("low", "medium", "high", "xhigh", "max")) not in (None, "high"):
            output.refuse("effort", "cannot be set: the model decides; leave it out or say 'high', the default")
    _check_context_management(fields)


def _check_context_management(fields: Fields) -> None:
    """Accept only edits that keep everything: the gateway never edits the context."""
    management = fields.object("context_management", {"edits"})
    for index, value in enumerate(management.items("edits") if management is not None else ()):
        edit = read_object(value, f"context_management.edits[{index}]")
        if edit.get("type") != "clear_thinking_20251015" or edit.get("keep") != "all":
            fields.refuse("context_management", "context is never edited here; leave it out")


def _sampling(fields: Fields) -> Sampling:
    temperature, top_p = fields.number("temperature", 0, 1), fields.number("top_p", 0, 1)
    try:
        return Sampling(
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=fields.integer("top_k", 0, MAX_INT32) or 0,
        )
    except RecordError:
        refuse_value("top_p", "a number above 0, at most 1", fields.value("top_p"))


def _stop_texts(fields: Fields) -> tuple[str, ...]:
    texts, values = [], fields.items("stop_sequences")
    if len(values) > MAX_STOPS:
        fields.refuse("stop_sequences", f"expected at most {MAX_STOPS} texts, received {len(values)}")
    for index, value in enumerate(values):
        if not isinstance(value, str) or not value:
            refuse_value(f"stop_sequences[{index}]", "text", value)
        texts.append(value)
    return tuple(texts)


def _display(fields: Fields) -> str:
    thinking = fields.object("thinking", {"type", "budget_tokens", "display"})
    if thinking is None:
        return "summarized"
    kind = thinking.choice("type", ("enabled", "adaptive", "disabled", "between_tools"))
    if kind is None:
        refuse_value("thinking.type", "'enabled' or 'adaptive'", None)
    if kind in ("disabled", "between_tools"):
        thinking.refuse("type", f"{kind!r} cannot be had: the model decides when it thinks; leave `thinking` out")
    budget = thinking.integer("budget_tokens", MIN_BUDGET, MAX_INT32)
    if (budget is None) == (kind == "enabled"):
        refuse_value("thinking.budget_tokens", "an integer with 'enabled' and none with 'adaptive'", budget)
    return thinking.choice("display", ("summarized", "omitted")) or "summarized"


def _tool_choice(fields: Fields) -> Literal["auto", "none"]:
    choice = fields.object("tool_choice", {"type", "name", "disable_parallel_tool_use"})
    if choice is None:
        return "auto"
    kind = choice.choice("type", ("auto", "none", "any", "tool"))
    if kind is None:
        refuse_value("tool_choice.type", "'auto' or 'none'", None)
    if kind in ("any", "tool"):
        choice.refuse("type", f"{kind!r} cannot be had: a sampled model cannot be forced to call; say 'auto' or 'none'")
    if choice.has("name"):
        choice.refuse("name", "a sampled model cannot be forced to call a tool; leave it out")
    if choice.boolean("disable_parallel_tool_use"):
        choice.refuse("disable_parallel_tool_use", "the model decides how many tools it calls; leave it out")
    return "none" if kind == "none" else "auto"


def _tool(value: JsonValue, place: str) -> Tool:
    kind = read_object(value, place).get("type")
    if kind not in (None, "custom"):
        raise AskError(f"{place}.type: expected 'custom', received {shown(kind)}; the gateway runs no tools", place)
    fields = Fields(value, TOOL_FIELDS, place)
    check_cache_control(fields)
    fields.boolean("eager_input_streaming")
    if fields.boolean("strict"):
        fields.refuse("strict", "arguments cannot be forced into a schema; leave it out")
    if fields.boolean("defer_loading"):
        fields.refuse("defer_loading", "there is no search for tools; leave it out")
    if fields.items("input_examples"):
        fields.refuse("input_examples", "the model is shown no examples of input; put them into the description")
    if fields.has("allowed_callers") and list(fields.items("allowed_callers")) != ["direct"]:
        fields.refuse("allowed_callers", "only the model calls tools here; leave it out or say ['direct']")
    schema = read_object(fields.value("input_schema"), f"{place}.input_schema")
    return make_tool(fields, schema, place)
