"""Three families over digits, one each of the domains agent, reasoning and general, that small networks learn.

    replies    Start at 3. Follow three links. Reply to 4 8 2. recall(3) → 5, look(5) → 1, …   answer: 4 8 2: 7
    raises     Raise 4 8 2 by 3, modulo ten.                                                   answer: 7 1 5
    joins      Join 4 8 2 by +.                                                                answer: 4+8+2

A digit is one token, the same one in every context, with any vocabulary. Each level has a thousand instructions or
more, so that hundreds can be held out.

Each family knows a typical mistake; how often a demonstrator makes it is the caller's choice (`Fallible`):

    replies    looks a link up in a copy, which may be out of date; the difficulty is how many of the links are
    raises     writes a digit as it was; the difficulty is the number of digits minus two
    joins      leaves a separator out; the difficulty is the number of separators minus one

No message says that a mistake was made; only the verdict on the answer shows it.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.agent import LOOK, RECALL
from m2forge.tasks.family import Family, call_problem, compare, make_task, read_int, read_text, shown, task_random
from m2forge.text.message import Message, Tool, ToolCall

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
        return compare(submission.answer, _joined(task))

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"exact": [_joined(task)]}

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


def _joined(task: Task) -> str:
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
