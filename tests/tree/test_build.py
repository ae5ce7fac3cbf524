"""Broken calls are refused by name; the calls beside them go on."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from m2forge.records import Sampling
from m2forge.tree.build import RawCall, build_trees
from tests.tree.draw import VOCAB


def raw(name: str, group: str = "g", **changes: Any) -> RawCall:
    fields: dict[str, Any] = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4],
        "logprobs": [-0.5, -1.0],
        "versions": [0, 1],
    }
    return RawCall(name=name, group=group, **(fields | changes))


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": [1, 5]}, "prompt_ids[1]: expected an id below the vocabulary's 5, received 5"),
    ({"response_ids": [3, 1 << 40]}, "response_ids: expected integers from 0"),
    ({"prompt_ids": [-1]}, "prompt_ids: expected integers from 0"),
    ({"prompt_ids": []}, "prompt_ids: expected at least one token"),
    ({"prompt_ids": [[1], [1, 2]]}, "inhomogeneous"),
    ({"prompt_ids": None}, "prompt_ids: expected a row of integers"),
    ({"logprobs": [-1.0]}, "logprobs: expected one per response token, 2, received '1 values'"),
    ({"logprobs": [-1.0, math.nan]}, "logprobs[1]: expected a finite number"),
    ({"logprobs": [None, None]}, "logprobs: expected a row of numbers"),
    ({"versions": [1]}, "versions: expected one per response token"),
    ({"advantage": math.nan}, "advantage: expected a finite number, received nan"),
    ({"advantage": None}, "advantage: expected a finite number, received None"),
    ({"advantage": "1.0"}, "advantage: expected a finite number, received '1.0'"),
    ({"advantage": 10**400}, "advantage: expected a finite number, received 1000"),
    ({"weight": -1.0}, "weight: expected a finite number, at least 0, received -1.0"),
    ({"weight": math.inf}, "weight: expected a finite number"),
    ({"weight": None}, "weight: expected a finite number, received None"),
    ({"weight": "1.0"}, "weight: expected a finite number, received '1.0'"),
    ({"sampling": {"temperature": 10**400}}, "int too large"),
    ({"sampling": {"temperature": -1.0}}, "Sampling: temperature: expected 0 or more"),
    ({"sampling": {"warmth": 1.0}}, "unexpected keyword argument 'warmth'"),
    ({"sampling": {"top_p": "all"}}, "not supported between"),
    ({"finish_reason": "bored"}, "'bored' is not a valid FinishReason"),
    ({"finished_s": -1.0}, "finished_s: expected at least started_s"),
    ({"started_s": None}, "started_s: expected a finite number, received None"),
    ({"experts": np.zeros((9, 1, 1), np.int32)}, "experts: expected integers"),
    ({"response_ids": [3] * 9, "logprobs": [0] * 9, "versions": [0] * 9}, "expected at most 10 tokens, received 11"),
]


@pytest.mark.parametrize(("changes", "reason"), BROKEN)
def test_a_broken_call_is_refused_and_the_rest_go_on(changes: dict[str, Any], reason: str) -> None:
    calls = [raw("first"), raw("broken", **changes), raw("lost", group="h", **changes), raw("last")]
    trees, problems = build_trees(calls, VOCAB, max_tokens=10)
    assert [(problem.name, problem.group) for problem in problems] == [("broken", "g"), ("lost", "h")]
    assert all(reason in problem.reason for problem in problems), problems
    whole, none = build_trees([raw("first"), raw("last")], VOCAB)
    assert trees == whole
    assert none == ()


def test_calls_are_merged_by_group_and_keep_what_belongs_to_them() -> None:
    greedy = Sampling(temperature=0.0)
    calls = [
        raw("a", sampling={"temperature": 0.5}),
        raw("a", group="h", advantage=2, weight=0.25, sampling=greedy),
        replace(raw("b"), episode="e", finish_reason="length"),
    ]
    trees, problems = build_trees(calls, VOCAB)
    assert not problems
    assert {group: [sample.name for sample in tree.samples] for group, tree in trees.items()} == {
        "g": ["a", "b"],
        "h": ["a"],
    }
    assert trees["g"].num_tokens == 4
    assert trees["g"].samples[1].episode == "e"
    assert trees["g"].call(1).finish_reason == "length"
    assert trees["h"].samples[0].advantage == 2
    assert trees["h"].samples[0].weight == 0.25
    assert [trees[group].call(0).sampling for group in "gh"] == [Sampling(0.5), greedy]


def test_a_name_is_used_once_in_a_group() -> None:
    trees, (problem,) = build_trees([raw("a"), raw("a")], VOCAB)
    assert problem.reason == "Sample a: name: expected one that is not in the tree yet"
    assert len(trees["g"].samples) == 1
