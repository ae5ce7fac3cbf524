"""Replayed and rendered, a log gives the prompts that a gateway recorded, whatever was done to the conversations."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.agents.call_log import MAIN, Appended, Applied, Called, LogEntry, read_log, write_log
from m2forge.agents.client import Reply
from m2forge.agents.config import DropToolOutputConfig, SlidingWindowConfig, SummariseConfig
from m2forge.agents.loop_agent import Context
from m2forge.agents.operation import Operation, make_operation
from m2forge.agents.rebuild import rebuild, replay
from m2forge.errors import DataError, NotFoundError, RecordError
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool
from tests.agents.history_client import HistoryClient, drawn
from tests.gateway.dialogue import FORMATS, call, chatml, minimax
from tests.text.draw import TOOLS

ALL_FORMATS = {
    **{name: format() for name, format in FORMATS.items()},
    "minimax_m2 dropping thinking": minimax(drop_thinking=True),
    "chatml dropping thinking": chatml(drop_thinking=True),
}
OPERATIONS: list[Operation] = [
    make_operation(SlidingWindowConfig(max_turns=3, keep_turns=2)),
    make_operation(SummariseConfig(keep_turns=1)),
    make_operation(SummariseConfig(keep_turns=2)),
    make_operation(DropToolOutputConfig(max_share=0.01, keep_share=0.001)),
]


class Speak:
    """Says something else each time: words, or one to three calls."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._count = rng, 0

    def __call__(self) -> Message:
        self._count += 1
        thinking = f"think {self._count}" if self._rng.random() < 0.8 else ""
        number = self._rng.randrange(4)
        calls = tuple(call(query=f"q {self._count} {index}", limit=index) for index in range(number))
        return Message("assistant", f"say {self._count}" if self._rng.random() < 0.7 else "", thinking, calls)


async def wander(contexts: Sequence[Context], steps: Sequence[int], rng: random.Random) -> None:
    """Each step is a turn or an operation in one of the conversations."""
    for context in contexts:
        context.append(Message("system", "Be brief."), Message("user", f"Find {context.name}."))
    for step in steps:
        context = contexts[step % len(contexts)]
        if step % 3 == 0 and len(context.messages) > 2:
            operation = rng.choice(OPERATIONS)
            context.apply(operation, await operation.prepare(context.view(), context.complete_aside))
            continue
        reply: Reply = await context.complete()
        results = [
            Message("tool", "out " * rng.randrange(40), tool_call_id=made.id) for made in reply.message.tool_calls
        ]
        context.append(*(results or [Message("user", f"go on {step}")]))


@pytest.mark.parametrize("name", ALL_FORMATS)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.integers(0, 11), max_size=14))
def test_random_operations_are_rebuilt_as_they_were_recorded(name: str, seed: int, steps: list[int]) -> None:
    format, rng = ALL_FORMATS[name], random.Random(seed)
    client = HistoryClient(format, drawn(format, Speak(rng), rng))
    log: list[LogEntry] = []
    contexts = [Context(f"main{suffix}", TOOLS, client, log, max_tokens=1000) for suffix in ("", ".0")]
    asyncio.run(wander(contexts, steps, rng))
    log = read_log(write_log(log))
    states = rebuild(log, format, client.calls)
    assert [state.messages for state in states] == client.asked
    assert [state.id for state in states] == list(client.calls)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_differ_by_their_ids_alone_are_rebuilt(name: str) -> None:
    """When the first of them is forgotten, the second comes to its place."""
    format, rng = ALL_FORMATS[name], random.Random(1)
    message = Message("assistant", "again", "hm", (call(query="the same", limit=1),))
    client = HistoryClient(format, drawn(format, lambda: message, rng, cut_share=0))
    log: list[LogEntry] = []
    context = Context(MAIN, TOOLS, client, log, max_tokens=1000)
    asyncio.run(wander([context], [1, 2], rng))
    context.apply(OPERATIONS[0], {"keep_turns": 1})
    asyncio.run(context.complete())
    first, second = (made.response_ids.tolist() for made in list(client.calls.values())[:2])
    assert first != second, "the policy should say the same in other tokens"
    assert len(rebuild(log, format, client.calls)) == 3


def short_log(format: ChatFormat) -> tuple[list[LogEntry], HistoryClient]:
    rng = random.Random(3)
    client = HistoryClient(format, drawn(format, Speak(rng), rng))
    log: list[LogEntry] = []
    asyncio.run(wander([Context(MAIN, TOOLS, client, log, max_tokens=1000)], [1, 2, 4, 3, 5, 7], rng))
    assert any(isinstance(entry, Applied) for entry in log)
    return log, client


def test_a_message_that_was_not_there_is_noticed() -> None:
    format = minimax()
    log, client = short_log(format)
    assert rebuild(log, format, client.calls)
    at = next(index for index, entry in enumerate(log) if isinstance(entry, Appended) and index > 2)
    entry = log[at]
    assert isinstance(entry, Appended)
    last = replace(entry.messages[-1], content="another")
    with pytest.raises(RecordError, match=r"call 1 \(id-1, context main\): the rebuilt prompt .* at position \d+"):
        rebuild(
            [*log[:at], replace(entry, messages=(*entry.messages[:-1], last)), *log[at + 1 :]], format, client.calls
        )


def test_an_operation_that_was_left_out_is_noticed() -> None:
    format = minimax()
    log, client = short_log(format)
    without = [entry for entry in log if not isinstance(entry, Applied)]
    with pytest.raises(RecordError, match="differs from the recorded one"):
        rebuild(without, format, client.calls)


def test_other_tokens_of_the_same_text_are_noticed() -> None:
    format = minimax()
    log, client = short_log(format)
    calls = dict(client.calls)
    first = calls["id-0"]
    said = format.tokenizer.decode(first.response_ids.tolist()[:-1])
    retokenised = [*format.tokenizer.encode(said), format.stop_ids[0]]
    same = [one == other for one, other in zip(retokenised, first.response_ids.tolist(), strict=False)].index(False)
    # What the first call sampled stands in the second one's prompt: swap it for the tokenizer's own reading there.
    prompt = first.prompt_ids.tolist()
    second = calls["id-1"]
    rest = second.prompt_ids.tolist()[len(prompt) + first.response_ids.size :]
    calls["id-1"] = replace(second, prompt_ids=[*prompt, *retokenised, *rest])  # type: ignore[arg-type]  # made an array
    with pytest.raises(RecordError, match=rf"call 1 .* at position {len(prompt) + same}:"):
        rebuild(log, format, calls)


def test_an_answer_that_was_not_given_is_noticed() -> None:
    format = minimax()
    log, client = short_log(format)
    at, entry = next((index, entry) for index, entry in enumerate(log) if isinstance(entry, Called))
    forged = replace(entry, answer=replace(entry.answer, content="forged"))
    with pytest.raises(RecordError, match=r"call 0 .* but the agent received"):
        rebuild([*log[:at], forged, *log[at + 1 :]], format, client.calls)
    calls = {id: made for id, made in client.calls.items() if id != "id-1"}
    with pytest.raises(
        RecordError, match=r"call 1 \(id-1, context main\): it is in the log, but the gateway did not record it"
    ):
        rebuild(log, format, calls)


def test_a_log_that_makes_no_sense_is_refused() -> None:
    log, _ = short_log(minimax())
    with pytest.raises(RecordError, match="log entry 1: context 'main' is not open"):
        list(replay(log[1:]))
    with pytest.raises(RecordError, match="log entry 2: context 'main' is already open"):
        list(replay([log[0], *log]))
    with pytest.raises(NotFoundError, match="operation 'other'"):
        list(replay([*log, Applied(MAIN, "other", {}, {})]))
    for line in (b"{", b"[]", b'{"kind": "called"}', b'{"kind": "x", "context": "main"}'):
        with pytest.raises(DataError, match="log line 2: not an entry"):
            read_log(write_log(log[:1]) + line)


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_what_an_engine_samples_at_random_is_rebuilt(name: str) -> None:
    """Words that are no language, markers in strange places, answers that are cut off."""
    format = ALL_FORMATS[name]
    for seed in range(5):
        rng = random.Random(seed)

        def draw(tools: Sequence[Tool], rng: random.Random = rng) -> list[int]:
            ids = [rng.randrange(format.tokenizer.vocab_size) for _ in range(rng.randrange(25))]
            ends = [index for index, id in enumerate(ids) if id in format.stop_ids]
            return ids[: ends[0] + 1] if ends else ids

        client = HistoryClient(format, draw)
        log: list[LogEntry] = []
        asyncio.run(wander([Context(MAIN, TOOLS, client, log, max_tokens=1000)], [1, 2, 4, 5, 3, 7, 8, 6, 10], rng))
        assert len(rebuild(log, format, client.calls)) == len(client.calls) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_policy_that_repeats_itself_in_other_tokens_is_rebuilt(name: str) -> None:
    """Then which answer a message is, its text does not tell."""
    format = ALL_FORMATS[name]
    for seed in range(12):
        rng = random.Random(seed)

        def say(rng: random.Random = rng) -> Message:
            calls = (call(query="q", limit=1),) * rng.randrange(3)
            return Message("assistant", rng.choice(["ok", "yes"]), rng.choice(["hm", "so"]), calls)

        client = HistoryClient(format, drawn(format, say, rng, cut_share=0))
        log: list[LogEntry] = []
        contexts = [Context(f"main{suffix}", TOOLS, client, log, max_tokens=1000) for suffix in ("", ".0")]
        asyncio.run(wander(contexts, [rng.randrange(12) for _ in range(12)], rng))
        assert rebuild(log, format, client.calls)


def test_the_formats_split_by_whether_they_rewrite_history() -> None:
    rng = random.Random(0)
    seen = []
    for format in (minimax(), chatml(drop_thinking=True)):
        client = HistoryClient(format, drawn(format, Speak(rng), rng))
        log: list[LogEntry] = []
        asyncio.run(wander([Context(MAIN, TOOLS, client, log, max_tokens=1000)], [1] * 8, rng))
        seen.append({divergence for divergence in client.divergences if divergence is not None})
    assert seen[0] == set()
    assert seen[1] == {"template"}
