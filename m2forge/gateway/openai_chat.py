"""OpenAI's Chat Completions: `POST /v1/chat/completions`.

Every field that the SDK can send is handled. Fields in `READ` are honoured or repeated in the response. Fields in
`ALLOWED` cannot change the response, or are accepted only with a no-op value. Fields in `REFUSED` cannot be honoured
and get status 400. So do forced tool calls, JSON mode, and logprobs of tokens that were not sampled: the policy is
sampled as it is, and nothing is promised beyond that.

Thinking is `reasoning_content`, in messages and deltas, in both directions. Logprobs cover all sampled tokens in order:
thinking, content, tool calls and the end marker.
"""

from collections.abc import Mapping, Sequence

from m2forge.gateway.exchange import Answer, Ask, AskError, Usage
from m2forge.gateway.openai_body import (
    FINISH_REASONS,
    SAMPLING_FIELDS,
    TOO_LONG,
    arguments_text,
    error_body,
    logprobs_body,
    read_num_samples,
    read_sampling,
    read_seed,
    read_stop,
    read_stream,
    read_tool_choice,
    refuse_bias,
    usage_body,
)
from m2forge.gateway.openai_chat_stream import ChatStream
from m2forge.gateway.openai_message import read_messages, read_tool
from m2forge.gateway.reading import Fields
from m2forge.gateway.tool_list import read_tools
from m2forge.records import MAX_INT32, JsonValue
from m2forge.text.completion import Completion

READ = SAMPLING_FIELDS | {
    "messages",
    "model",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "n",
    "seed",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "metadata",
    "service_tier",
}
ALLOWED = frozenset(
    {
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "store",
        "modalities",
        "response_format",
        "logit_bias",
        "parallel_tool_calls",
    }
)
REFUSED: Mapping[str, str] = {
    "audio": "audio is not supported; the model writes text",
    "function_call": "replaced by tool_choice",
    "functions": "replaced by tools",
    "moderation": "there is no moderation here; leave it out",
    "prediction": "predicted outputs are not supported; leave it out",
    "reasoning_effort": "how long the model thinks cannot be set; leave it out, or limit max_completion_tokens",
    "verbosity": "how much the model writes cannot be set; leave it out, or say so in a message",
    "web_search_options": "there is no web search here; offer a tool that does it",
}
FIELDS = READ | ALLOWED | REFUSED.keys()


class OpenAIChat:
    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, JsonValue]) -> Ask:
        fields = Fields(body, FIELDS)
        for name, reason in REFUSED.items():
            if fields.has(name):
                fields.refuse(name, reason)
        tools = read_tools(fields, read_tool)
        _check_allowed(fields, has_tools=bool(tools))
        is_streamed, echo = read_stream(fields)
        return Ask(
            messages=read_messages(fields),
            tools=tools,
            max_tokens=_max_tokens(fields),
            sampling=read_sampling(fields),
            stop_texts=read_stop(fields),
            seed=read_seed(fields),
            num_samples=read_num_samples(fields),
            is_streamed=is_streamed,
            tool_choice=read_tool_choice(fields),
            num_top_logprobs=_num_top_logprobs(fields),
            model=fields.required_text("model"),
            echo=echo | _repeated(fields),
        )

    def answer(
        self, ask: Ask, id: str, created_s: int, answers: Sequence[Answer], usage: Usage
    ) -> dict[str, JsonValue]:
        choices = [
            {
                "index": index,
                "message": message_body(answer.completion),
                "logprobs": None if ask.num_top_logprobs is None else logprobs_body(answer.logprobs),
                "finish_reason": FINISH_REASONS[answer.ending],
            }
            for index, answer in enumerate(answers)
        ]
        body: dict[str, JsonValue] = {
            "id": id,
            "object": "chat.completion",
            "created": created_s,
            "model": ask.model,
            "choices": choices,
            "usage": usage_body(usage),
        }
        return body | {name: ask.echo[name] for name in ("metadata", "service_tier") if name in ask.echo}

    def stream(self, ask: Ask, id: str, created_s: int) -> ChatStream:
        return ChatStream(ask, id, created_s)

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        return error_body(status, message, field, code)

    def too_long(self, num_prompt: int, context: int) -> AskError:
        message = (
            f"This model's maximum context length is {context} tokens. However, your messages resulted in {num_prompt} "
            "tokens. Please reduce the length of the messages."
        )
        return AskError(message, "messages", TOO_LONG)


def message_body(completion: Completion) -> dict[str, JsonValue]:
    """Encode an assistant message. With tool calls, empty content is null, as SDKs expect."""
    body: dict[str, JsonValue] = {"role": "assistant", "content": completion.content, "refusal": None}
    if completion.thinking:
        body["reasoning_content"] = completion.thinking
    if completion.tool_calls:
        body["content"] = completion.content or None
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}
            for call in completion.tool_calls
        ]
    return body


def _max_tokens(fields: Fields) -> int | None:
    """Read both names of the limit; the older one predates thinking."""
    older, newer = (fields.integer(name, 1, MAX_INT32) for name in ("max_tokens", "max_completion_tokens"))
    if older is not None and newer is not None and older != newer:
        fields.refuse(
            "max_tokens", f"{older} is not max_completion_tokens, {newer}, which replaced it; send that alone"
        )
    return older if newer is None else newer


def _num_top_logprobs(fields: Fields) -> int | None:
    num_top = fields.integer("top_logprobs", 0, 20)
    if not fields.boolean("logprobs"):
        if num_top is not None:
            fields.refuse("top_logprobs", "log-probabilities were not asked for; set logprobs to true")
        return None
    if num_top:
        fields.refuse(
            "top_logprobs", f"expected 0, received {num_top}; the engine tells of the tokens that it sampled alone"
        )
    return 0


def _check_allowed(fields: Fields, *, has_tools: bool) -> None:
    """Check that the fields in `ALLOWED`, if present, ask for nothing that the gateway does not do."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.text(name)
    fields.choice("prompt_cache_retention", ("in_memory", "24h"))
    if (cache := fields.object("prompt_cache_options", frozenset({"mode", "ttl"}))) is not None:
        cache.choice("mode", ("implicit", "explicit"))
        cache.text("ttl")
    if fields.boolean("store"):
        fields.refuse("store", "completions cannot be listed afterwards; send false")
    if fields.value("modalities") not in (None, ["text"]):
        fields.refuse("modalities", "expected ['text']; the model writes nothing else")
    refuse_bias(fields)
    if fields.boolean("parallel_tool_calls") is False and has_tools:
        fields.refuse("parallel_tool_calls", "a policy that is sampled cannot be kept to one call; leave it out")
    _check_format(fields)


def _check_format(fields: Fields) -> None:
    format = fields.object("response_format", frozenset({"type", "json_schema"}))
    if format is not None and (format.value("type") != "text" or format.has("json_schema")):
        fields.refuse(
            "response_format",
            "expected {'type': 'text'}; what a policy samples is not kept to a grammar, so ask for JSON in a message",
        )


def _repeated(fields: Fields) -> dict[str, JsonValue]:
    repeated: dict[str, JsonValue] = {}
    if (metadata := fields.metadata()) is not None:
        repeated["metadata"] = metadata
    if fields.choice("service_tier", ("auto", "default")) is not None:
        repeated["service_tier"] = "default"
    return repeated
