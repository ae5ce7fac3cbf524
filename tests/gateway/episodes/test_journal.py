"""The journal: what was appended is read back equal, whatever happens to the process or the disk in between."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import ExistsError, RecordError
from m2forge.gateway.config import Budget
from m2forge.gateway.episodes.journal import (
    MAGIC,
    Answered,
    Closed,
    Created,
    Entry,
    Journal,
    JournalError,
    Rewarded,
    SampleEntry,
    decode_entry,
    encode_entry,
    read_entries,
)
from m2forge.gateway.history.history import Divergence
from m2forge.gateway.history.turn import PathRecord, TurnRecord
from m2forge.records import FinishReason, RequestedSampling, Sampling
from m2forge.text.message import Message
from m2forge.text.parser import Completion, Problem, ProblemKind
from tests.text.draw import TOOLS, assistants, hostile_text

CREATED = Created("ep_1", "task", "group", "0" * 64, 12.5, Budget(max_calls=3, max_s=1.5))
MESSAGES = assistants((), (), ()) | st.builds(Message, st.sampled_from(["user", "system"]), hostile_text)
PLACES = st.none() | st.integers(0, 2**31 - 1)


def routed(tokens: list[int]) -> npt.NDArray[np.int16]:
    return np.repeat(np.array(tokens, np.int16), 6).reshape(len(tokens), 3, 2)


@st.composite
def samples(draw: st.DrawFn) -> SampleEntry:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
    message = draw(assistants((), (), ()))
    problems = draw(st.lists(st.builds(Problem, st.sampled_from(ProblemKind), hostile_text), max_size=2))
    return SampleEntry(
        response_ids=np.array(ids, np.int32),
        logprobs=np.array([-0.1 * place for place in range(len(ids))], np.float32),
        versions=np.array(ids[::-1], np.int32),
        finish_reason=draw(st.sampled_from(FinishReason)),
        started_s=draw(st.floats(0, 1e10)),
        finished_s=draw(st.floats(0, 1e10)),
        completion=Completion(
            message.thinking, message.content, message.tool_calls, tuple(problems), draw(st.booleans())
        ),
        experts=draw(st.none() | st.lists(st.sampled_from([-1, 5]), max_size=4).map(routed)),
    )


ANSWERED = st.builds(
    Answered,
    id=hostile_text,
    digest=hostile_text,
    retry_token=hostile_text,
    path=st.none()
    | st.builds(
        PathRecord,
        parent=st.integers(-1, 9),
        tools=st.sampled_from([(), TOOLS]),
        prefix=st.integers(-1, 9),
        start=st.integers(0, 2**31 - 1),
        turns=st.lists(st.builds(TurnRecord, MESSAGES, PLACES, PLACES, PLACES, st.integers(0, 9)), max_size=3).map(
            tuple
        ),
    ),
    prompt_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda ids: np.array(ids, np.int32)),
    divergence=st.none() | st.sampled_from(Divergence),
    sampling=st.builds(Sampling, temperature=st.floats(0, 2), top_k=st.integers(0, 50)),
    samples=st.lists(samples(), min_size=1, max_size=3).map(tuple),
    reply=st.dictionaries(hostile_text, hostile_text | st.integers() | st.none(), max_size=3),
    is_charged=st.booleans(),
    requested=st.none()
    | st.builds(RequestedSampling, st.just(Sampling(0.0)), st.none() | st.integers(-(2**63), 2**63 - 1)),
    notices=st.lists(hostile_text, max_size=2).map(tuple),
)
ENTRIES = (
    ANSWERED
    | st.just(CREATED)
    | st.just(replace(CREATED, sampling=Sampling(0.5, top_k=3)))
    | st.builds(Rewarded, hostile_text, st.floats(-9, 9), st.none() | st.integers(0, 9), st.just({"why": ["é", None]}))
    | st.builds(Closed, st.floats(0, 1e10), st.none() | hostile_text)
)


def same_entry(one: Entry, other: Entry) -> bool:
    """Field by field, arrays by value and type."""
    if not isinstance(one, Answered) or not isinstance(other, Answered):
        return one == other
    names = (
        "id",
        "digest",
        "retry_token",
        "path",
        "divergence",
        "sampling",
        "reply",
        "is_charged",
        "requested",
        "notices",
    )
    return (
        all(getattr(one, name) == getattr(other, name) for name in names)
        and _same_array(one.prompt_ids, other.prompt_ids)
        and len(one.samples) == len(other.samples)
        and all(map(_same_sample, one.samples, other.samples))
    )


def _same_sample(one: SampleEntry, other: SampleEntry) -> bool:
    plain = ("finish_reason", "started_s", "finished_s", "completion")
    return all(getattr(one, name) == getattr(other, name) for name in plain) and all(
        _same_array(getattr(one, name), getattr(other, name))
        for name in ("response_ids", "logprobs", "versions", "experts")
    )


def _same_array(one: npt.NDArray[np.generic] | None, other: npt.NDArray[np.generic] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and np.array_equal(one, other)


@given(entry=ENTRIES)
def test_an_entry_is_read_back_equal(entry: Entry) -> None:
    assert same_entry(decode_entry(encode_entry(entry)), entry)


@given(entry=ENTRIES, data=st.data())
def test_an_entry_cut_short_is_refused(entry: Entry, data: st.DataObject) -> None:
    encoded = encode_entry(entry)
    with pytest.raises(RecordError):
        decode_entry(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


def test_a_journal_holds_what_was_appended(tmp_path: Path) -> None:
    entries: list[Entry] = [CREATED, Rewarded("r", 1.0), Closed(3.0, "it broke")]
    journal = Journal.create(tmp_path / "folder" / "a.journal", sync="disk")
    for entry in entries:
        journal.append(entry)
    again, found = Journal.open(journal.path)
    assert found == entries
    again.append(Rewarded("s", 2.0, 3))
    assert read_entries(journal.path)[0] == [*entries, Rewarded("s", 2.0, 3)]
    assert journal.path.stat().st_mode & 0o077 == 0
    with pytest.raises(ExistsError, match="one journal"):
        Journal.create(journal.path)


def test_a_torn_tail_is_cut_wherever_it_tears(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    journal = Journal.create(path)
    journal.append(CREATED)
    num_whole = path.stat().st_size
    journal.append(Rewarded("torn", 1.0))
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        expected: list[Entry] = [CREATED] if size >= num_whole else []
        assert read_entries(path)[0] == expected
        assert path.stat().st_size == size
        opened, entries = Journal.open(path)
        assert entries == expected
        opened.append(Rewarded("next", 2.0))
        assert read_entries(path)[0] == [*expected, Rewarded("next", 2.0)]


@pytest.mark.parametrize("tail", [bytes(40), b"\x05\x00\x00\x00abcdefghi", b"\xff" * 30])
def test_what_a_lost_disk_cache_leaves_at_the_end_is_cut(tmp_path: Path, tail: bytes) -> None:
    journal = Journal.create(tmp_path / "a.journal")
    journal.append(CREATED)
    journal.path.write_bytes(journal.path.read_bytes() + tail)
    assert Journal.open(journal.path)[1] == [CREATED]


def test_damage_before_the_end_is_refused_and_nothing_is_cut(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "a.journal")
    journal.append(CREATED)
    journal.append(Rewarded("r", 1.0))
    data = bytearray(journal.path.read_bytes())
    data[len(MAGIC) + 20] ^= 1
    journal.path.write_bytes(data)
    with pytest.raises(RecordError, match=r"byte 8: damaged, and entries follow"):
        Journal.open(journal.path)
    assert journal.path.read_bytes() == data
    (tmp_path / "b.journal").write_bytes(b"something else")
    with pytest.raises(RecordError, match="not a journal"):
        Journal.open(tmp_path / "b.journal")


def test_a_full_disk_is_one_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write succeeds in part and then fails."""
    journal = Journal.create(tmp_path / "a.journal")
    journal.append(CREATED)
    before = journal.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 30, limits[1]))
    try:
        with pytest.raises(JournalError, match=r"a\.journal: the journal cannot be written .*free disk space"):
            journal.append(Rewarded("r" * 200, 1.0))
        assert journal.path.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    journal.append(Rewarded("r", 1.0))
    assert read_entries(journal.path)[0] == [CREATED, Rewarded("r", 1.0)]


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"gateway\.journal"):
        Journal.create(tmp_path / "file" / "a.journal")
    journal = Journal.create(tmp_path / "a.journal")
    journal.path.unlink()
    with pytest.raises(JournalError, match="No such file"):
        journal.append(CREATED)


def test_a_journal_that_another_process_writes_to_is_left_alone(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "a.journal")
    other, _ = Journal.open(journal.path)
    other.append(CREATED)
    with pytest.raises(JournalError, match="no other gateway uses this folder"):
        journal.append(Rewarded("r", 1.0))
    assert read_entries(journal.path)[0] == [CREATED]


WRITER = """
import sys
from pathlib import Path
from m2forge.gateway.episodes.journal import Rewarded
from m2forge.gateway.episodes.journal import Journal

path = Path(sys.argv[1])
journal, entries = Journal.open(path) if path.exists() else (Journal.create(path), [])
for number in range(len(entries), 10**9):
    journal.append(Rewarded(str(number), 1.0, None, {"text": "x" * (number * 7919 % 50_000)}))
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


def test_what_was_committed_survives_a_kill(tmp_path: Path) -> None:
    """Again and again, at any moment: each entry whose `append` returned is there, in order, and writing goes on."""
    path = tmp_path / "a.journal"
    rng = random.Random(0)
    num_before = 0
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": "."},
        )
        assert writer.stdout is not None
        line = writer.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(writer.pid, signal.SIGKILL)
        rest, _ = writer.communicate()
        assert int(line) == num_before
        num_told = int((line + rest).rpartition("\n")[0].split()[-1]) + 1
        ids = [entry.id for entry in read_entries(path)[0] if isinstance(entry, Rewarded)]
        assert len(ids) >= num_told > num_before
        assert ids == [str(number) for number in range(len(ids))]
        num_before = len(ids)
