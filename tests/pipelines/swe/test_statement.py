"""Statements: where the text is from, what is removed from it, and which names are added."""

import pytest

from m2forge.pipelines.swe.candidate import Candidate, Text
from m2forge.pipelines.swe.statement import clean, missing_names, write_statement
from tests.pipelines.swe import projects

FAILING = ("tests/test_sums.py::test_total_of_all_numbers",)


def test_links_hashes_references_and_patch_lines_are_removed() -> None:
    patch = "+++ b/sums.py\n+    return sum(numbers) or 0\n+++ b/CHANGES.md\n+Fix the sum of all numbers.\n"
    text = (
        "Fix the sum of all numbers. (#12, by @me)\nSee https://example.com/pull/3 and 1a2b3c4d5e.\n"
        "    return sum(numbers) or 0\n- `#5 <https://example.com/5>`_: [a page](https://example.com) is decade old\n"
        "+++ b/sums.py\nCo-authored-by: a <a@b.c>\n"
    )
    cleaned = clean(text, patch)
    for leak in ("example.com", "1a2b3c4d5e", "return sum", "#12", "@me", "+++", "Co-authored"):
        assert leak not in cleaned
    assert "Fix the sum of all numbers." in cleaned
    assert "a page is decade old" in cleaned


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("Fix #361: Handle None in a/b#3 too", "Handle None in  too"),
        ("Add cache_info() support for @cachedmethod.", "Add cache_info() support for @cachedmethod."),
        ("Thanks to @one and @two: it works", ": it works"),
        ("It raises now. See #12.\n\n.\n\nMore", "It raises now.\n\nMore"),
    ],
)
def test_cleaning_leaves_what_belongs_to_the_change(text: str, cleaned: str) -> None:
    assert clean(text, "") == cleaned


def test_an_issue_comes_before_commit_and_changelog() -> None:
    candidate = projects.candidate()
    assert write_statement(candidate, FAILING, {}).kind == "changelog"
    texts = (*candidate.texts, Text("commit", "Fix the sum of the numbers"), Text("issue", "total() is wrong by one"))
    found = write_statement(_with(texts), FAILING, {})
    assert found.kind == "issue"
    assert "total() is wrong by one" in found.text
    # A text that says nothing is left out.
    assert write_statement(_with((Text("commit", "v1.1"), *candidate.texts)), FAILING, {}).kind == "changelog"


def test_without_a_text_failing_tests_make_the_statement() -> None:
    found = write_statement(_with(()), FAILING, {FAILING[0]: "assert 5 == 6\nmore"})
    assert found.kind == "tests"
    assert "- total of all numbers: `assert 5 == 6`" in found.text
    assert "sum(numbers)" not in found.text


def test_names_that_only_hidden_tests_know_are_listed() -> None:
    source = projects.FIXED + "\n\ndef middle(numbers, rounding=None):\n    return mock(numbers)\n"
    tests = (
        "import sums\nfrom unittest import mock\n\n\n"
        "def test_middle():\n    assert sums.middle([1], rounding=2).imag == sums.first([1])\n"
    )
    candidate = projects.candidate(source, tests)
    assert missing_names(candidate) == ["middle", "rounding"]
    assert "- `rounding`" in write_statement(candidate, FAILING, {}).text
    assert missing_names(projects.candidate()) == []


def _with(texts: tuple[Text, ...]) -> Candidate:
    data = projects.candidate().to_dict() | {"texts": [{"kind": text.kind, "text": text.text} for text in texts]}
    return Candidate.from_dict(data, projects.candidate().base)
