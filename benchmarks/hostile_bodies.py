"""Bodies of requests that cost a careless gateway seconds: few bytes for each thing that must be parsed or compared.

`make_bodies` gives them by a name, each with its path. `NONCE` in a body is replaced by every sender, so that no two
requests are the same. Those named `fits …` are as large as a gateway with `context` tokens accepts: what they cost is
not spared by a refusal.
"""

import json
from collections.abc import Callable, Mapping

NONCE = b"@@@@@@@@@@@@"
CHAT, RESPONSES, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/messages"
_MODEL = {"model": "m", "max_tokens": 4}


def make_bodies(num_bytes: int, context: int) -> Mapping[str, tuple[str, bytes]]:
    user = {"role": "user", "content": NONCE.decode()}
    bodies: dict[str, tuple[str, bytes]] = {}

    def add(name: str, path: str, field: str, item: str, rest: str = "") -> None:
        """`item` as often as there is room, `%d` in it a number, in the list `field`."""
        rest = rest or (
            f', "messages": [{json.dumps(user)}]' if path != RESPONSES else f', "input": "{NONCE.decode()}"'
        )
        head = f'{json.dumps(_head(path))[:-1]}{rest if field != "messages" and field != "input" else ""}, "{field}": ['
        number = max((num_bytes - len(head)) // (len(item) + 3), 1)
        items = (item % index for index in range(number)) if "%d" in item else (item for _ in range(number))
        bodies[name] = path, f"{head}{','.join(items)}]}}".encode()

    tiny = '{"role":"user","content":"a"}'
    add("tiny messages, chat", CHAT, "messages", tiny)
    add("tiny messages, responses", RESPONSES, "input", tiny)
    add("tiny messages, anthropic", MESSAGES, "messages", tiny)
    add("empty answers, chat", CHAT, "messages", '{"role":"assistant","content":""}')
    add("systems, chat", CHAT, "messages", '{"role":"system","content":"a"}')
    add("systems, responses", RESPONSES, "input", '{"role":"system","content":"a"}')
    add("systems, anthropic", MESSAGES, "system", '{"type":"text","text":"a"}')
    add("tools, chat", CHAT, "tools", '{"type":"function","function":{"name":"f%d"}}')
    add("tools, responses", RESPONSES, "tools", '{"type":"function","name":"f%d"}')
    add("tools, anthropic", MESSAGES, "tools", '{"name":"f%d","input_schema":{}}')
    add("prompt ids", COMPLETIONS, "prompt", "1", "  ")
    bodies |= {
        name: (path, json.dumps(_head(path) | body).encode()) for name, (path, body) in _built(num_bytes).items()
    }
    bodies |= {
        name: (path, json.dumps(_head(path) | body).encode()) for name, (path, body) in _fitting(context).items()
    }
    opened = json.dumps(_head(CHAT))[:-1].encode()
    bodies["brackets"] = CHAT, opened + b', "messages": ' + b"[" * num_bytes
    bodies["many brackets"] = CHAT, opened + b', "messages": [' + b"[]," * (num_bytes // 3) + b"0]}"
    bodies["escapes"] = (
        CHAT,
        opened + b', "messages": [{"role": "user", "content": "' + b"\\u0061" * (num_bytes // 6) + b'"}]}',
    )
    return bodies


def _head(path: str) -> dict[str, object]:
    return {"model": "m", "max_output_tokens": 4} if path == RESPONSES else dict(_MODEL)


def _calls(number: int, name: Callable[[int], str]) -> list[object]:
    """An assistant message with `number` tool calls, and their results."""
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": name(index), "arguments": "{}"}}
        for index in range(number)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{index}", "content": ""} for index in range(number)]
    asked = {"role": "user", "content": NONCE.decode()}
    return [asked, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def _built(num_bytes: int) -> dict[str, tuple[str, dict[str, object]]]:
    user = {"role": "user", "content": NONCE.decode()}
    number = num_bytes // 130
    uses = [{"type": "tool_use", "id": f"c{index}", "name": "f", "input": {}} for index in range(number)]
    results = [{"type": "tool_result", "tool_use_id": f"c{index}"} for index in range(number)]
    made = [
        {"type": "function_call", "call_id": f"c{index}", "name": "f", "arguments": "{}"} for index in range(number)
    ]
    told = [{"type": "function_call_output", "call_id": f"c{index}", "output": ""} for index in range(number)]
    parts = [{"type": "text", "text": "a"}] * (num_bytes // 30)
    items = [{"type": "input_text", "text": "a"}] * (num_bytes // 38)
    keys = {f"k{index}": index for index in range(num_bytes // 16)}
    return {
        "calls, chat": (CHAT, {"messages": _calls(num_bytes // 150, lambda index: "f")}),
        "call names, chat": (CHAT, {"messages": _calls(8, lambda index: "f" * (num_bytes // 8))}),
        "calls, anthropic": (
            MESSAGES,
            {"messages": [user, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]},
        ),
        "calls, responses": (RESPONSES, {"input": [user, *made, *told]}),
        "parts, chat": (CHAT, {"messages": [{"role": "user", "content": parts}]}),
        "blocks, anthropic": (MESSAGES, {"messages": [{"role": "user", "content": parts}]}),
        "parts, responses": (RESPONSES, {"input": [{"role": "user", "content": items}]}),
        "one text, chat": (CHAT, {"messages": [{"role": "user", "content": "some words " * (num_bytes // 11)}]}),
        "one word, chat": (CHAT, {"messages": [{"role": "user", "content": "a" * num_bytes}]}),
        "one text, completions": (COMPLETIONS, {"prompt": "some words " * (num_bytes // 11)}),
        "spaces, completions": (COMPLETIONS, {"prompt": " " * num_bytes}),
        "a key": (CHAT, {"messages": [user], "k" * num_bytes: 1}),
        "keys": (CHAT, {"messages": [user], **keys}),
        "schema, chat": (
            CHAT,
            {"messages": [user], "tools": [{"type": "function", "function": {"name": "f", "parameters": keys}}]},
        ),
        "arguments, chat": (
            CHAT,
            {
                "messages": [
                    user,
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(keys)}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c", "content": ""},
                ]
            },
        ),
    }


def _fitting(context: int) -> dict[str, tuple[str, dict[str, object]]]:
    user = {"role": "user", "content": NONCE.decode()}
    number = min(context // 12, 4000)
    pair = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    return {
        "fits: tiny messages": (CHAT, {"messages": [user, *({"role": "user", "content": "a"} for _ in range(number))]}),
        "fits: turns": (CHAT, {"messages": [user, *(pair * (context // 48))]}),
        "fits: calls": (CHAT, {"messages": _calls(context // 80, lambda index: "f")}),
        "fits: text": (CHAT, {"messages": [user, {"role": "user", "content": "words " * (context // 8)}]}),
        "fits: prompt": (COMPLETIONS, {"prompt": NONCE.decode() + "words " * (context // 8)}),
        "fits: messages": (
            CHAT,
            {"messages": [user, *({"role": "user", "content": "words " * 10} for _ in range(context // 100))]},
        ),
    }
