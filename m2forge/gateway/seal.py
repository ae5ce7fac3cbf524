"""Thinking as one opaque word, for clients that carry it back without reading it.

A client may ask not to be shown the thinking (Anthropic's `display: omitted`) or to be given a word that stands for it
(OpenAI's `reasoning.encrypted_content`). The word holds the thinking itself, so that a gateway that has forgotten the
conversation still reads it. It keeps no secret: whoever holds it may open it, and it says nothing that the same client
would not be told on asking. A word made by someone else, or damaged on its way, is no thinking of ours and opens to
nothing.
"""

import base64

_PREFIX, _EMPTY = "m2f1.", "m2f0."


def sign(id: str) -> str:
    """A word that holds nothing, for thinking that is shown beside it; `id` makes it differ from others."""
    return _EMPTY + id


def seal(thinking: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(thinking.encode(errors="replace")).decode()


def unseal(word: str) -> str | None:
    """The thinking, or None if the word is not one of ours."""
    if word.startswith(_EMPTY):
        return ""
    if not word.startswith(_PREFIX):
        return None
    try:
        thinking = base64.urlsafe_b64decode(word[len(_PREFIX) :].encode()).decode()
    except ValueError:
        return None
    # The decoder passes over signs that are none of its alphabet.
    return thinking if seal(thinking) == word else None
