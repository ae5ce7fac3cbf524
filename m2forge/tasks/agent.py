"""Agent domain: values that only a tool returns. Three families; the difficulty of the first two is the call count.

    chain    Start at 3G. Follow 3 links.           look(3G) → 5B, look(5B) → 1H, look(1H) → 9A        answer: 9A
    gather   Read 3G, 5B and 8A.                    look(3G) → 5B, look(5B) → 1H, look(8A) → 4D        answer: 5B 1H 4D
    copies   Start at 3G. Follow 2 links.           recall(3G) → 5B, look(5B) → 1H                      answer: 1H

Each call of `chain` needs the result of the previous one. Calls of `gather` do not: an agent may make all of them in
one turn, and since each takes `call_s`, that is faster. Two thirds of its demonstrations make one call per turn, as
people without time pressure do, the others all in one turn.

Two tools look up the keys of `copies`: `look` reads the source, `recall` a copy, which may be out of date. The
difficulty is how many of the links to follow are out of date in the copy; at 0 either tool works. Two thirds of the
demonstrated calls at links where the copy is right use the copy. The cost of using it elsewhere shows only in the final
answer.

Keys and values are a digit and a letter: two tokens, the same two in every context, with any vocabulary. So a call
copies a few frequent tokens, which a small network learns first. A key's value follows from the task's secret, which no
message contains: a guess is right once in a hundred tasks.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.family import call_problem, compare, make_task, read_int, read_text, shown, task_random
from m2forge.text.message import Message, Tool, ToolCall

KEYS = tuple(f"{digit}{letter}" for digit in range(10) for letter in "ABCDEFGHIJ")
MAX_LEVEL = 16
LOOK = Tool(
    "look",
    "Look up a key.",
    {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
)
RECALL = Tool("recall", "Look up a key in a copy.", LOOK.parameters)
COPY_SHARE = 2 / 3
"""Share of the demonstrated calls of `copies` that use the copy where it is right."""
SINGLE_SHARE = 2 / 3
"""Share of the demonstrations of `gather` that make one call per turn."""


class Lookup:
    """The tool of `chain` and `gather`."""

    def tools(self, task: Task) -> tuple[Tool, ...]:
        return (LOOK,)

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        problem = call_problem((LOOK,), name, arguments)
        if problem is not None or not isinstance(arguments, Mapping):
            return problem or ""
        return look(task, arguments["key"])

    def keys(self, task: Task, name: str) -> Sequence[str]:
        return KEYS


@dataclass(frozen=True, slots=True)
class Chain(Lookup):
    name: str = "chain"
    domain: Domain = Domain.AGENT
    levels: range = range(1, MAX_LEVEL + 1)
    call_s: float = 0.0
    """Simulated latency of a call."""

    def draw(self, difficulty: int, seed: int) -> Task:
        rng = task_random(self, difficulty, seed)
        start, secret = rng.choice(KEYS), rng.getrandbits(32)
        links = "link" if difficulty == 1 else "links"
        instruction = f"Start at {start}. Follow {difficulty} {links}."
        return make_task(self, difficulty, instruction, {"start": start, "num_links": difficulty, "secret": secret})

    def latency_s(self, task: Task, name: str) -> float:
        return self.call_s

    def verify(self, task: Task, submission: Submission) -> Verdict:
        return compare(submission.answer, _links(task)[-1])

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"exact": [_links(task)[-1]]}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        links = _links(task)
        messages = [Message("user", task.instruction)]
        for turn, key in enumerate(links[:-1]):
            messages += look_up(task, [key], f"{len(links) - 1 - turn} left.", num_before=turn)
        return [*messages, Message("assistant", links[-1], thinking="0 left.")]


@dataclass(frozen=True, slots=True)
class Gather(Lookup):
    name: str = "gather"
    domain: Domain = Domain.AGENT
    levels: range = range(1, MAX_LEVEL + 1)
    call_s: float = 1.0
    """Simulated latency of a call."""

    def draw(self, difficulty: int, seed: int) -> Task:
        rng = task_random(self, difficulty, seed)
        keys = rng.sample(KEYS, difficulty)
        secret = rng.getrandbits(32)
        *firsts, last = keys
        listed = f"{', '.join(firsts)} and {last}" if firsts else last
        return make_task(self, difficulty, f"Read {listed}.", {"keys": " ".join(keys), "secret": secret})

    def latency_s(self, task: Task, name: str) -> float:
        return self.call_s

    def verify(self, task: Task, submission: Submission) -> Verdict:
        return compare(submission.answer, _values(task))

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"exact": [_values(task)]}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Most demonstrations read one key per turn, the others all at once."""
        keys = read_text(task, "keys").split()
        messages, num_before = [Message("user", task.instruction)], 0
        most = 1 if rng.random() < SINGLE_SHARE else len(keys)
        while num_before < len(keys):
            part = keys[num_before : num_before + most]
            messages += look_up(task, part, f"Next {' '.join(part)}.", num_before)
            num_before += len(part)
        return [*messages, Message("assistant", _values(task), thinking="All read.")]


@dataclass(frozen=True, slots=True)
class Copies:
    name: str = "copies"
    domain: Domain = Domain.AGENT
    levels: range = range(MAX_LEVEL + 1)
    call_s: float = 0.0
    """Simulated latency of a call."""

    def draw(self, difficulty: int, seed: int) -> Task:
        rng = task_random(self, difficulty, seed)
        start, num_links = rng.choice(KEYS), max(difficulty, rng.randint(2, 3))
        links: list[str] = []
        while len(set(links)) < num_links + 1:  # a chain that meets itself has fewer links
            secret = rng.getrandbits(32)
            links = follow(secret, start, num_links)
        old = " ".join(rng.sample(links[:-1], difficulty))
        metadata: dict[str, JsonValue] = {"start": start, "num_links": num_links, "secret": secret, "old": old}
        return make_task(self, difficulty, f"Start at {start}. Follow {num_links} links.", metadata)

    def tools(self, task: Task) -> tuple[Tool, ...]:
        return LOOK, RECALL

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        problem = call_problem(self.tools(task), name, arguments)
        if problem is not None or not isinstance(arguments, Mapping):
            return problem or ""
        return look(task, arguments["key"], is_old=name == RECALL.name)

    def keys(self, task: Task, name: str) -> Sequence[str]:
        return KEYS

    def latency_s(self, task: Task, name: str) -> float:
        return self.call_s

    def verify(self, task: Task, submission: Submission) -> Verdict:
        return compare(submission.answer, _links(task)[-1])

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        return {"exact": [_links(task)[-1]]}

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Never use the copy where it is out of date, so that every demonstration is right."""
        links, messages = _links(task), [Message("user", task.instruction)]
        for turn, key in enumerate(links[:-1]):
            is_copy = key not in read_text(task, "old").split() and rng.random() < COPY_SHARE
            thinking, tool = f"{len(links) - 1 - turn} left.", RECALL if is_copy else LOOK
            messages += look_up(task, [key], thinking, num_before=turn, tool=tool)
        return [*messages, Message("assistant", links[-1], thinking="0 left.")]


def behind(secret: int, key: str) -> str:
    """The value of a key, itself a key, uniformly distributed."""
    digest = hashlib.blake2b(f"{secret}/{key}".encode(), digest_size=8).digest()
    return KEYS[int.from_bytes(digest, "big") % len(KEYS)]


def look(task: Task, key: JsonValue, *, is_old: bool = False) -> str:
    """The tool's response. `is_old`: look up the copy instead of the source."""
    if not isinstance(key, str) or key not in KEYS:
        return f"error: no key {shown(key)}; keys are {KEYS[0]} to {KEYS[-1]}"
    secret, value = read_int(task, "secret"), behind(read_int(task, "secret"), key)
    if is_old and key in read_text(task, "old").split():
        return next(old for n in range(1, len(KEYS)) if (old := behind(secret + n, key)) != value)
    return value


def follow(secret: int, start: str, num_links: int) -> list[str]:
    """The keys from the start to the end of a chain."""
    links = [start]
    for _ in range(num_links):
        links.append(behind(secret, links[-1]))
    return links


def look_up(task: Task, keys: Sequence[str], thinking: str, num_before: int, tool: Tool = LOOK) -> list[Message]:
    """An assistant turn with one call per key, and the tool's responses."""
    secret = read_int(task, "secret")
    ids = [f"call_{num_before + n + 1}" for n in range(len(keys))]
    calls = tuple(ToolCall(tool.name, {"key": key}, id) for key, id in zip(keys, ids, strict=True))
    results = [Message("tool", behind(secret, key), tool_call_id=id) for key, id in zip(keys, ids, strict=True)]
    return [Message("assistant", thinking=thinking, tool_calls=calls), *results]


def _links(task: Task) -> list[str]:
    return follow(read_int(task, "secret"), read_text(task, "start"), read_int(task, "num_links"))


def _values(task: Task) -> str:
    secret = read_int(task, "secret")
    return " ".join(behind(secret, key) for key in read_text(task, "keys").split())
