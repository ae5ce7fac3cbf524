"""Process rules: what is good or bad about a step, whatever becomes of the task.

A rule measures a step, from 0 to 1, and has a weight: the process reward of a step is Σ weight · measure. A rule with a
negative weight is a penalty, one with a positive weight a credit.

    malformed_call   1 if a call could not be read: without name or arguments, not closed, or with words in it
    bad_argument     1 if an argument is missing, unknown, given twice or of another type than the tool's schema asks
    unknown_tool     1 if a tool was called that was not offered
    language_mixing  how far foreign scripts are mixed in (`reward/mixing.py`)
    structured_step  1 if the step thought, then acted or answered, ended by itself, and nothing was wrong with it

A step that was aborted is measured by no rule: it was not the policy that ended it.
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
        """From 0, it does not apply, to 1."""
        ...


@dataclass(frozen=True, slots=True)
class ProblemRule:
    """Has the parser found one of these problems?"""

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
    """The rules that apply to the step, with their measures."""
    if step.finish_reason is FinishReason.ABORT:
        return {}
    measures = {rule.name: rule.measure(step) for rule in rules}
    return {name: value for name, value in measures.items() if value}
