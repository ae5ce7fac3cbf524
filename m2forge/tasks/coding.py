"""Coding domain: translate an expression into a program for a stack machine. Family `stack`; the difficulty is the
number of operators in the expression.

    Write a stack program for (a+3)*b.                        answer: a 3 + b *

The verifier runs the answer on inputs, so every program that computes the expression is right. All cases must pass: a
program that is right for only some inputs has perf 0.

A program of the stack machine is words separated by spaces. A number or the name of an input is pushed; `+ - *` pop two
values and push one; `dup`, `drop`, `swap` and `over` rearrange the stack. The result is the single remaining value.
There are no loops, so a program takes as many steps as it has words.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from m2forge.errors import RecordError
from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.family import Family, make_task, plain, read_text, shown, task_random
from m2forge.text.message import Message

MAX_WORDS = 128
MAX_VALUE = 10**15
"""Largest absolute value; a larger one ends the program with an error."""
MAX_DIGITS = 9


class ProgramError(ValueError):
    """A program that is invalid or fails at run time."""


def run_program(program: str, inputs: Mapping[str, int]) -> int:
    words = program.split()
    if len(words) > MAX_WORDS:
        raise ProgramError(f"{len(words)} words, at most {MAX_WORDS}")
    stack: list[int] = []
    for word in words:
        _step(word, stack, inputs)
        if stack and abs(stack[-1]) > MAX_VALUE:
            raise ProgramError(f"a value above {MAX_VALUE}")
    if len(stack) != 1:
        raise ProgramError(f"{len(stack)} values are left, expected one")
    return stack[0]


def _step(word: str, stack: list[int], inputs: Mapping[str, int]) -> None:
    if word in inputs:
        stack.append(inputs[word])
    elif word.isascii() and word.isdecimal() and len(word) <= MAX_DIGITS:
        stack.append(int(word))
    elif word in NUM_OPERANDS:
        if len(stack) < NUM_OPERANDS[word]:
            raise ProgramError(f"{word}: {len(stack)} values on the stack, expected {NUM_OPERANDS[word]}")
        taken = stack[len(stack) - NUM_OPERANDS[word] :]
        del stack[len(stack) - NUM_OPERANDS[word] :]
        stack.extend(_apply(word, taken))
    else:
        raise ProgramError("an unknown word")


NUM_OPERANDS = {"+": 2, "-": 2, "*": 2, "dup": 1, "drop": 1, "swap": 2, "over": 2}
"""Number of values that each word pops."""


def _apply(word: str, taken: list[int]) -> list[int]:
    match word:
        case "dup":
            return [taken[0], taken[0]]
        case "drop":
            return []
    first, second = taken
    match word:
        case "+":
            return [first + second]
        case "-":
            return [first - second]
        case "*":
            return [first * second]
        case "swap":
            return [second, first]
        case _:
            return [first, second, first]


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
