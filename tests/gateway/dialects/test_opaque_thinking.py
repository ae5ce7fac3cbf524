"""Thinking as one opaque word."""

from hypothesis import given
from hypothesis import strategies as st

from m2forge.gateway.dialects.opaque_thinking import decode_thinking, encode_thinking, sign


@given(st.text())
def test_a_word_opens_to_the_thinking(thinking: str) -> None:
    assert decode_thinking(encode_thinking(thinking)) == thinking


@given(st.text() | st.text(st.characters(codec="ascii")).map("m2f1.".__add__))
def test_what_is_no_word_of_ours_opens_to_nothing(text: str) -> None:
    opened = decode_thinking(text)
    assert opened is None or text in (encode_thinking(opened), sign(text[5:]))


@given(st.text())
def test_a_signature_holds_nothing(id: str) -> None:
    assert decode_thinking(sign(id)) == ""


def test_a_damaged_word_opens_to_nothing() -> None:
    word = encode_thinking("Let me think.")
    assert decode_thinking(word[:-1]) is None
    assert decode_thinking(f"{word[:8]}!{word[8:]}") is None
    assert decode_thinking(encode_thinking("ä")[:-4] + "_w==") is None
