"""OpenAI's list of models: `GET /v1/models` and `GET /v1/models/NAME`.

A gateway serves one policy under any number of names, because agents insist on the names they know.

Request fields and response parts that OpenAI's completion dialects share.

Besides OpenAI's own fields it reads `top_k`, `min_p` and `repetition_penalty`, under the names that open source servers
use: they are sampling parameters and can be honoured.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from m2forge.gateway.dialects.types import Ending, Fields, TokenLogprob, Usage, read_text, shown
from m2forge.records import MAX_INT32, JsonValue, Sampling
from m2forge.text.message import ToolCall

SAMPLING_FIELDS = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty"}
)
MAX_STOPS, MAX_SEED = 4, 2**63 - 1
LOWEST_LOGPROB = -9999.0
"""Replaces a logprob that JSON cannot represent."""
DONE = b"data: [DONE]\n\n"

FINISH_REASONS: Mapping[Ending, str] = {
    Ending.STOP: "stop",
    Ending.STOP_TEXT: "stop",
    Ending.LENGTH: "length",
    Ending.TOOL_CALLS: "tool_calls",
    # OpenAI has no such finish reason; clients take "length" for a text that was cut off.
    Ending.ABORT: "length",
}

TOO_LONG = "context_length_exceeded"
"""Error code for a prompt that does not fit the context."""
TOO_FAST = "rate_limit_exceeded"
"""Error code for more connections than a key may have; a client waits and retries."""
_ERRORS: Mapping[int, tuple[str, str | None]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("insufficient_quota", "insufficient_quota"),
    503: ("server_error", "service_unavailable"),
}
"""Type and code of an error by HTTP status. A 429 without another code is a spent budget, which no retry changes."""

quote = json.JSONEncoder().encode
"""Encodes JSON in ASCII: Unicode line separators would break event lines for some clients."""


def read_sampling(fields: Fields) -> Sampling:
    numbers = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 0, 10),
    }
    given = {name: value for name, value in numbers.items() if value is not None}
    for name in ("top_p", "repetition_penalty"):
        if given.get(name) == 0:
            fields.refuse(name, "expected a number above 0, received 0; set temperature to 0 for the likeliest tokens")
    # Open source servers use -1 for no limit, which is 0 here.
    top_k = max(fields.integer("top_k", -1, MAX_INT32) or 0, 0)
    return Sampling(**given, top_k=top_k)


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


def read_tool_choice(fields: Fields) -> Literal["auto", "none"]:
    choice = fields.value("tool_choice")
    if choice not in (None, "auto", "none"):
        kind = choice.get("type") if isinstance(choice, Mapping) else choice
        reason = "a sampled model cannot be forced to call a tool, nor kept from one that is offered"
        fields.refuse("tool_choice", f"expected 'auto' or 'none', received {shown(kind)}; {reason}")
    return "none" if choice == "none" else "auto"


def refuse_bias(fields: Fields) -> None:
    """Refuse logit biases; an empty object is allowed."""
    if fields.value("logit_bias") not in (None, {}):
        fields.refuse("logit_bias", "tokens cannot be biased: they would not be samples of the policy; leave it out")


def usage_body(usage: Usage) -> dict[str, JsonValue]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_sampled,
        "total_tokens": usage.num_prompt + usage.num_sampled,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        "completion_tokens_details": {"reasoning_tokens": usage.num_thinking},
    }


def error_body(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, JsonValue]:
    kind, usual = _ERRORS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    kind = "requests" if code == TOO_FAST else kind
    return {"error": {"message": message, "type": kind, "param": field, "code": code or usual}}


def arguments_text(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def token_bodies(logprobs: Iterable[TokenLogprob]) -> list[JsonValue]:
    """A token may be part of a character: its bytes are exact, its text is not."""
    return [
        {
            "token": token.text.decode(errors="replace"),
            "logprob": finite_logprob(token.logprob),
            "bytes": list(token.text),
            "top_logprobs": [],
        }
        for token in logprobs
    ]


def logprobs_body(logprobs: Iterable[TokenLogprob]) -> dict[str, JsonValue]:
    """Encode the logprobs of a chat completion's choice."""
    return {"content": token_bodies(logprobs), "refusal": None}


def finite_logprob(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


PATH = "/v1/models"
OWNER = "m2forge"


def models_body(names: Sequence[str], created_s: int) -> dict[str, JsonValue]:
    return {"object": "list", "data": [model_body(name, created_s) for name in names]}


def model_body(name: str, created_s: int) -> dict[str, JsonValue]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": OWNER}
