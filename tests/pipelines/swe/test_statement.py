"""Statements: where the text is from, what is removed from it, which names are added; writers and judges."""

import json
from typing import cast

import pytest

from m2forge.pipelines.completion import EndpointError
from m2forge.pipelines.config import EndpointConfig, PipelineConfig
from m2forge.pipelines.stage import Completion, Context, Messages, Rejection
from m2forge.pipelines.swe.candidate import Candidate, Text
from m2forge.pipelines.swe.config import SweConfig
from m2forge.pipelines.swe.pipeline import make_pipeline
from m2forge.pipelines.swe.statement import (
    Rewritten,
    clean,
    judge,
    leaks,
    missing_names,
    rewrite,
    without_quotes,
    write_statement,
)
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


QUOTING = (
    "+++ b/sums.py\n+    return sum(numbers) or default_value\n+    return False\n"
    "+    if not numbers or numbers[0] is None:\n"
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            "Empty sums are wrong. I fixed it with `return sum(numbers) or default_value`. Thanks!",
            "Empty sums are wrong. Thanks!",
        ),
        (
            "Empty sums are wrong:\n\n```\nx\nreturn  sum(numbers) or default_value\n```\nSee there.",
            "Empty sums are wrong:\n\nSee there.",
        ),
        ("Sums fail.\n- when empty\n- if not numbers or\n  numbers[0] is None:", "Sums fail.\n- when empty"),
        ("Sums fail.\n\nIt is: `if not numbers or numbers[0] is: None:`", None),
        ("It must return False for no numbers.", "It must return False for no numbers."),
    ],
)
def test_sentences_that_quote_the_patch_are_removed(text: str, kept: str | None) -> None:
    cleaned = without_quotes(text, QUOTING)
    assert cleaned == (text if kept is None else kept)
    assert not leaks(cleaned, QUOTING)


def test_a_line_of_several_sentences_removes_their_paragraph() -> None:
    patch = "+++ b/sums.py\n+    raise Error('No number! Give one.')\n"
    text = "Sums fail without a number.\n\nDo raise Error('No number! Give one.') there."
    assert without_quotes(text, patch) == "Sums fail without a number."


def test_a_text_that_quotes_the_patch_alone_is_not_used() -> None:
    quoting = Text("issue", "I fixed it with `return sum(numbers)` in the first function")
    found = write_statement(_with((quoting, *projects.candidate().texts)), FAILING, {})
    assert found.kind == "changelog"
    assert "return sum" not in found.text


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("See deadbeefcafe.", "See ."),
        ("Since commit `decafab` and commit 1234567 it fails", "Since commit `` and commit  it fails"),
        ("A decade of facades: 123456789012 days", "A decade of facades: 123456789012 days"),
        (f"Since {'a' * 40} and {'1' * 40}", "Since  and"),
    ],
)
def test_hashes_without_digits_are_removed(text: str, cleaned: str) -> None:
    assert clean(text, "") == cleaned
    assert not leaks(cleaned, "")


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


# -- writers and judges ------------------------------------------------------------------------------------------------

ERRORS = {FAILING[0]: "assert 5 == 6 at 0x7f12ab34cd56"}
GOOD = "`total` must return the sum of all numbers, the first one included."


class Scripted:
    """A context whose model gives these replies in turn."""

    def __init__(self, *replies: object) -> None:
        self._replies, self.prompts = list(replies), list[str]()

    def ask(self, model: str, messages: Messages, *, draw: int = 0) -> Completion:
        self.prompts.append(str(messages[-1]["content"]))
        reply = self._replies.pop(0)
        text = reply if isinstance(reply, str) else json.dumps(reply)
        return Completion({"role": "assistant", "content": text}, "stop", 1, 1)


STATEMENT = write_statement(projects.candidate(), FAILING, ERRORS)


def rewritten(scripted: Scripted) -> Rewritten:
    return rewrite(projects.candidate(), STATEMENT, FAILING, ERRORS, "m", cast("Context", scripted))


def judged(scripted: Scripted) -> Rejection | None:
    return judge(projects.candidate(), STATEMENT, FAILING, "m", cast("Context", scripted))


def test_a_writer_sees_tests_and_errors_and_no_patch() -> None:
    scripted = Scripted("I will.", {"statement": GOOD})
    found = rewritten(scripted)
    assert found.problem is None
    assert found.statement.kind == "model"
    assert GOOD in found.statement.text
    assert "left out the first number" not in found.statement.text
    prompt = scripted.prompts[0]
    assert "left out the first number" in prompt
    assert "test_total_of_all_numbers():\n    assert total([1, 2, 3]) == 6" in prompt
    assert "assert 5 == 6 at 0x…" in prompt
    assert "return sum(numbers)" not in prompt


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"{GOOD} Write return  sum(numbers) there.",
            f"{GOOD} See https://localhost/1.",
            f"{GOOD} As 0a1b2c3d4 does.",
        ),
        *("", "Fix it.", GOOD * 200),
    ],
)
def test_a_statement_that_leaks_or_says_nothing_is_not_used(text: str) -> None:
    found = rewritten(Scripted({"statement": text}))
    assert found.statement == STATEMENT
    assert found.problem is not None


def test_names_that_tests_need_are_added_to_what_a_model_wrote() -> None:
    new = projects.candidate(
        projects.FIXED + "\n\ndef last(numbers):\n    return numbers[-1]\n",
        projects.NEW_TESTS + "\n\ndef test_last():\n    from sums import last\n\n    assert last([1, 2]) == 2\n",
    )
    context = cast("Context", Scripted({"statement": GOOD}))
    assert "- `last`" in rewrite(new, STATEMENT, FAILING, ERRORS, "m", context).statement.text


def test_leaks_are_found_whatever_the_space() -> None:
    patch = projects.candidate().patch
    assert leaks("def total(x):\n    return sum( numbers )", patch) == ["return sum(numbers)"]
    assert leaks("Sums of numbers, 1234567 of them, by deadbeef.", patch) == []


@pytest.mark.parametrize(
    ("consistent", "solvable", "reason"),
    [
        (True, True, None),
        (True, False, "needs guessing"),
        (False, True, "statement contradicts tests"),
        (False, False, "statement contradicts tests"),
    ],
)
def test_a_judge_rejects_with_its_text(consistent: bool, solvable: bool, reason: str | None) -> None:
    answer = {"consistent": consistent, "solvable": solvable, "why": "The value 6 is not said."}
    scripted = Scripted({"consistent": "yes"}, answer)
    found = judged(scripted)
    assert (None if found is None else found.reason) == reason
    assert STATEMENT.text in scripted.prompts[0]
    assert "assert total([1, 2, 3]) == 6" in scripted.prompts[0]
    assert "return sum(numbers)" not in scripted.prompts[0]
    if found is not None:
        assert found.evidence["judge"] == "The value 6 is not said."


def test_a_judge_that_says_nothing_usable_fails_the_item() -> None:
    with pytest.raises(EndpointError, match="no usable response in 3 draws"):
        judged(Scripted("yes", "[]", "{}"))


def test_stages_of_models_are_there_if_they_are_named() -> None:
    models = {"m": EndpointConfig(url="http://127.0.0.1:1", model="m")}
    plain = SweConfig(sdists=("a 1 2",))
    full = SweConfig.model_validate({"sdists": ("a 1 2",), "writer": "m", "judge": "m", "build_model": {"model": "m"}})
    names = {stage.name for stage in make_pipeline(full).stages} - {stage.name for stage in make_pipeline(plain).stages}
    assert names == {"rewrite", "judge", "repair-1", "repair-2", "repair-3", "repair-4"}
    PipelineConfig(name="a", swe=full, models=models)
    for wrong in ({"writer": "n"}, {"judge": "n"}, {"build_model": {"model": "n"}}):
        swe = SweConfig.model_validate({"sdists": ("a 1 2",), **wrong})
        with pytest.raises(ValueError, match=r"no table models\.n"):
            PipelineConfig(name="a", swe=swe, models=models)
