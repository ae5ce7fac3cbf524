"""Process rules: rewards and penalties for a step, independent of the task's result.

A rule measures a step from 0 to 1 and has a weight: the process reward of a step is Σ weight · measure, where positive
weights are by default divided by the number of steps (`reward/composition.py`). A negative weight is a penalty, a
positive one a credit.

    malformed_call   1 if a tool call could not be parsed: no name or arguments, not closed, or with text inside
    bad_argument     1 if an argument is missing, unknown, duplicate or of another type than the tool's schema
    unknown_tool     1 if a call names a tool that was not offered
    language_mixing  how much foreign scripts are mixed in (`reward/mixing.py`)
    structured_step  1 if the step has thinking, then a call or content, finished with "stop", and has no problem

No rule measures an aborted step, because the policy did not end it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from m2forge.records import FinishReason
from m2forge.reward.config import MixingConfig, RulesConfig
from m2forge.reward.mixing import mixing
from m2forge.reward.step import Step
from m2forge.text.completion import ProblemKind


class Rule(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    def measure(self, step: Step) -> float:
        """Measure from 0, the rule does not apply, to 1."""
        ...


@dataclass(frozen=True, slots=True)
class ProblemRule:
    """Measures 1 if the parser found one of these problems."""

    name: str
    weight: float
    kinds: frozenset[ProblemKind]

    def measure(self, step: Step) -> float:
        return float(any(problem.kind in self.kinds for problem in step.completion.problems))


@dataclass(frozen=True, slots=True)
class MixingRule:
    weight: float
    config: MixingConfig
    name: str = "language_mixing"

    def measure(self, step: Step) -> float:
        return mixing(step.completion, step.context, self.config)


@dataclass(frozen=True, slots=True)
class StructureRule:
    weight: float
    name: str = "structured_step"

    def measure(self, step: Step) -> float:
        completion = step.completion
        return float(
            step.finish_reason is FinishReason.STOP
            and not completion.problems
            and bool(completion.thinking.strip())
            and bool(completion.tool_calls or completion.content.strip())
        )


MALFORMED_KINDS = frozenset((ProblemKind.MALFORMED_CALL, ProblemKind.UNCLOSED_CALL, ProblemKind.TEXT_IN_CALL))


def make_rules(config: RulesConfig) -> tuple[Rule, ...]:
    """The rules whose weight is not 0."""
    rules: tuple[Rule, ...] = (
        ProblemRule("malformed_call", config.malformed_call, MALFORMED_KINDS),
        ProblemRule("bad_argument", config.bad_argument, frozenset((ProblemKind.BAD_ARGUMENT,))),
        ProblemRule("unknown_tool", config.unknown_tool, frozenset((ProblemKind.UNKNOWN_TOOL,))),
        MixingRule(config.language_mixing, config.mixing),
        StructureRule(config.structured_step),
    )
    return tuple(rule for rule in rules if rule.weight)


def measure(rules: Sequence[Rule], step: Step) -> dict[str, float]:
    """Nonzero measures of the step, by rule."""
    if step.finish_reason is FinishReason.ABORT:
        return {}
    measures = {rule.name: rule.measure(step) for rule in rules}
    return {name: value for name, value in measures.items() if value}
