"""From files to a store: what is counted, what strict refuses, when the work is done again."""

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from m2forge.errors import DataError
from m2forge.sft.config import PromptPart, SFTDataConfig, SourceConfig
from m2forge.sft.dataset import prepare
from m2forge.sft.report import Note, Problem, Report
from m2forge.sft.trajectory_store import SFTReader, Store
from m2forge.text.format import MINIMAX_M2_SPECIALS, make_format
from m2forge.text.message import Message
from m2forge.text.tokenizer import train_tokenizer
from m2forge.train.run_dir import hold_run
from tests.sft.sample import GOOD, chat_format, write_lines
from tests.text.draw import with_chat_template


def configure(*paths: Path, **keys: Any) -> SFTDataConfig:
    sources = tuple(SourceConfig(path=str(path)) for path in paths)
    return SFTDataConfig(sources=sources, **({"context": 4096} | keys))


def talk(*contents: str, prompt: str = "") -> dict[str, Any]:
    """A conversation of alternating user and assistant messages."""
    messages = [{"role": "system", "content": prompt}] if prompt else []
    for index, content in enumerate(contents):
        messages.append({"role": "assistant" if index % 2 else "user", "content": content})
    return {"messages": messages}


def texts(store: Store, draw: int = 0) -> list[str]:
    tokenizer = chat_format().tokenizer
    return [tokenizer.decode(store.read([int(document)])[0].tolist()) for document in store.variants[:, draw]]


def test_broken_lines_are_counted_and_the_rest_is_encoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = write_lines(tmp_path / "a.jsonl", [GOOD, "{", {"messages": [{"role": "robot"}]}, GOOD, "{"])
    second = write_lines(tmp_path / "b.jsonl", [talk("hello", "HI")])
    with caplog.at_level(logging.INFO, "m2forge"):
        store = prepare(configure(first, second), chat_format(), tmp_path / "store", seed=0)
    report = store.report
    assert (report.num_trajectories, report.num_kept, report.num_turns) == (3, 3, 5)
    assert report.num_tokens == store.offsets[-1]
    assert 0 < report.num_trained_tokens < report.num_tokens
    assert {problem: finding.count for problem, finding in report.problems.items()} == {
        Problem.BROKEN_JSON: 2,
        Problem.BAD_ROLE: 1,
    }
    assert [place.partition(": ")[0] for place in report.problems[Problem.BROKEN_JSON].places] == [
        f"{first}:2",
        f"{first}:5",
    ]
    assert store.sources.tolist() == [0, 0, 1]
    assert "3 of 3 trajectories accepted: 5 assistant turns" in caplog.text
    assert f"2 × broken JSON: {first}:2" in caplog.text


def test_strict_refuses_the_data_before_anything_is_kept(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD, "{", GOOD])
    with pytest.raises(DataError, match=r"1 problems.*\n  1 × broken JSON: .*a.jsonl:2"):
        prepare(configure(path, strict=True), chat_format(), tmp_path / "store", seed=0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl"]


def test_strict_takes_what_is_merely_long(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [talk("a", "b", "c" * 200, "d")])
    store = prepare(configure(path, strict=True, context=100), chat_format(), tmp_path / "store", seed=0)
    assert store.report.count(Note.CUT) == 1


def test_the_directory_of_a_new_run_is_made_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, run_dir = write_lines(tmp_path / "a.jsonl", [GOOD]), tmp_path / "run"
    before = os.umask(0)
    try:
        prepare(configure(path), chat_format(), run_dir / "data", seed=0)
    finally:
        os.umask(before)
    with hold_run(run_dir):
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert "accessible to other users" not in caplog.text


def test_data_without_a_trajectory_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["{"])
    with pytest.raises(DataError, match="no trajectory to train on: 0 of 0 trajectories accepted"):
        prepare(configure(path), chat_format(), tmp_path / "store", seed=0)
    assert not (tmp_path / "store").exists()


def test_long_trajectories_are_cut_or_dropped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = "x1" * 300
    path = write_lines(
        tmp_path / "a.jsonl", [talk("a", "KEPT", long, "b"), talk("a", "KEPT"), talk(long, "b"), talk("a", "b", long)]
    )
    with caplog.at_level(logging.WARNING, "m2forge"):
        store = prepare(configure(path, context=200), chat_format(), tmp_path / "cut", seed=0)
    assert store.report.notes[Note.CUT].places == [f"{path}:1"]
    assert store.report.notes[Note.TOO_LONG].places == [f"{path}:3"]
    assert (store.report.num_trajectories, store.report.num_kept) == (4, 3)
    first, second, _ = texts(store)
    assert first == second
    assert f"1 × cut at a turn to fit the context: {path}:1" in caplog.text
    dropped = prepare(configure(path, context=200, too_long="drop"), chat_format(), tmp_path / "drop", seed=0)
    assert dropped.report.notes[Note.TOO_LONG].places == [f"{path}:1", f"{path}:3"]
    assert dropped.report.count(Note.CUT) == 0


def test_a_store_is_rebuilt_when_anything_it_depends_on_changes(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD])
    folder = tmp_path / "store"

    def time_made(context: int = 4096, seed: int = 0, drop_thinking: bool = False) -> int:
        chosen = make_format("minimax_m2", chat_format().tokenizer, drop_thinking=drop_thinking)
        prepare(configure(path, context=context), chosen, folder, seed)
        return (folder / "meta.json").stat().st_mtime_ns

    made = time_made()
    assert time_made() == made
    changed = [time_made(4095), time_made(4095, seed=1), time_made(4095, seed=1, drop_thinking=True)]
    assert len({made, *changed}) == 4
    assert time_made(4095, seed=1, drop_thinking=True) == changed[-1]
    write_lines(path, [GOOD, GOOD])
    assert Store(folder).num_trajectories == 1
    assert prepare(configure(path), chat_format(), folder, seed=0).num_trajectories == 2


def test_a_store_that_was_being_removed_is_in_nobodys_way(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD])
    prepare(configure(path), chat_format(), tmp_path / "store", seed=0)
    # What a kill in the middle of a removal leaves.
    (tmp_path / "store").rename(tmp_path / ".store.old.partial")
    (tmp_path / ".store.old.partial" / "meta.json").unlink()
    prepare(configure(path), chat_format(), tmp_path / "store", seed=0)
    prepare(configure(path), chat_format(), tmp_path / "store", seed=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "store"]


def test_a_store_of_another_tokenizer_is_made_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [talk("Zyzzyva zyzzyva", "Zyzzyva")])
    # Both cut the probe alike: they differ in merges that it does not show.
    words = ["zyzzyva" * 3, "zyzzyva" * 3 + "qwq" * 9]
    formats = [make_format("minimax_m2", train_tokenizer([text], 400, MINIMAX_M2_SPECIALS)) for text in words]
    probes = [chosen.render([Message("user", "What is 17 + 25?")]).ids for chosen in formats]
    assert probes[0] == probes[1]
    made = [prepare(configure(path), chosen, tmp_path / "store", seed=0).key for chosen in formats]
    assert made[0] != made[1]


def test_a_format_without_tools_serves_toolless_conversations(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [talk("hello", "HI"), GOOD])
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{{ tools or '' }}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer = with_chat_template(train_tokenizer(["hello"], 300, ("<|im_start|>", "<|im_end|>")), template)
    store = prepare(configure(path), make_format("chatml", tokenizer), tmp_path / "store", seed=0)
    assert store.report.num_kept == 1
    assert store.report.count(Problem.INEXPRESSIBLE) == 1


def test_a_report_survives_the_disk(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD, "{", talk("x1" * 900, "b")])
    made = prepare(configure(path, context=900), chat_format(), tmp_path / "store", seed=0).report
    assert made.problems
    assert made.notes
    assert Report.from_json(made.to_json()) == made == Store(tmp_path / "store").report


def test_prompt_parts_are_dropped_by_epoch_and_encoded_once(tmp_path: Path) -> None:
    prompt = "BASE\n\n## Rules\nRULES"
    path = write_lines(tmp_path / "a.jsonl", [talk("a", "b", prompt=prompt) for _ in range(200)])
    parts = (
        PromptPart(kind="heading", match="## Rules", rate=0.25),
        PromptPart(kind="text", match="ABSENT", rate=0.5),
    )
    config = configure(path, prompt_parts=parts, num_prompt_draws=3)
    store = prepare(config, chat_format(), tmp_path / "store", seed=0)
    assert store.num_draws == 3
    assert store.report.notes[Note.UNMATCHED_PART].places == ["text 'ABSENT'"]
    shown = [["RULES" in text for text in texts(store, draw)] for draw in range(3)]
    assert all("BASE" in text for text in texts(store))
    # Five standard errors of 600 draws: sqrt(0.25 * 0.75 / 600) is 0.018.
    assert sum(map(sum, shown)) / 600 == pytest.approx(0.75, abs=0.09)
    assert shown[0] != shown[1] != shown[2]
    for number, documents in enumerate(store.variants.tolist()):
        assert len(set(documents)) == len({row[number] for row in shown})
    again = prepare(config, chat_format(), tmp_path / "again", seed=0)
    assert again.fingerprint == store.fingerprint
    other = prepare(config, chat_format(), tmp_path / "other", seed=1)
    assert other.fingerprint != store.fingerprint


def test_a_too_long_draw_uses_a_prompt_that_fits(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [talk("a", "b", prompt="x1" * 300) for _ in range(20)])
    parts = (PromptPart(kind="regex", match="(x1)+", rate=0.5),)
    config = configure(path, prompt_parts=parts, num_prompt_draws=8, context=200)
    store = prepare(config, chat_format(), tmp_path / "store", seed=0)
    assert store.report.num_kept == 20
    assert "x1" not in "".join(text for draw in range(8) for text in texts(store, draw))


def test_the_store_feeds_the_reader(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD] * 10)
    store = prepare(configure(path), chat_format(), tmp_path / "store", seed=0)
    pack = SFTReader(store, pack_tokens=4096, seed=0).next_pack()
    assert pack.lengths.size > 1
    assert (pack.targets >= 0).sum() > 0
