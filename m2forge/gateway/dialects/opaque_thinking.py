"""Thinking as an opaque string, for clients that send it back without reading it.

A client may ask to omit the thinking (Anthropic's `display: omitted`) or for an opaque copy of it (OpenAI's
`reasoning.encrypted_content`). The string contains the thinking itself, so that a gateway that no longer has the
conversation can still read it. It is not encrypted: any holder can decode it, and it contains nothing that the same
client could not request. A string of another origin, or a damaged one, is rejected.
"""

import base64

_PREFIX, _EMPTY = "m2f1.", "m2f0."


def sign(id: str) -> str:
    """Return a string without content, for thinking that is shown beside it; `id` makes it unique."""
    return _EMPTY + id


def encode_thinking(thinking: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(thinking.encode(errors="replace")).decode()


def decode_thinking(word: str) -> str | None:
    """Return the thinking, or None if the string is not one of ours."""
    if word.startswith(_EMPTY):
        return ""
    if not word.startswith(_PREFIX):
        return None
    try:
        thinking = base64.urlsafe_b64decode(word[len(_PREFIX) :].encode()).decode()
    except ValueError:
        return None
    # The decoder skips characters outside its alphabet.
    return thinking if encode_thinking(thinking) == word else None
