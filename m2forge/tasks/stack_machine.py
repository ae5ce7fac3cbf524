"""The stack machine of the family `stack`: a program and its inputs in, its result out.

A program is words separated by spaces. A number or the name of an input is pushed; `+ - *` pop two values and push one;
`dup`, `drop`, `swap` and `over` rearrange the stack. The result is the single remaining value. There are no loops, so a
program takes as many steps as it has words.

It imports the standard library alone, because task folders carry a copy of this file (`tasks/folders/export.py`).
"""

from collections.abc import Mapping

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
