"""Thinking as one opaque word."""

from hypothesis import given
from hypothesis import strategies as st

from m2forge.gateway.dialects.opaque_thinking import seal, sign, unseal


@given(st.text())
def test_a_word_opens_to_the_thinking(thinking: str) -> None:
    assert unseal(seal(thinking)) == thinking


@given(st.text() | st.text(st.characters(codec="ascii")).map("m2f1.".__add__))
def test_what_is_no_word_of_ours_opens_to_nothing(text: str) -> None:
    opened = unseal(text)
    assert opened is None or text in (seal(opened), sign(text[5:]))


@given(st.text())
def test_a_signature_holds_nothing(id: str) -> None:
    assert unseal(sign(id)) == ""


def test_a_damaged_word_opens_to_nothing() -> None:
    word = seal("Let me think.")
    assert unseal(word[:-1]) is None
    assert unseal(f"{word[:8]}!{word[8:]}") is None
    assert unseal(seal("ä")[:-4] + "_w==") is None
