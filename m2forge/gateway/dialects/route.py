"""The gateway's dialects by request path, and the reading of a body: bytes in, an `Ask` out.

Reading is a pure function of path and body, so it may run in another process.
"""

import hashlib
from collections.abc import Callable, Mapping

from m2forge.gateway.dialects.anthropic.messages import AnthropicMessages
from m2forge.gateway.dialects.openai.chat import OpenAIChat
from m2forge.gateway.dialects.openai.completions import OpenAICompletions
from m2forge.gateway.dialects.openai.responses import OpenAIResponses
from m2forge.gateway.dialects.types import Ask, AskError
from m2forge.gateway.http.limits import parse_body
from m2forge.records import JsonValue

CHAT, RESPONSES, COMPLETIONS, MESSAGES = OpenAIChat(), OpenAIResponses(), OpenAICompletions(), AnthropicMessages()
_DIGEST_LENGTH = 32


def read_ask(path: str, body: bytes, max_depth: int) -> Ask:
    """Raises `Refusal` if the body is not a JSON object and `AskError` if its dialect cannot honour it."""
    return _reader(path)(parse_body(body, max_depth))


def digest_of(path: str, body: bytes) -> str:
    """Return a hash that identifies a request within its episode."""
    hashed = hashlib.sha256(b"%b " % path.encode())
    hashed.update(body)
    return hashed.hexdigest()[:_DIGEST_LENGTH]


def too_long(path: str, num_tokens: int, context: int) -> AskError:
    """Return the vendor's error for a prompt of at least `num_tokens`, on which its clients truncate their history."""
    if path == MESSAGES.count_path:
        return MESSAGES.too_long(num_tokens, context)
    dialects = (CHAT, RESPONSES, COMPLETIONS, MESSAGES)
    return next(dialect for dialect in dialects if dialect.path == path).too_long(num_tokens, context)


def _reader(path: str) -> Callable[[Mapping[str, JsonValue]], Ask]:
    if path == MESSAGES.count_path:
        return MESSAGES.read_count
    return next(dialect.read for dialect in (CHAT, RESPONSES, COMPLETIONS, MESSAGES) if dialect.path == path)
