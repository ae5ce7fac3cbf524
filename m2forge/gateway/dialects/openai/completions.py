"""OpenAI's Completions: `POST /v1/completions`, a raw prompt continued without a chat format.

The prompt is one text or one list of token ids, optionally wrapped in a list of one; several prompts need several
requests. As with OpenAI, `max_tokens` defaults to 16. Every field that the SDK can send is handled, as for Chat
Completions.

The sampled text is the completion's `content`, whatever markers it contains. Logprobs cover all sampled tokens,
including a stop token that is not part of the text.
"""

import codecs
from collections.abc import Mapping, Sequence

from m2forge.gateway.dialects.openai.chat import (
    DONE,
    FINISH_REASONS,
    SAMPLING_FIELDS,
    TOO_LONG,
    error_body,
    finite_logprob,
    quote,
    read_num_samples,
    read_sampling,
    read_seed,
    read_stop,
    read_stream,
    refuse_bias,
    requested_sampling,
    usage_body,
)
from m2forge.gateway.dialects.types import (
    READ_DEFAULTS,
    BadRequestError,
    CompletionOutput,
    CompletionRequest,
    Ending,
    Fields,
    ReadOptions,
    TokenLogprob,
    Usage,
    read_list,
    refuse_value,
)
from m2forge.records import MAX_INT32, JsonValue
from m2forge.text.parser import ContentDelta, Event

READ = SAMPLING_FIELDS | {"model", "prompt", "max_tokens", "stop", "n", "seed", "logprobs", "stream", "stream_options"}
ALLOWED = frozenset({"user", "best_of", "echo", "logit_bias", "suffix"})
FIELDS = READ | ALLOWED
DEFAULT_MAX_TOKENS = 16


class OpenAICompletions:
    path = "/v1/completions"

    def read(self, body: Mapping[str, JsonValue], options: ReadOptions = READ_DEFAULTS) -> CompletionRequest:
        fields = Fields(body, FIELDS)
        num_samples = read_num_samples(fields)
        _check_allowed(fields, num_samples)
        is_streamed, echo = read_stream(fields)
        return CompletionRequest(
            messages=(),
            prompt=_prompt(fields),
            max_tokens=fields.integer("max_tokens", 1, MAX_INT32) or DEFAULT_MAX_TOKENS,
            sampling=read_sampling(fields),
            requested_sampling=requested_sampling(fields),
            stop_texts=read_stop(fields),
            seed=read_seed(fields),
            num_samples=num_samples,
            is_streamed=is_streamed,
            num_top_logprobs=_num_top_logprobs(fields),
            model=fields.required_text("model"),
            echo=echo,
        )

    def response(
        self, request: CompletionRequest, id: str, created_s: int, outputs: Sequence[CompletionOutput], usage: Usage
    ) -> dict[str, JsonValue]:
        choices = [
            {
                "index": index,
                "text": output.completion.content,
                "logprobs": None if request.num_top_logprobs is None else _Offsets().body(output.logprobs),
                "finish_reason": _finish_reason(output.ending),
            }
            for index, output in enumerate(outputs)
        ]
        return {
            "id": id,
            "object": "text_completion",
            "created": created_s,
            "model": request.model,
            "choices": choices,
            "usage": usage_body(usage),
        }

    def stream(self, request: CompletionRequest, id: str, created_s: int) -> "CompletionStream":
        return CompletionStream(request, id, created_s)

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        return error_body(status, message, field, code)

    def too_long(self, num_prompt: int, context: int) -> BadRequestError:
        message = (
            f"This model's maximum context length is {context} tokens, however you requested {num_prompt + 1} tokens "
            f"({num_prompt} in your prompt; 1 for the completion). Please reduce your prompt; or completion length."
        )
        return BadRequestError(message, "prompt", TOO_LONG)


COMPLETIONS = OpenAICompletions()


class CompletionStream:
    """Chunks are responses with a piece of the text; the last one of each choice has its finish reason."""

    def __init__(self, request: CompletionRequest, id: str, created_s: int) -> None:
        same = {"id": id, "object": "text_completion", "created": created_s, "model": request.model}
        self._head = f'data: {quote(same)[:-1]}, "choices": ['
        self._starts = [f'{self._head}{{"index": {n}, "text": ' for n in range(request.num_samples)]
        self._has_usage = bool(request.echo.get("include_usage"))
        self._tail = '], "usage": null}\n\n' if self._has_usage else "]}\n\n"
        self._plain_end = f', "logprobs": null, "finish_reason": null}}{self._tail}'
        self._offsets = None if request.num_top_logprobs is None else [_Offsets() for _ in range(request.num_samples)]

    def begin(self, num_prompt: int, num_cached: int) -> bytes:
        return b""

    def piece(self, sample: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> bytes:
        assert all(isinstance(event, ContentDelta) for event in events), "a raw prompt has no parser"
        text = "".join(event.text for event in events if isinstance(event, ContentDelta))
        if self._offsets is not None and logprobs:
            logprob_body = quote(self._offsets[sample].body(logprobs))
            end = f', "logprobs": {logprob_body}, "finish_reason": null}}{self._tail}'
            return f"{self._starts[sample]}{quote(text)}{end}".encode()
        return f"{self._starts[sample]}{quote(text)}{self._plain_end}".encode() if text else b""

    def end_sample(self, sample: int, output: CompletionOutput) -> bytes:
        reason = _finish_reason(output.ending)
        return f'{self._starts[sample]}"", "logprobs": null, "finish_reason": "{reason}"}}{self._tail}'.encode()

    def finish(self, usage: Usage) -> bytes:
        if not self._has_usage:
            return DONE
        return f'{self._head}], "usage": {quote(usage_body(usage))}}}\n\n'.encode() + DONE

    def fail(self, status: int, message: str) -> bytes:
        return f"data: {quote(error_body(status, message))}\n\n".encode()


class _Offsets:
    """Computes the character offset of each token in the completion's text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def body(self, logprobs: Sequence[TokenLogprob]) -> dict[str, JsonValue]:
        offsets = []
        for token in logprobs:
            offsets.append(self._num_characters)
            self._num_characters += len(self._decoder.decode(token.text))
        return {
            "tokens": [token.text.decode(errors="replace") for token in logprobs],
            "token_logprobs": [finite_logprob(token.logprob) for token in logprobs],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _finish_reason(ending: Ending) -> str:
    """Return the finish reason; there are no tools here, so tool calls cannot end a completion."""
    return "stop" if ending is Ending.TOOL_CALLS else FINISH_REASONS[ending]


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    value = fields.value("prompt")
    if not isinstance(value, str):
        values = read_list(value, "prompt")
        if len(values) == 1 and not isinstance(values[0], int):
            value = values[0]
        elif values and not isinstance(values[0], int):
            fields.refuse("prompt", f"expected one prompt, received {len(values)}; send them one by one")
    if isinstance(value, str):
        if not value:
            fields.refuse("prompt", "expected text, received an empty one; there is nothing to continue")
        return value
    ids = read_list(value, "prompt")
    if not ids:
        fields.refuse("prompt", "expected token ids, received an empty list; there is nothing to continue")
    return tuple(_token(id, f"prompt[{index}]") for index, id in enumerate(ids))


def _token(value: JsonValue, location: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INT32:
        refuse_value(location, f"a token id from 0 to {MAX_INT32}", value)
    return value


def _num_top_logprobs(fields: Fields) -> int | None:
    num_top = fields.integer("logprobs", 0, 20)
    if num_top:
        fields.refuse("logprobs", f"expected 0, received {num_top}; the engine reports logprobs only of sampled tokens")
    return num_top


def _check_allowed(fields: Fields, num_samples: int) -> None:
    """Check that the fields in `ALLOWED`, if present, ask for nothing that the gateway does not do."""
    fields.text("user")
    best_of = fields.integer("best_of", 1, MAX_INT32)
    if best_of is not None and best_of != num_samples:
        fields.refuse("best_of", f"expected n, {num_samples}, received {best_of}; all that is sampled is answered")
    if fields.boolean("echo"):
        fields.refuse("echo", "the prompt is not repeated; send false")
    if fields.text("suffix"):
        fields.refuse("suffix", "text cannot be inserted before other text; leave it out")
    refuse_bias(fields)
