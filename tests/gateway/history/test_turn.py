"""The tree of turns: ways up it that are short equal those that take every step."""

import random

from m2forge.gateway.history.history import Trail
from m2forge.gateway.history.turn import Turn
from m2forge.text.message import Message


def grow(rng: random.Random, number: int) -> list[Turn]:
    turns = [Turn(None, Message("system"))]
    for index in range(number):
        # Mostly long chains, with branches.
        parent = turns[-1] if rng.random() < 0.9 else rng.choice(turns)
        turns.append(Turn(parent, Message("user", str(index))))
        parent.add(turns[-1])
    return turns


def test_a_turn_is_below_those_that_a_walk_up_meets() -> None:
    rng = random.Random(1)
    for number in (1, 5, 40, 200):
        turns = grow(rng, number)
        for turn in rng.sample(turns, min(len(turns), 30)):
            above = set(map(id, turn.above()))
            assert [turn.is_below(other) for other in turns] == [id(other) in above for other in turns]


def test_the_way_up_takes_few_steps() -> None:
    turn = root = Turn(None, Message("system"))
    for _ in range(4000):
        turn = Turn(turn, Message("user"))
    num_steps, at = 0, turn
    while at is not root:
        assert at.parent is not None
        at = at._jump or at.parent
        num_steps += 1
    assert num_steps < 60


def test_a_trail_follows_what_was_answered() -> None:
    rng = random.Random(2)
    turns = grow(rng, 60)
    for turn in turns:
        children = [child for same in turn.children.values() for child in same]
        turn.answered = rng.choice(children) if children else None
    for turn in turns:
        trail = Trail(turn)
        for distance in sorted(rng.sample(range(70), 20)):
            plain: Turn | None = turn
            for _ in range(distance):
                plain = None if plain is None else plain.answered
            assert trail.at(distance) is plain
