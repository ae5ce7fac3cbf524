"""Records refuse what cannot be true, naming record and field, and cannot be changed afterwards."""

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.records import (
    NO_TARGET,
    Call,
    Domain,
    Episode,
    FinishReason,
    Pack,
    PolicyVersion,
    RequestedSampling,
    Reward,
    Sampling,
    Task,
)


def make_call(**changes: Any) -> Call:
    fields: dict[str, Any] = {
        "prompt_ids": np.array([1, 2, 3], np.int32),
        "response_ids": np.array([4, 5], np.int32),
        "logprobs": np.array([-0.5, 0.0], np.float32),
        "versions": np.array([7, 8], np.int32),
        "finish_reason": FinishReason.STOP,
        "started_s": 10.0,
        "finished_s": 11.0,
    }
    return Call(**(fields | changes))


def make_task(**changes: Any) -> Task:
    return Task(**({"id": "t1", "domain": Domain.CODING, "instruction": "add"} | changes))


def test_token_fields_are_read_only_copies_of_the_right_type() -> None:
    ids = np.array([1, 2], np.int64)
    call = make_call(prompt_ids=ids)
    ids[0] = 9
    assert call.prompt_ids.tolist() == [1, 2]
    assert call.prompt_ids.dtype == call.response_ids.dtype == call.versions.dtype == np.int32
    assert call.logprobs.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        call.prompt_ids[0] = 5


def test_a_frozen_array_is_shared_not_copied() -> None:
    first = make_call()
    assert np.shares_memory(make_call(prompt_ids=first.prompt_ids).prompt_ids, first.prompt_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": np.array([1, -2])}, "Call: prompt_ids: expected integers from 0 to 2147483647, received -2"),
        ({"prompt_ids": np.array([1, -2], np.int32)}, "Call: prompt_ids: expected integers from 0 to .* received -2"),
        ({"prompt_ids": np.array([2**31], np.uint32)}, "Call: prompt_ids: expected integers from 0"),
        ({"prompt_ids": np.array([2**31])}, "Call: prompt_ids: expected integers from 0"),
        ({"prompt_ids": np.array([1.0])}, r"Call: prompt_ids: expected a row of integers, received 'shape \(1,\) of"),
        ({"prompt_ids": np.array([[1]])}, r"Call: prompt_ids: expected a row of integers"),
        ({"prompt_ids": np.array([True])}, r"Call: prompt_ids: expected a row of integers"),
        ({"prompt_ids": np.array([], np.int32)}, "Call: prompt_ids: expected at least one token"),
        ({"logprobs": np.array([-1.0])}, "Call: logprobs: expected one per response token, 2, received '1 values'"),
        ({"versions": np.array([1, 2, 3])}, "Call: versions: expected one per response token, 2"),
        ({"logprobs": np.array([-1.0, math.nan])}, r"Call: logprobs\[1\]: expected a finite number, .* received nan"),
        ({"logprobs": np.array([-math.inf, -1.0])}, r"Call: logprobs\[0\]: expected a finite number"),
        ({"logprobs": np.array([-1e300, -1.0])}, r"Call: logprobs\[0\]: expected a finite number"),
        ({"logprobs": np.array([-1.0, 0.01])}, r"Call: logprobs\[1\]: expected a finite number, at most 0"),
        ({"logprobs": np.array(["a", "b"])}, "Call: logprobs: expected a row of numbers"),
        ({"started_s": math.nan}, "Call: started_s: expected a finite number, received nan"),
        ({"finished_s": 9.0}, "Call: finished_s: expected at least started_s, 10.0, received 9.0"),
    ],
)
def test_broken_call_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        make_call(**changes)


def test_empty_action_is_a_call() -> None:
    assert make_call(response_ids=[], logprobs=[], versions=[]).response_ids.size == 0


ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@given(ids.filter(bool), ids, st.data())
def test_calls_survive_pickling_equal_and_read_only(
    prompt: list[int], response: list[int], data: st.DataObject
) -> None:
    size = len(response)
    logprobs = data.draw(st.lists(st.floats(-1e30, 0.0), min_size=size, max_size=size))
    call = make_call(prompt_ids=prompt, response_ids=response, logprobs=logprobs, versions=[3] * size)
    again = pickle.loads(pickle.dumps(call))
    assert again == call
    assert not again.prompt_ids.flags.writeable


OTHER_VALUES: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "response_ids": [4, 6],
    "logprobs": [-0.5, -1.0],
    "versions": [8, 8],
    "finish_reason": FinishReason.LENGTH,
    "started_s": 9.5,
    "finished_s": 12.0,
    "sampling": Sampling(0.7),
    "requested": RequestedSampling(Sampling(0.0)),
    "notices": ("tool_choice: treated as auto",),
}


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(Call) if item.init])
def test_calls_are_equal_unless_a_field_differs(name: str) -> None:
    assert make_call() == make_call()
    assert make_call(**{name: OTHER_VALUES[name]}) != make_call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "Sampling: temperature: expected 0 or more, received -0.1"),
        ({"temperature": math.nan}, "Sampling: temperature: expected a finite number, received nan"),
        ({"top_p": 0.0}, "Sampling: top_p: expected a number above 0, at most 1, received 0.0"),
        ({"top_p": math.nan}, "Sampling: top_p"),
        ({"top_k": -1}, "Sampling: top_k: expected an integer from 0 to 2147483647, received -1"),
        ({"top_k": 2.5}, "Sampling: top_k"),
        ({"top_k": 2**31}, "Sampling: top_k"),
        ({"min_p": 1.5}, "Sampling: min_p: expected a number from 0 to 1, received 1.5"),
        ({"presence_penalty": math.inf}, "Sampling: presence_penalty: expected -10000 to 10000, received inf"),
        ({"frequency_penalty": math.nan}, "Sampling: frequency_penalty"),
        ({"repetition_penalty": 0.0}, "Sampling: repetition_penalty: expected 0.0001 to 10000, received 0.0"),
    ],
)
def test_broken_sampling_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Sampling(**changes)


def test_sampling_is_truncated_where_tokens_could_not_be_drawn() -> None:
    assert not Sampling().is_truncated
    assert not Sampling(temperature=0.3).is_truncated
    for sampling in (Sampling(0.0), Sampling(top_p=0.9), Sampling(top_k=40), Sampling(min_p=0.05)):
        assert sampling.is_truncated, sampling


@pytest.mark.parametrize(
    "sampling",
    [Sampling(presence_penalty=0.5), Sampling(frequency_penalty=-0.5), Sampling(repetition_penalty=1.5)],
)
def test_penalised_sampling_counts_as_truncated(sampling: Sampling) -> None:
    assert not Sampling().is_penalised
    assert sampling.is_penalised
    assert sampling.is_truncated


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_task().id = "other"  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": ""}, "Task: id: expected text, received ''"),
        ({"instruction": ""}, "Task t1: instruction: expected text"),
        ({"difficulty": math.inf}, "Task t1: difficulty: expected a finite number"),
        ({"metadata": {"x": object()}}, "Task t1: metadata: expected JSON values only"),
        ({"metadata": {"x": math.nan}}, "Task t1: metadata: expected JSON values only"),
    ],
)
def test_broken_task_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        make_task(**changes)


def test_broken_reward_and_version_are_refused_by_field() -> None:
    with pytest.raises(RecordError, match="Reward: total: expected a finite number, received nan"):
        Reward(process=0.0, speed=0.0, perf=1.0, total=math.nan)
    with pytest.raises(RecordError, match="PolicyVersion: step: expected 0 to 2147483647, received -1"):
        PolicyVersion("run", -1)


def test_episode_needs_a_name_for_its_failure() -> None:
    with pytest.raises(RecordError, match="Episode e1: failure: expected text"):
        Episode("e1", make_task(), (), failure="")


def make_pack(**changes: Any) -> Pack:
    fields: dict[str, Any] = {"tokens": [1, 2, 3], "targets": [2, NO_TARGET, 4], "lengths": [2, 1], "tags": [0, 1]}
    return Pack(**(fields | changes))


def test_a_pack_takes_rows_of_integers_and_freezes_them() -> None:
    pack = make_pack()
    assert pack.targets.tolist() == [2, NO_TARGET, 4]
    assert pack.tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        pack.tokens[0] = 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": [1, 2]}, "Pack: targets: expected one per token, 3, received '2 values'"),
        ({"targets": [1, 2, -2]}, "Pack: targets: expected integers from -1 to 2147483647, received -2"),
        ({"tokens": [1, NO_TARGET, 3]}, "Pack: tokens: expected integers from 0"),
        ({"lengths": [2, 2]}, "Pack: lengths: expected lengths that add up to 3 tokens"),
        ({"lengths": [3, 0]}, "Pack: lengths: expected lengths that add up to 3 tokens"),
        ({"tags": [0]}, "Pack: tags: expected one per document, 2"),
    ],
)
def test_a_pack_that_does_not_add_up_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        make_pack(**change)
