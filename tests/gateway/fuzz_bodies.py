"""Good requests of every dialect, short and long, with and without tools, for tests that break them."""

from typing import Any

from tests.gateway.episodes.test_retry_http import PATHS

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}}
CHAT_CALLS = [
    {"id": id, "type": "function", "function": {"name": "search", "arguments": '{"query": "a"}'}} for id in ("a", "b")
]
CHAT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 16,
    "tools": [{"type": "function", "function": {"name": "search", "description": "Looks.", "parameters": SCHEMA}}],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Find."}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": CHAT_CALLS},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "assistant", "content": "Found."},
        {"role": "user", "content": "More."},
    ],
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "max_output_tokens": 16,
    "tools": [{"type": "function", "name": "search", "parameters": SCHEMA}],
    "input": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Find."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "a", "name": "search", "arguments": '{"query": "a"}'},
        {"type": "function_call_output", "call_id": "a", "output": "one"},
        {"role": "assistant", "content": "Found."},
        {"role": "user", "content": "More."},
    ],
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 16,
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [{"name": "search", "input_schema": SCHEMA}],
    "messages": [
        {"role": "user", "content": "Find."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "a", "name": "search", "input": {"query": "a"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "one"}]},
        {"role": "assistant", "content": "Found."},
        {"role": "user", "content": "More."},
    ],
}
COUNTED = {name: value for name, value in MESSAGES.items() if name != "max_tokens"}
BODIES: dict[str, list[dict[str, Any]]] = {path: [body] for path, body in PATHS.items()}
BODIES["/v1/chat/completions"].append(CHAT)
BODIES["/v1/responses"].append(RESPONSES)
BODIES["/v1/messages"].append(MESSAGES)
BODIES["/v1/messages/count_tokens"] = [COUNTED]


def long_bodies(num_bytes: int) -> dict[str, dict[str, Any]]:
    """Conversations of about that size, a few words in each of many messages."""
    user, answer = {"role": "user", "content": "Some words. " * 20}, {"role": "assistant", "content": "Yes. " * 40}
    turns = [user, answer] * (num_bytes // 500)
    return {
        "/v1/chat/completions": CHAT | {"messages": [*CHAT["messages"], answer, *turns, user]},
        "/v1/responses": RESPONSES | {"input": [*RESPONSES["input"], answer, *turns, user]},
        "/v1/messages": MESSAGES | {"messages": [*MESSAGES["messages"], answer, *turns, user]},
        "/v1/messages/count_tokens": COUNTED | {"messages": [*COUNTED["messages"], answer, *turns, user]},
        "/v1/completions": PATHS["/v1/completions"] | {"prompt": "Some words. " * (num_bytes // 12)},
    }
