"""Synthetic tool-calling trajectories, as an example of a data source: small enough for a tiny model to learn.

`generate` yields OpenAI-style objects that row_file.py reads: a short system prompt, one to three tools, a request, and
an assistant that thinks, calls tools (once, two in parallel, or two in sequence), reflects on the results and answers.
Names, paths and numbers are combined from parts; the held-out split uses only combinations that training never shows.
Requests quote the values, so that a small vocabulary tokenizes them as it does in a call, and calling means copying.
This exercises the whole path from file to loss. It measures nothing about a model of real size.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from m2forge.files import write_atomic
from m2forge.records import JsonValue

Split: TypeAlias = Literal["train", "held_out"]
Arguments: TypeAlias = dict[str, JsonValue]

HELD_OUT_EVERY = 5
"""One in this many combinations of parts is held out."""

FIRST = ("red", "old", "big", "new", "top", "last", "main", "left")
SECOND = ("data", "name", "test", "code", "line", "type", "value", "item", "key", "node")
SUFFIXES = (".py", ".txt", ".c")
CITY_STARTS = ("Mar", "Bel", "San", "Nor", "Ar", "Cor")
CITY_ENDS = ("ton", "ford", "ia", "burg", "dale")
WORDS = ("ready", "good", "late", "open", "fine", "lost", "full", "next")

PROMPTS = ("Use the tools.", "Call tools.", "Be brief.")


def _schema(**types: str) -> dict[str, JsonValue]:
    properties: dict[str, JsonValue] = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": list(types)}


TOOLS: dict[str, tuple[str, dict[str, JsonValue]]] = {
    "read": ("Read a file.", _schema(path="string")),
    "list": ("List a folder.", _schema(folder="string", hidden="boolean")),
    "find": ("Find files by word.", _schema(word="string", limit="integer")),
    "add": ("Add two numbers.", _schema(a="integer", b="integer")),
    "roll": ("Roll a die.", _schema(sides="integer")),
    "clock": ("Time in a city.", _schema(city="string")),
    "alarm": ("Set an alarm.", _schema(minutes="integer", loud="boolean")),
    "send": ("Send a note.", _schema(to="string", text="string")),
}
"""Description and parameter schema of every tool."""


@dataclass(frozen=True)
class Step:
    """One assistant turn: a thought, then parallel tool calls, each with its result."""

    thinking: str
    calls: tuple[tuple[str, Arguments, str], ...]


@dataclass(frozen=True)
class Story:
    """One request with its steps and answer."""

    request: str
    steps: tuple[Step, ...]
    reflection: str
    answer: str


class Vocabulary:
    """Argument values of one split only."""

    def __init__(self, generator: random.Random, split: Split) -> None:
        self.random = generator
        self._held_out = split == "held_out"

    def name(self) -> str:
        return "-".join(self._pair(FIRST, SECOND))

    def path(self) -> str:
        return self.name() + self.random.choice(SUFFIXES)

    def city(self) -> str:
        return "".join(self._pair(CITY_STARTS, CITY_ENDS))

    def clock(self) -> str:
        return f"{self.random.randrange(24)}:{self.random.randrange(10, 60)}"

    def number(self, limit: int = 100) -> int:
        while True:
            number = self.random.randrange(2, limit)
            if (number % HELD_OUT_EVERY == 0) == self._held_out:
                return number

    def _pair(self, firsts: tuple[str, ...], seconds: tuple[str, ...]) -> tuple[str, str]:
        while True:
            first, second = self.random.randrange(len(firsts)), self.random.randrange(len(seconds))
            if ((first + second) % HELD_OUT_EVERY == 0) == self._held_out:
                return firsts[first], seconds[second]


def generate(num: int, seed: int, split: Split) -> Iterator[dict[str, JsonValue]]:
    """`num` trajectories; identical for the same seed and split."""
    generator = random.Random(f"{seed}/{split}")
    vocabulary = Vocabulary(generator, split)
    for _ in range(num):
        stories = LONG_STORIES if generator.random() < LONG_SHARE else SHORT_STORIES
        yield _to_openai(generator.choice(stories)(vocabulary), generator)


def write_jsonl(path: Path, num: int, seed: int, split: Split) -> None:
    """Write generated trajectories, one per line, atomically."""
    lines = (json.dumps(item, ensure_ascii=False) for item in generate(num, seed, split))
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def _read(values: Vocabulary) -> Story:
    path, word = values.path(), values.random.choice(WORDS)
    request = values.random.choice(('Read "{}"', 'What is in "{}"?', 'Show "{}"')).format(path)
    step = Step("I read it.", (("read", {"path": path}, word),))
    return Story(request, (step,), f"It says {word}.", f"It says {word}")


def _read_two(values: Vocabulary) -> Story:
    paths, words = (values.path(), values.path()), (values.random.choice(WORDS), values.random.choice(WORDS))
    request = values.random.choice(('Read "{}" and "{}"', 'What is in "{}" and "{}"?')).format(*paths)
    calls = tuple(("read", _arguments(path=path), word) for path, word in zip(paths, words, strict=True))
    return Story(request, (Step("Two calls.", calls),), "I have both.", f"They say {words[0]} and {words[1]}")


def _list(values: Vocabulary) -> Story:
    folder, name, hidden = values.name(), values.path(), values.random.random() < 0.5
    request = f'List {"hidden files" if hidden else "files"} in "{folder}"'
    step = Step("I list it.", (("list", {"folder": folder, "hidden": hidden}, name),))
    return Story(request, (step,), "One file.", f'There is "{name}"')


def _list_and_read(values: Vocabulary) -> Story:
    folder, path, word = values.name(), values.path(), values.random.choice(WORDS)
    request = values.random.choice(('Read the file in "{}"', 'What does the file in "{}" say?')).format(folder)
    first = Step("First I list it.", (("list", {"folder": folder, "hidden": False}, path),))
    second = Step(f'It has "{path}". I read it.', (("read", {"path": path}, word),))
    return Story(request, (first, second), f"It says {word}.", f"It says {word}")


def _find(values: Vocabulary) -> Story:
    word, limit, path = values.name(), values.number(10), values.path()
    request = values.random.choice(('Find {1} files with "{0}"', 'Find "{0}" in {1} files')).format(word, limit)
    step = Step("I look for it.", (("find", {"word": word, "limit": limit}, path),))
    return Story(request, (step,), "One file has it.", f'Found "{path}"')


def _add(values: Vocabulary) -> Story:
    a, b = values.number(), values.number()
    request = values.random.choice(("What is {} + {}?", "Add {} and {}")).format(a, b)
    step = Step("I add them.", (("add", {"a": a, "b": b}, str(a + b)),))
    return Story(request, (step,), f"The sum is {a + b}.", f"It is {a + b}")


def _roll(values: Vocabulary) -> Story:
    sides = values.number(30)
    rolled = values.random.randint(1, sides)
    request = values.random.choice(("Roll a die with {} sides", "Roll {} sides")).format(sides)
    step = Step("I roll it.", (("roll", {"sides": sides}, str(rolled)),))
    return Story(request, (step,), f"It shows {rolled}.", f"You got {rolled}")


def _time(values: Vocabulary) -> Story:
    city, clock = values.city(), values.clock()
    request = values.random.choice(('What time is it in "{}"?', 'Time in "{}"?')).format(city)
    step = Step("I ask for the time.", (("clock", {"city": city}, clock),))
    return Story(request, (step,), f"It is {clock} there.", f"It is {clock}")


def _two_times(values: Vocabulary) -> Story:
    cities, clocks = (values.city(), values.city()), (values.clock(), values.clock())
    calls = tuple(("clock", _arguments(city=city), clock) for city, clock in zip(cities, clocks, strict=True))
    answer = f"It is {clocks[0]} and {clocks[1]}"
    return Story('Time in "{}" and "{}"?'.format(*cities), (Step("Two calls.", calls),), "I have both.", answer)


def _alarm(values: Vocabulary) -> Story:
    minutes, loud = values.number(60), values.random.random() < 0.5
    request = f"Set a {'loud' if loud else 'silent'} alarm in {minutes} minutes"
    step = Step("I set it.", (("alarm", {"minutes": minutes, "loud": loud}, "done"),))
    return Story(request, (step,), "It is set.", f"It rings in {minutes} minutes")


def _note(values: Vocabulary) -> Story:
    to, text = values.name(), values.name()
    request = values.random.choice(('Tell "{}" about "{}"', 'Send "{}" the note "{}"')).format(to, text)
    step = Step("I send it.", (("send", {"to": to, "text": text}, "sent"),))
    return Story(request, (step,), "The note is sent.", f'I told "{to}"')


LONG_STORIES: tuple[Callable[[Vocabulary], Story], ...] = (_read_two, _two_times, _list_and_read)
"""Stories with two calls, in parallel or in sequence."""
SHORT_STORIES: tuple[Callable[[Vocabulary], Story], ...] = (_read, _list, _find, _add, _roll, _time, _alarm, _note)
LONG_SHARE = 0.25


def _arguments(**values: str) -> Arguments:
    return dict(values)


def _to_openai(story: Story, generator: random.Random) -> dict[str, JsonValue]:
    messages: list[JsonValue] = [
        {"role": "system", "content": generator.choice(PROMPTS)},
        {"role": "user", "content": story.request},
    ]
    num_calls = 0
    for step in story.steps:
        calls: list[JsonValue] = []
        results: list[JsonValue] = []
        for name, arguments, result in step.calls:
            num_calls += 1
            function: dict[str, JsonValue] = {"name": name, "arguments": json.dumps(arguments)}
            calls.append({"id": f"call_{num_calls}", "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": f"call_{num_calls}", "content": result})
        messages.append({"role": "assistant", "content": "", "reasoning_content": step.thinking, "tool_calls": calls})
        messages += results
    messages.append({"role": "assistant", "content": story.answer, "reasoning_content": story.reflection})
    return {"messages": messages, "tools": _choose_tools(story, generator)}


def _choose_tools(story: Story, generator: random.Random) -> list[JsonValue]:
    """The tools that the story needs and up to two others, three at most, in random order."""
    needed = dict.fromkeys(name for step in story.steps for name, _, _ in step.calls)
    others = [name for name in TOOLS if name not in needed]
    num_others = min(3 - len(needed), generator.choice((0, 0, 0, 1, 1, 2)))
    names = [*needed, *generator.sample(others, num_others)]
    generator.shuffle(names)
    return [
        {"type": "function", "function": {"name": name, "description": TOOLS[name][0], "parameters": TOOLS[name][1]}}
        for name in names
    ]
