"""Reasoning domain: two counters modulo 10 and a sequence of steps. Family `counters`; the difficulty is their number.

    Modulo 10: a=4 b=7. Do a+3 b-2 a+b. Give a b.        a: 7, then 7+5=2; b: 5        answer: 2 5

A step adds a digit or the other counter to a counter, or subtracts it. The demonstration writes each step with its
result into the thinking. A guess is right once in a hundred tasks.
"""

import random
from dataclasses import dataclass

from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.family import Family, compare, make_task, read_int, read_text, task_random
from m2forge.text.message import Message

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
        _, end = _run(task)
        return compare(submission.answer, end)

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"exact": [_run(task)[1]]}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        thoughts, end = _run(task)
        return [Message("user", task.instruction), Message("assistant", end, thinking=" ".join(thoughts))]


def _draw_step(rng: random.Random) -> str:
    counter = rng.choice("ab")
    amount = OTHER[counter] if rng.random() < 0.3 else str(rng.randrange(1, MODULUS))
    return f"{counter}{rng.choice('+-')}{amount}"


def _run(task: Task) -> tuple[list[str], str]:
    """Every step with its result, and the counters after the last."""
    values = {counter: read_int(task, counter) for counter in OTHER}
    thoughts = []
    for step in read_text(task, "steps").split():
        counter, sign, amount = step[0], step[1], step[2:]
        size = values[amount] if amount in values else int(amount)
        values[counter] = (values[counter] + (size if sign == "+" else -size)) % MODULUS
        thoughts.append(f"{step} {counter}={values[counter]}")
    return thoughts, f"{values['a']} {values['b']}"
