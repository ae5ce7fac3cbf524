"""General domain: follow exact instructions about a few words. Family `words`; the difficulty is the number of words
minus one.

    Write sun, cat, red: backwards, capitals, once each, joined by -                   answer: RED-CAT-SUN

Each task sets four things: an order, a case, how often each word is written, and the separator. Unlike other families,
this one does not normalize white space inside the answer before comparing it: it strips only the white space around it
and one final full stop.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.answer import literal
from m2forge.tasks.family import Family, make_task, read_text, shown, task_random
from m2forge.text.message import Message

WORDS = ("sun", "cat", "red", "map", "ice", "owl", "tea", "box", "key", "fox", "bus", "jar", "pen", "log", "arm", "hat")
ORDERS: Mapping[str, Callable[[list[str]], list[str]]] = {
    "in order": list,
    "backwards": lambda words: words[::-1],
    "sorted": sorted,
}
CASES: Mapping[str, Callable[[str], str]] = {"small": str.lower, "capitals": str.upper, "one capital": str.capitalize}
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
        order, case, count = rng.choice([*ORDERS]), rng.choice([*CASES]), rng.choice([*COUNTS])
        joiner = rng.choice(JOINERS)
        instruction = f"Write {', '.join(words)}: {order}, {case}, {count} each, joined by {joiner}"
        answer = joiner.join(CASES[case](word) for word in ORDERS[order](words) for _ in range(COUNTS[count]))
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
