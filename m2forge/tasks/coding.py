"""Coding domain: translate an expression into a program for a stack machine. Family `stack`; the difficulty is the
number of operators in the expression.

    Write a stack program for (a+3)*b.                        answer: a 3 + b *

The verifier runs the answer on inputs, so every program that computes the expression is right. All cases must pass: a
program that is right for only some inputs has perf 0.

`tasks/stack_machine.py` runs programs.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from m2forge.errors import RecordError
from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.answer import plain
from m2forge.tasks.family import Family, make_task, read_text, shown, task_random
from m2forge.tasks.stack_machine import ProgramError, run_program
from m2forge.text.message import Message

INPUTS = "abcdefgh"
OPERATORS = "+-*"
CASES = tuple(
    dict(zip(INPUTS, values, strict=True))
    for values in (
        (3, -7, 11, 2, -5, 8, -1, 6),
        (-4, 9, 1, -8, 7, -2, 10, 5),
        (12, 5, -3, 4, 1, -9, 6, -11),
        (-6, -1, 8, 9, -10, 3, 2, 7),
        (1, 4, -12, -5, 3, 11, -8, 2),
        (0, 1, 2, 3, 4, 5, 6, 7),
    )
)
"""The test inputs of a program."""

Expression: TypeAlias = "str | tuple[Expression, str, Expression]"
"""An input, a digit, or two expressions joined by an operator."""


@dataclass(frozen=True, slots=True)
class StackProgram(Family):
    name: str = "stack"
    domain: Domain = Domain.CODING
    levels: range = range(1, 13)

    def draw(self, difficulty: int, seed: int) -> Task:
        rng = task_random(self, difficulty, seed)
        expression = _draw(rng, difficulty)
        instruction = f"Write a stack program for {_infix(expression)}."
        return make_task(self, difficulty, instruction, {"program": _postfix(expression)})

    def verify(self, task: Task, submission: Submission) -> Verdict:
        answer = submission.answer
        reference, program = read_text(task, "program"), plain(answer)
        for inputs in CASES:
            try:
                expected = run_program(reference, inputs)
            except ProgramError as error:
                raise RecordError(f"Task {task.id}: metadata: program: {reference!r} does not run ({error})") from error
            evidence: dict[str, JsonValue] = {"received": shown(answer), "inputs": dict(inputs), "expected": expected}
            try:
                result = run_program(program, inputs)
            except ProgramError as error:
                return Verdict(0.0, evidence | {"error": str(error)})
            if result != expected:
                return Verdict(0.0, evidence | {"result": result})
        return Verdict(1.0, {"received": shown(answer), "num_cases": len(CASES)})

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"stack": read_text(task, "program"), "cases": [dict(inputs) for inputs in CASES]}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        program = read_text(task, "program")
        thinking = ", ".join(f"{_infix(part)}: {_postfix(part)}" for part in _parts(_parse(program)))
        return [Message("user", task.instruction), Message("assistant", program, thinking=thinking)]


def _draw(rng: random.Random, num_operators: int) -> Expression:
    """Draw an expression. No operator joins two digits or an input with itself, because that would be trivial."""
    if not num_operators:
        return rng.choice(INPUTS) if rng.random() < 0.6 else str(rng.randrange(2, 10))
    num_left = rng.randrange(num_operators)
    left, right = _draw(rng, num_left), _draw(rng, num_operators - 1 - num_left)
    if isinstance(left, str) and isinstance(right, str):
        if left.isdecimal() and right.isdecimal():
            left = rng.choice(INPUTS)
        elif left == right:
            right = str(rng.randrange(2, 10))
    return left, rng.choice(OPERATORS), right


def _infix(expression: Expression, *, bare: bool = True) -> str:
    if isinstance(expression, str):
        return expression
    left, operator, right = expression
    text = f"{_infix(left, bare=False)}{operator}{_infix(right, bare=False)}"
    return text if bare else f"({text})"


def _postfix(expression: Expression) -> str:
    if isinstance(expression, str):
        return expression
    left, operator, right = expression
    return f"{_postfix(left)} {_postfix(right)} {operator}"


def _parse(program: str) -> Expression:
    stack: list[Expression] = []
    for word in program.split():
        if word in OPERATORS:
            right, left = stack.pop(), stack.pop()
            stack.append((left, word, right))
        else:
            stack.append(word)
    (expression,) = stack
    return expression


def _parts(expression: Expression) -> Iterator[Expression]:
    """Yield every operation in the expression, operands first."""
    if not isinstance(expression, str):
        yield from _parts(expression[0])
        yield from _parts(expression[2])
        yield expression
