"""OpenAI's Responses: `POST /v1/responses`.

`openai_responses_read.py` decides what a request may contain, `openai_responses_item.py` reads the conversation's
items, `openai_responses_output.py` builds the response's items, and `openai_responses_stream.py` streams them.
"""

from collections.abc import Mapping, Sequence

from m2forge.gateway.exchange import Answer, Ask, AskError, Usage
from m2forge.gateway.openai_body import TOO_LONG, error_body
from m2forge.gateway.openai_responses_output import ending_body, items_body, response_body
from m2forge.gateway.openai_responses_read import read_ask
from m2forge.gateway.openai_responses_stream import ResponsesStream
from m2forge.records import JsonValue


class OpenAIResponses:
    path = "/v1/responses"

    def read(self, body: Mapping[str, JsonValue]) -> Ask:
        return read_ask(body)

    def answer(
        self, ask: Ask, id: str, created_s: int, answers: Sequence[Answer], usage: Usage
    ) -> dict[str, JsonValue]:
        (answer,) = answers
        return response_body(ask, id, created_s) | ending_body(answer.ending, items_body(ask, id, answer), usage)

    def stream(self, ask: Ask, id: str, created_s: int) -> ResponsesStream:
        return ResponsesStream(ask, id, created_s)

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        return error_body(status, message, field, code)

    def too_long(self, num_prompt: int, context: int) -> AskError:
        message = (
            "Your input exceeds the context window of this model. Please adjust your input and try again. It is "
            f"{num_prompt} tokens long, the context window {context}."
        )
        return AskError(message, "input", TOO_LONG)
