"""Families of short puzzles over digits, letters and words.

    counters   Modulo 10: a=4 b=7. Do a+3 b-2 a+b. Give a b.                                   answer: 2 5
    stack      Write a stack program for (a+3)*b.                                              answer: a 3 + b *
    words      Write sun, cat, red: backwards, capitals, once each, joined by -                answer: RED-CAT-SUN
    replies    Start at 3. Follow three links. Reply to 4 8 2. recall(3) → 5, look(5) → 1, …   answer: 4 8 2: 7
    raises     Raise 4 8 2 by 3, modulo ten.                                                   answer: 7 1 5
    joins      Join 4 8 2 by +.                                                                answer: 4+8+2

The first three are answered in one turn, without tools: one each of the domains reasoning, coding and general.

`counters`: two counters modulo 10 and a sequence of steps, whose number is the difficulty. A step adds a digit or the
other counter to a counter, or subtracts it. The demonstration writes each step with its result into the thinking. A
guess is right once in a hundred tasks.

`stack`: translate an expression into a program for a stack machine (`tasks/stack_machine.py`); the difficulty is the
number of operators in the expression. The verifier runs the answer on inputs, so every program that computes the
expression is right. All cases must pass: a program that is right for only some inputs has perf 0.

`words`: follow exact instructions about a few words; the difficulty is the number of words minus one. Each task sets
four things: an order, a case, how often each word is written, and the separator. Unlike other families, this one does
not normalize white space inside the answer before comparing it: it strips only the white space around it and one final
full stop.

The last three, over digits, are the demo's: one each of the domains agent, reasoning and general, that small networks
learn. A digit is one token, the same one in every context, with any vocabulary. Each level has a thousand instructions
or more, so that hundreds can be held out. Each family knows a typical mistake; how often a demonstrator makes it is the
caller's choice (`Fallible`):

    replies    looks a link up in a copy, which may be out of date; the difficulty is how many of the links are
    raises     writes a digit as it was; the difficulty is the number of digits minus two
    joins      leaves a separator out; the difficulty is the number of separators minus one

No message says that a mistake was made; only the verdict on the answer shows it.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from m2forge.errors import RecordError
from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.agent import LOOK, RECALL
from m2forge.tasks.answer import literal, plain
from m2forge.tasks.family import Family, call_problem, compare, make_task, read_int, read_text, shown, task_random
from m2forge.tasks.stack_machine import ProgramError, run_program
from m2forge.text.message import Message, Tool, ToolCall

MODULUS = 10
OTHER = {"a": "b", "b": "a"}


@dataclass(frozen=True, slots=True)
class Counters(Family):
    name: str = "counters"
    domain: Domain = Domain.REASONING
    levels: range = range(1, 25)

    def draw(self, difficulty: int, seed: int) -> Task:
        rng = task_random(self, difficulty, seed)
        a, b = rng.randrange(MODULUS), rng.randrange(MODULUS)
        steps = " ".join(_draw_step(rng) for _ in range(difficulty))
        instruction = f"Modulo {MODULUS}: a={a} b={b}. Do {steps}. Give a b."
        return make_task(self, difficulty, instruction, {"a": a, "b": b, "steps": steps})

    def verify(self, task: Task, submission: Submission) -> Verdict:
        _, end = _run_steps(task)
        return compare(submission.answer, end)

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"exact": [_run_steps(task)[1]]}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        thoughts, end = _run_steps(task)
        return [Message("user", task.instruction), Message("assistant", end, thinking=" ".join(thoughts))]


def _draw_step(rng: random.Random) -> str:
    counter = rng.choice("ab")
    amount = OTHER[counter] if rng.random() < 0.3 else str(rng.randrange(1, MODULUS))
    return f"{counter}{rng.choice('+-')}{amount}"


def _run_steps(task: Task) -> tuple[list[str], str]:
    """Every step with its result, and the counters after the last."""
    values = {counter: read_int(task, counter) for counter in OTHER}
    thoughts = []
    for step in read_text(task, "steps").split():
        counter, sign, amount = step[0], step[1], step[2:]
        size = values[amount] if amount in values else int(amount)
        values[counter] = (values[counter] + (size if sign == "+" else -size)) % MODULUS
        thoughts.append(f"{step} {counter}={values[counter]}")
    return thoughts, f"{values['a']} {values['b']}"


INPUTS = "abcdefgh"
OPERATORS = "+-*"
PROGRAM_CASES = tuple(
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
        expression = _draw_expression(rng, difficulty)
        instruction = f"Write a stack program for {_infix(expression)}."
        return make_task(self, difficulty, instruction, {"program": _postfix(expression)})

    def verify(self, task: Task, submission: Submission) -> Verdict:
        answer = submission.answer
        reference, program = read_text(task, "program"), plain(answer)
        for inputs in PROGRAM_CASES:
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
        return Verdict(1.0, {"received": shown(answer), "num_cases": len(PROGRAM_CASES)})

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"stack": read_text(task, "program"), "cases": [dict(inputs) for inputs in PROGRAM_CASES]}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        program = read_text(task, "program")
        thinking = ", ".join(f"{_infix(part)}: {_postfix(part)}" for part in _operations(_parse_program(program)))
        return [Message("user", task.instruction), Message("assistant", program, thinking=thinking)]


def _draw_expression(rng: random.Random, num_operators: int) -> Expression:
    """Draw an expression. No operator joins two digits or an input with itself, because that would be trivial."""
    if not num_operators:
        return rng.choice(INPUTS) if rng.random() < 0.6 else str(rng.randrange(2, 10))
    num_left = rng.randrange(num_operators)
    left, right = _draw_expression(rng, num_left), _draw_expression(rng, num_operators - 1 - num_left)
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


def _parse_program(program: str) -> Expression:
    stack: list[Expression] = []
    for word in program.split():
        if word in OPERATORS:
            right, left = stack.pop(), stack.pop()
            stack.append((left, word, right))
        else:
            stack.append(word)
    (expression,) = stack
    return expression


def _operations(expression: Expression) -> Iterator[Expression]:
    """Yield every operation in the expression, operands first."""
    if not isinstance(expression, str):
        yield from _operations(expression[0])
        yield from _operations(expression[2])
        yield expression


WORDS = ("sun", "cat", "red", "map", "ice", "owl", "tea", "box", "key", "fox", "bus", "jar", "pen", "log", "arm", "hat")
ORDERS: Mapping[str, Callable[[list[str]], list[str]]] = {
    "in order": list,
    "backwards": lambda words: words[::-1],
    "sorted": sorted,
}
LETTER_CASES: Mapping[str, Callable[[str], str]] = {
    "small": str.lower,
    "capitals": str.upper,
    "one capital": str.capitalize,
}
COUNTS: Mapping[str, int] = {"once": 1, "twice": 2}
JOINERS = ("-", "+", "/")


@dataclass(frozen=True, slots=True)
class Words(Family):
    name: str = "words"
    domain: Domain = Domain.GENERAL
    levels: range = range(1, len(WORDS))

    def draw(self, difficulty: int, seed: int) -> Task:
        rng = task_random(self, difficulty, seed)
        words = rng.sample(WORDS, difficulty + 1)
        order, case, count = rng.choice([*ORDERS]), rng.choice([*LETTER_CASES]), rng.choice([*COUNTS])
        joiner = rng.choice(JOINERS)
        instruction = f"Write {', '.join(words)}: {order}, {case}, {count} each, joined by {joiner}"
        answer = joiner.join(LETTER_CASES[case](word) for word in ORDERS[order](words) for _ in range(COUNTS[count]))
        ordered = " ".join(ORDERS[order](words))
        return make_task(self, difficulty, instruction, {"ordered": ordered, "answer": answer})

    def verify(self, task: Task, submission: Submission) -> Verdict:
        expected, answer = read_text(task, "answer"), submission.answer
        return Verdict(float(literal(answer) == expected), {"expected": expected, "received": shown(answer)})

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"literal": read_text(task, "answer")}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """The thinking lists the words in order; the answer applies the rest."""
        answer = Message("assistant", read_text(task, "answer"), thinking=read_text(task, "ordered"))
        return [Message("user", task.instruction), answer]


# -- the demo's families ----------------------------------------------------------------------------------------------

DIGITS = tuple("0123456789")
NUMBERS = ("none", "one", "two", "three", "four", "five", "six")
"""Counts in words, so that a digit is always a key."""
MAX_LEVEL = 6
RECIPIENT_LENGTH = 3
MIN_LINKS = 3
AMOUNTS = (1,)
SEPARATOR = "+"


@dataclass(frozen=True, slots=True)
class Replies(Family):
    name: str = "replies"
    domain: Domain = Domain.AGENT
    levels: range = range(1, MAX_LEVEL + 1)

    def draw(self, difficulty: int, seed: int) -> Task:
        rng = task_random(self, difficulty, seed)
        start, num_links = rng.choice(DIGITS), max(difficulty, MIN_LINKS)
        recipient = _draw_recipient(rng)
        chain: list[str] = []
        while len(set(chain)) < num_links + 1:  # a chain that meets itself has fewer links
            secret = rng.getrandbits(32)
            chain = _follow(secret, start, num_links)
        old = "".join(rng.sample(chain[:-1], difficulty))
        instruction = f"Start at {start}. Follow {NUMBERS[num_links]} links. Reply to {recipient}."
        metadata: dict[str, JsonValue] = {"start": start, "num_links": num_links, "recipient": recipient}
        return make_task(self, difficulty, instruction, {**metadata, "secret": secret, "old": old})

    def tools(self, task: Task) -> tuple[Tool, ...]:
        return LOOK, RECALL

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        problem = call_problem(self.tools(task), name, arguments)
        if problem is not None or not isinstance(arguments, Mapping):
            return problem or ""
        key = arguments["key"]
        if not isinstance(key, str) or key not in DIGITS:
            return f"error: no key {shown(key)}; keys are {DIGITS[0]} to {DIGITS[-1]}"
        return _value(task, key, is_old=name == RECALL.name)

    def verify(self, task: Task, submission: Submission) -> Verdict:
        end = _follow(read_int(task, "secret"), read_text(task, "start"), read_int(task, "num_links"))[-1]
        return compare(submission.answer, _reply(task, end))

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        end = _follow(read_int(task, "secret"), read_text(task, "start"), read_int(task, "num_links"))[-1]
        return {"exact": [_reply(task, end)]}

    def keys(self, task: Task, name: str) -> Sequence[str]:
        return DIGITS

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return self.demonstrate_fallibly(task, rng, 0.0)

    def demonstrate_fallibly(self, task: Task, rng: random.Random, mistake_rate: float) -> list[Message]:
        key, num_links = read_text(task, "start"), read_int(task, "num_links")
        messages = [Message("user", task.instruction)]
        for turn in range(num_links):
            tool, id = RECALL if rng.random() < mistake_rate else LOOK, f"call_{turn + 1}"
            thinking, calls = f"{NUMBERS[num_links - turn]} left.", (ToolCall(tool.name, {"key": key}, id),)
            key = _value(task, key, is_old=tool is RECALL)
            messages += [
                Message("assistant", thinking=thinking, tool_calls=calls),
                Message("tool", key, tool_call_id=id),
            ]
        return [*messages, Message("assistant", _reply(task, key), thinking=f"{NUMBERS[0]} left.")]


@dataclass(frozen=True, slots=True)
class Raises(Family):
    name: str = "raises"
    domain: Domain = Domain.REASONING
    levels: range = range(1, MAX_LEVEL + 1)

    def draw(self, difficulty: int, seed: int) -> Task:
        rng = task_random(self, difficulty, seed)
        digits, amount = _draw_digits(rng, difficulty), rng.choice(AMOUNTS)
        instruction = f"Raise {digits} by {amount}, modulo ten."
        return make_task(self, difficulty, instruction, {"digits": digits, "amount": amount})

    def verify(self, task: Task, submission: Submission) -> Verdict:
        return compare(submission.answer, " ".join(_raised(task)))

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"exact": [" ".join(_raised(task))]}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return self.demonstrate_fallibly(task, rng, 0.0)

    def demonstrate_fallibly(self, task: Task, rng: random.Random, mistake_rate: float) -> list[Message]:
        pairs = zip(read_text(task, "digits").split(), _raised(task), strict=True)
        written = [digit if rng.random() < mistake_rate else raised for digit, raised in pairs]
        return [Message("user", task.instruction), Message("assistant", " ".join(written))]


@dataclass(frozen=True, slots=True)
class Joins(Family):
    name: str = "joins"
    domain: Domain = Domain.GENERAL
    levels: range = range(1, MAX_LEVEL + 1)

    def draw(self, difficulty: int, seed: int) -> Task:
        rng = task_random(self, difficulty, seed)
        digits = _draw_digits(rng, difficulty)
        instruction = f"Join {digits} by {SEPARATOR}."
        return make_task(self, difficulty, instruction, {"digits": digits})

    def verify(self, task: Task, submission: Submission) -> Verdict:
        return compare(submission.answer, _concat(task))

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"exact": [_concat(task)]}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return self.demonstrate_fallibly(task, rng, 0.0)

    def demonstrate_fallibly(self, task: Task, rng: random.Random, mistake_rate: float) -> list[Message]:
        written, *others = read_text(task, "digits").split()
        for digit in others:
            written += (" " if rng.random() < mistake_rate else SEPARATOR) + digit
        return [Message("user", task.instruction), Message("assistant", written)]


def _draw_recipient(rng: random.Random) -> str:
    return " ".join(rng.choice(DIGITS) for _ in range(RECIPIENT_LENGTH))


def _draw_digits(rng: random.Random, difficulty: int) -> str:
    return " ".join(rng.choice(DIGITS) for _ in range(difficulty + 2))


def _raised(task: Task) -> list[str]:
    amount = read_int(task, "amount")
    return [str((int(digit) + amount) % len(DIGITS)) for digit in read_text(task, "digits").split()]


def _concat(task: Task) -> str:
    return read_text(task, "digits").replace(" ", SEPARATOR)


def _follow(secret: int, start: str, num_links: int) -> list[str]:
    """The digits from the start to the end of a chain."""
    chain = [start]
    for _ in range(num_links):
        chain.append(_drawn(secret, chain[-1]))
    return chain


def _drawn(secret: int, key: str) -> str:
    digest = hashlib.blake2b(f"{secret}/{key}".encode(), digest_size=8).digest()
    return DIGITS[int.from_bytes(digest, "big") % len(DIGITS)]


def _value(task: Task, key: str, *, is_old: bool) -> str:
    """The value of a key in the source, or in the copy if `is_old`."""
    secret = read_int(task, "secret")
    value = _drawn(secret, key)
    if not is_old or key not in read_text(task, "old"):
        return value
    return DIGITS[(int(value) + 1 + int(_drawn(secret + 1, key)) % (len(DIGITS) - 1)) % len(DIGITS)]


def _reply(task: Task, end: str) -> str:
    return f"{read_text(task, 'recipient')}: {end}"
