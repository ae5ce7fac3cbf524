"""Requests that are nearly right: one or two places of a good one changed for something else."""

import copy
import random

from m2forge.records import JsonValue

NUMBERS: list[JsonValue] = [None, True, False, 0, 1, -1, 2**31, 2**63, -(2**80), 10**5000, 0.5, -0.0, 1e308]
TEXTS: list[JsonValue] = ["", "x", "text", "function", "assistant", "tool", "\x00", "\u2028", "💥", "{", "{}", "[]"]
LISTS: list[JsonValue] = [[], [None], [[]], [{}], [1, "x"], ["x"] * 5]
OBJECTS: list[JsonValue] = [{}, {"": {}}, {"type": "text"}, {"type": 5}, {"role": "user"}]
ODD = [*NUMBERS, *TEXTS, "1" * 5000, "[" * 200, *LISTS, *OBJECTS]


def mutated(body: dict[str, JsonValue], chance: random.Random) -> dict[str, JsonValue]:
    changed = copy.deepcopy(body)
    for _ in range(chance.randint(1, 2)):
        _mutate(changed, chance)
    return changed


def _mutate(body: dict[str, JsonValue], chance: random.Random) -> None:
    place: dict[str, JsonValue] | list[JsonValue] = body
    while True:
        inner = [item for item in (place.values() if isinstance(place, dict) else place) if item]
        nested = [item for item in inner if isinstance(item, dict | list)]
        if not nested or chance.random() < 0.4:
            break
        place = chance.choice(nested)
    odd = copy.deepcopy(chance.choice(ODD))
    if isinstance(place, dict):
        names = [*place, "surprise"]
        name = chance.choice(names)
        if chance.random() < 0.2:
            place.pop(name, None)
        else:
            place[name] = odd
    elif chance.random() < 0.3:
        place.insert(chance.randint(0, len(place)), odd)
    elif place:
        place[chance.randrange(len(place))] = odd
