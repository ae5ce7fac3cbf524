"""Process rules over parsed completions, from hand-made ones and from what real parsers say."""

import pytest

from m2forge.records import FinishReason
from m2forge.reward.config import RulesConfig
from m2forge.reward.rule import Rule, Step, make_rules, measure
from m2forge.text.message import Message, Tool
from m2forge.text.minimax_m2 import XmlCallParser
from m2forge.text.parser import ProblemKind
from tests.reward.sample import LS, step

RULES = make_rules(RulesConfig())
TOOLS = (Tool("ls", "", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}),)


def parsed(text: str, finish_reason: FinishReason = FinishReason.STOP) -> Step:
    parser = XmlCallParser(TOOLS, end_marker="[e~[", starts_thinking=True)
    parser.feed(text)
    return Step(parser.finish(), finish_reason, (Message("user", "What is in this folder?"),))


def called(name: str, parameters: str) -> str:
    return (
        f'Look.</think>\n\n<minimax:tool_call>\n<invoke name="{name}">\n{parameters}</invoke>\n</minimax:tool_call>[e~['
    )


GOOD_CALL = called("ls", '<parameter name="path">.</parameter>\n')


def test_a_well_formed_call_after_thinking_earns_credit_alone() -> None:
    assert measure(RULES, parsed(GOOD_CALL)) == {"structured_step": 1.0}


def test_an_answer_after_thinking_earns_credit() -> None:
    assert measure(RULES, parsed("Simple.</think>\n\nThere are two files.[e~[")) == {"structured_step": 1.0}


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (called("lss", '<parameter name="path">.</parameter>\n'), {"unknown_tool"}),
        (called("ls", ""), {"bad_argument"}),
        (called("ls", '<parameter name="path">.</parameter>\nhm'), {"malformed_call"}),
        ("Look.</think>\n\n<minimax:tool_call>\n</minimax:tool_call>[e~[", {"malformed_call"}),
        ("Look.</think>\n\n<minimax:tool_call>\n<invoke>\n</invoke>\n</minimax:tool_call>[e~[", {"malformed_call"}),
        (called("rm", "") + " more", {"unknown_tool"}),
        (GOOD_CALL.removesuffix("[e~[") + "and more[e~[", set()),
        ("Look[e~[", set()),
        ("</think>\n\nThere are two files.[e~[", set()),
        (" \n</think>\n\nThere are two files.[e~[", set()),
        ("Look.</think>\n\n[e~[", set()),
    ],
)
def test_what_a_real_parser_finds_reaches_its_rule(text: str, rules: set[str]) -> None:
    assert measure(RULES, parsed(text)).keys() == rules


def test_a_truncated_call_is_malformed_and_an_aborted_one_is_not() -> None:
    cut = GOOD_CALL[:60]
    assert measure(RULES, parsed(cut, FinishReason.LENGTH)) == {"malformed_call": 1.0}
    assert measure(RULES, parsed(cut, FinishReason.ABORT)) == {}


def test_an_answer_truncated_by_the_limit_is_not_well_structured() -> None:
    assert measure(RULES, step(finish_reason=FinishReason.LENGTH)) == {}


def test_several_problems_of_one_kind_count_once() -> None:
    several = step(ProblemKind.MALFORMED_CALL, ProblemKind.MALFORMED_CALL, ProblemKind.BAD_ARGUMENT, calls=(LS,))
    assert measure(RULES, several) == {"malformed_call": 1.0, "bad_argument": 1.0}


@pytest.mark.parametrize("kind", list(ProblemKind))
def test_no_step_with_a_problem_is_well_structured(kind: ProblemKind) -> None:
    assert "structured_step" not in measure(RULES, step(kind, calls=(LS,)))


def test_mixing_languages_is_measured_beside_the_rest() -> None:
    mixed = step(content="We should 首先检查这个文件夹里面的文件 and then answer.")
    found = measure(RULES, mixed)
    assert found.keys() == {"language_mixing", "structured_step"}
    assert found["language_mixing"] == 1.0


def test_rules_carry_configured_weights_and_skip_zero() -> None:
    rules: tuple[Rule, ...] = make_rules(RulesConfig(bad_argument=0.0, structured_step=0.0, unknown_tool=-2.0))
    assert {rule.name: rule.weight for rule in rules} == {
        "malformed_call": -1.0,
        "unknown_tool": -2.0,
        "language_mixing": -0.5,
    }
