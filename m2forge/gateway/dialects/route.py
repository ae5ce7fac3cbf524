"""The gateway's dialects by request path."""

from m2forge.gateway.dialects.anthropic.messages import AnthropicMessages
from m2forge.gateway.dialects.openai.chat import OpenAIChat
from m2forge.gateway.dialects.openai.completions import OpenAICompletions
from m2forge.gateway.dialects.openai.responses import OpenAIResponses
from m2forge.gateway.dialects.types import Dialect

CHAT, RESPONSES, COMPLETIONS, MESSAGES = OpenAIChat(), OpenAIResponses(), OpenAICompletions(), AnthropicMessages()
DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in (CHAT, RESPONSES, COMPLETIONS, MESSAGES)}
