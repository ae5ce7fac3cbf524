"""Steps read from recorded calls with a real tokenizer and chat format."""

import numpy as np

from m2forge.records import Call, FinishReason
from m2forge.reward.rule import episode_time_s, read_step
from m2forge.text.format import make_format
from m2forge.text.message import Message, Tool
from tests.reward.sample import LS, call, episode
from tests.text.draw import m2_tokenizer

TOOLS = (Tool("ls", "", {"type": "object", "properties": {"path": {"type": "string"}}}),)
CONTEXT = (Message("user", "What is here?"),)


def recorded(ids: list[int]) -> Call:
    return Call(
        prompt_ids=np.array([1], np.int32),
        response_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.zeros(len(ids), np.int32),
        finish_reason=FinishReason.STOP,
        started_s=0.0,
        finished_s=1.0,
    )


def test_a_recorded_call_is_read_as_it_was_written() -> None:
    format = make_format("minimax_m2", m2_tokenizer())
    written = Message("assistant", "", "I look.", (LS,))
    rendered = format.extend(CONTEXT, (written,), TOOLS)
    ids = [id for id, trained in zip(rendered.ids, rendered.trained, strict=True) if trained]
    step = read_step(recorded(ids), format, TOOLS, CONTEXT)
    assert step.completion.message() == written
    assert step.completion.problems == ()
    assert step.completion.closed
    assert (step.finish_reason, step.context) == (FinishReason.STOP, CONTEXT)


def test_an_empty_action_is_a_step() -> None:
    step = read_step(recorded([]), make_format("minimax_m2", m2_tokenizer()))
    assert (step.completion.content, step.completion.tool_calls) == ("", ())


def test_ids_that_only_the_network_knows_have_no_text() -> None:
    tokenizer = m2_tokenizer()
    format, ids = make_format("minimax_m2", tokenizer), tokenizer.encode("Hm.")
    with_more = [*ids[:1], tokenizer.vocab_size, *ids[1:], tokenizer.vocab_size + 3]
    assert read_step(recorded(with_more), format).completion == read_step(recorded(ids), format).completion


def test_time_runs_from_the_first_request_to_the_last_answer() -> None:
    assert episode_time_s(episode("e", (call(1, 5.0, 9.0), call(1, 2.0, 4.0)))) == 7.0
    assert episode_time_s(episode("e")) == 0.0
