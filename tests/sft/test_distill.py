"""Prompt distillation: what counts as a part, what is left, how often it is dropped."""

from typing import Literal

import pytest

from m2forge.config import build
from m2forge.errors import ConfigError
from m2forge.sft.config import PromptPart
from m2forge.sft.dataset import draw_dropped, drop_parts
from m2forge.text.message import Message

PROMPT = """\
You are careful.

## Rules
Never guess.

### Exceptions
```
## Rules
```

## Style
Be brief. Be kind.
"""


def part(kind: Literal["text", "regex", "heading"], match: str, rate: float = 1.0) -> PromptPart:
    return PromptPart(kind=kind, match=match, rate=rate)


def dropped(*parts: PromptPart) -> str:
    messages, _ = drop_parts([Message("system", PROMPT), Message("user", PROMPT)], parts)
    assert messages[-1] == Message("user", PROMPT)
    return messages[0].content if len(messages) == 2 else ""


def test_a_heading_takes_its_section_and_what_stands_below_it() -> None:
    assert dropped(part("heading", "## Rules")) == "You are careful.\n\n## Style\nBe brief. Be kind."
    assert dropped(part("heading", "### Exceptions")) == (
        "You are careful.\n\n## Rules\nNever guess.\n\n## Style\nBe brief. Be kind."
    )
    assert dropped(part("heading", "## Style")).endswith("```")


def test_a_text_and_a_pattern_take_what_they_match() -> None:
    assert dropped(part("text", " Be kind.")).endswith("Be brief.")
    assert dropped(part("text", "You are careful.")).startswith("## Rules\nNever")
    assert dropped(part("regex", r"^Be .*$")).endswith("## Style")
    assert dropped(part("regex", r"q*")) == PROMPT


def test_parts_may_overlap() -> None:
    parts = part("text", "Never guess."), part("heading", "## Rules"), part("regex", r"guess\.\n\n### Ex")
    assert dropped(*parts) == dropped(part("heading", "## Rules"))


def test_a_prompt_without_the_part_stays_as_it_is() -> None:
    assert dropped(part("heading", "# Rules"), part("text", "absent")) == PROMPT


def test_a_prompt_left_empty_is_no_message() -> None:
    messages, stays = drop_parts([Message("system", "All of it."), Message("user", "go")], [part("text", "All of it.")])
    assert messages == (Message("user", "go"),)
    assert stays == (False, True)


def test_parts_are_dropped_at_their_rates_and_independently() -> None:
    parts = [part("text", "a", 0.0), part("text", "b", 0.3), part("text", "c", 0.7), part("text", "d", 1.0)]
    num = 8000
    draws = [draw_dropped(parts, 1, f"0/{number}", draw) for number in range(num // 4) for draw in range(4)]
    shares = [sum(column) / num for column in zip(*draws, strict=True)]
    assert shares[0] == 0
    assert shares[3] == 1
    # Five standard errors: sqrt(0.3 * 0.7 / 8000) is 0.005.
    assert shares[1] == pytest.approx(0.3, abs=0.026)
    assert shares[2] == pytest.approx(0.7, abs=0.026)
    both = sum(b and c for _, b, c, _ in draws) / num
    assert both == pytest.approx(0.21, abs=0.023)


def test_draws_depend_on_seed_trajectory_and_draw_alone() -> None:
    parts = [part("text", "x", 0.5)] * 64
    base = draw_dropped(parts, 1, "0/0", 0)
    assert base == draw_dropped(parts, 1, "0/0", 0)
    others = [draw_dropped(parts, 2, "0/0", 0), draw_dropped(parts, 1, "0/1", 0), draw_dropped(parts, 1, "0/0", 1)]
    assert base not in others


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"kind": "regex", "match": "(", "rate": 0.5}, "must be a regular expression"),
        ({"kind": "heading", "match": "Rules", "rate": 0.5}, "must be a heading with its marks"),
        ({"kind": "text", "match": "Rules", "rate": 1.5}, "less than or equal to 1"),
    ],
)
def test_parts_that_cannot_be_are_refused(data: dict[str, str | float], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        build(PromptPart, data)
