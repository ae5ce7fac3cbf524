"""A whole evaluation on a small network with random weights, and what is refused before it starts."""

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from rich.console import Console

from m2forge.config import build, load
from m2forge.corpus.token_set import CorpusWriter
from m2forge.errors import ConfigError, DataError, FormatError, M2ForgeError, NotFoundError
from m2forge.evaluate.config import AlphabetConfig, EvalConfig
from m2forge.evaluate.report import EvalReport
from m2forge.evaluate.run import run_eval
from m2forge.evaluate.suites.suite import Material, draw_samples, make_task
from m2forge.model.checkpoint import save_model
from m2forge.model.preset import PRESETS
from m2forge.records import JsonValue
from m2forge.text.format import MINIMAX_M2_SPECIALS
from m2forge.text.tokenizer import Tokenizer, train_tokenizer
from tests.model.draw import SMALL

SUITES: list[dict[str, JsonValue]] = [
    {"task": "needle", "lengths": [64, 2048], "depths": [0.0, 1.0], "num_samples": 2},
    {"task": "multi_key", "lengths": [64], "depths": [0.5], "num_samples": 2},
    {"task": "multi_query", "lengths": [96], "num_samples": 2},
    {"task": "multi_hop", "lengths": [96], "num_samples": 2},
    {"task": "common_words", "lengths": [200], "num_common": 4, "num_samples": 2},
    {"task": "many_shot", "shots": [1, 4], "num_samples": 2},
    {"task": "needle", "name": "text_needle", "material": "text", "lengths": [300], "depths": [0.5], "num_samples": 2},
    {"task": "multi_query", "name": "text_free", "material": "text", "decoding": "free", "lengths": [500],
     "num_samples": 2, "max_new_tokens": 4},
    {"task": "multi_hop", "name": "text_hop", "material": "text", "lengths": [500], "num_samples": 1,
     "max_new_tokens": 4},
    {"task": "many_shot", "name": "text_shot", "material": "text", "shots": [2], "num_samples": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["The secret number of the text is 1234567."] * 3, 300, MINIMAX_M2_SPECIALS)


def configured(output: Path, **fields: object) -> EvalConfig:
    data = {"model": "m2-nano", "output": str(output)} | fields
    return build(EvalConfig, json.loads(json.dumps(data, default=str)))


def write_corpus(folder: Path, vocab_size: int = 300) -> Path:
    rng = np.random.default_rng(0)
    with CorpusWriter(folder, vocab_size=vocab_size) as writer:
        for split, count in (("train", 2), ("held_out", 3)):
            for domain in ("code", "prose"):
                for _ in range(count):
                    writer.add(domain, rng.integers(0, 300, 20), split=split)  # type: ignore[arg-type]  # spelt out above
        writer.finish()
    return folder


def write_lines(path: Path, *records: JsonValue) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def test_everything_is_measured_and_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    user: JsonValue = {"role": "user", "content": "How is Rome?"}
    tools = write_lines(tmp_path / "t.jsonl", {"messages": [user], "tools": [{"name": "f", "parameters": {}}]})
    answers = write_lines(
        tmp_path / "a.jsonl", {"prompt": "The", "answer": "x"}, {"messages": [user], "answer": "x"}, {}
    )
    config = configured(
        tmp_path / "out",
        suites=SUITES,
        held_out={"corpus": write_corpus(tmp_path / "corpus"), "pack_tokens": 60},
        tool_calls={"prompts": tools, "max_new_tokens": 3},
        exact_match={"prompts": answers, "max_new_tokens": 3},
    )
    console = Console(record=True, width=120, file=io.StringIO())
    report = run_eval(config, tokenizer=tokenizer, console=console)
    assert set(report.suites) == {*config.suite_names, "tool_calls", "exact_match"}
    assert all(0 <= cell.low <= cell.score <= cell.high <= 1 for cell in report.cells)
    assert {cell.length for cell in report.cells if cell.beyond_context} == {2048}
    assert [loss.domain for loss in report.losses] == ["all", "code", "prose"]
    # Two packs of 60 hold the six documents of 20 tokens, each of which has a last one.
    assert report.losses[0].num_tokens == 6 * 19
    assert report.losses[0].bits_per_byte is not None
    assert len(report.notes) == 3
    assert EvalReport.load(tmp_path / "out") == report
    assert load(EvalConfig, tmp_path / "out" / "eval.toml") == config
    assert "needle" in (tmp_path / "out" / "table.txt").read_text()
    assert "held-out loss" in console.export_text()
    charts = sorted(path.name for path in (tmp_path / "out").glob("*.svg"))
    assert charts == ["by_length.svg", "by_shots.svg", "needle.svg"]
    for name in charts:
        ElementTree.parse(tmp_path / "out" / name)


def test_a_seed_decides_every_sample_independently_of_suites(tmp_path: Path) -> None:
    material = Material(512, AlphabetConfig())

    def samples(seed: int, suites: list[dict[str, JsonValue]]) -> list[list[int]]:
        config = configured(tmp_path, seed=seed, suites=suites)
        return [
            sample.ids.tolist()
            for suite in config.suites
            for size in suite.sizes
            for depth in suite.positions
            for sample in draw_samples(suite, make_task(suite, material), size, depth, seed)
        ]

    both, alone = samples(1, SUITES[:6]), samples(1, SUITES[2:3])
    assert both == samples(1, SUITES[:6])
    assert all(sample in both for sample in alone)
    assert not [sample for sample in samples(2, SUITES[:6]) if sample in both]


@pytest.mark.parametrize(("pack_tokens", "num_packs"), [(16_384, 16), (70, 16), (50, 1)])
def test_no_more_is_read_than_the_held_out_part_has(tmp_path: Path, pack_tokens: int, num_packs: int) -> None:
    held_out = {"corpus": write_corpus(tmp_path / "corpus"), "pack_tokens": pack_tokens, "num_packs": num_packs}
    report = run_eval(configured(tmp_path / "out", held_out=held_out))
    # Six documents of 20 tokens, the last of which has nothing to predict; a pack of 50 holds two of them.
    assert report.losses[0].num_tokens == (2 if num_packs == 1 else 6) * 19


def test_a_model_folder_is_loaded_with_its_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from m2forge.model.build import build as build_model

    model = build_model(SMALL, dtype=torch.bfloat16)
    save_model(model, tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    config = configured(tmp_path / "out", model=tmp_path / "model", suites=[SUITES[6]], dtype="float32")
    report = run_eval(config)
    assert report.max_context == SMALL.max_context
    assert report.notes == ()
    assert report.num_parameters == sum(parameter.numel() for parameter in model.parameters())


HAYSTACK_SUITE: dict[str, JsonValue] = {"task": "needle", "lengths": [90], "num_samples": 1, "depths": [0.0, 1.0]}


def test_things_can_be_hidden_in_a_text_of_ones_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One sentence. And another one! A last one?")
    suites = [
        HAYSTACK_SUITE | {"haystack": str(text)},
        HAYSTACK_SUITE | {"haystack": str(text), "material": "text", "lengths": [400], "name": "b"},
    ]
    assert len(run_eval(configured(tmp_path / "out", suites=suites), tokenizer=tokenizer).cells) == 4
    text.write_text("  ")
    with pytest.raises(ConfigError, match="no sentence"):
        run_eval(configured(tmp_path / "out", suites=suites[1:]), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({}, ConfigError, "nothing to measure"),
        ({"suites": [SUITES[0], SUITES[0]]}, ConfigError, "several suites are called 'needle'"),
        ({"suites": [SUITES[0] | {"name": "exact_match"}]}, ConfigError, "several suites are called 'exact_match'"),
        ({"suites": [SUITES[0] | {"name": "a/b"}]}, ConfigError, "suites.0.name"),
        ({"suites": [SUITES[0] | {"name": "by_length"}]}, ConfigError, "'by_length' is a chart of all suites"),
        ({"suites": [SUITES[4] | {"lengths": [700, 4096], "num_common": 45}]}, ConfigError, "length 4096: a list of"),
        ({"suites": [{"task": "needel", "lengths": [1]}]}, ConfigError, "needel"),
        ({"suites": [SUITES[0] | {"depths": [1.5]}]}, ConfigError, "suites.0.depths.0: expected less than or equal"),
        ({"suites": [SUITES[0] | {"depth": [1.0]}]}, ConfigError, "did you mean 'depths'"),
        ({"suites": [SUITES[0] | {"lengths": []}]}, ConfigError, "one or more different"),
        ({"suites": [SUITES[2] | {"num_queries": 9}]}, ConfigError, r"num_queries \(9\) exceeds num_needles \(4\)"),
        ({"suites": [SUITES[2] | {"decoding": "free"}]}, ConfigError, 'needs decoding = "forced"'),
        ({"suites": [SUITES[4] | {"haystack": "x"}]}, ConfigError, "has no haystack"),
        ({"suites": [SUITES[0] | {"lengths": [8]}]}, ConfigError, "length 8: num_needles = 1 needs at least 13"),
        ({"suites": [SUITES[6]]}, ConfigError, "suite text_needle: text needs a tokenizer"),
        ({"suites": [HAYSTACK_SUITE | {"haystack": "no"}]}, ConfigError, "text needs a tokenizer"),
        ({"suites": SUITES[:1], "alphabet": {"first_id": 500}}, ConfigError, "fewer than 8"),
        ({"suites": SUITES[:1], "model": "m2-nanno"}, NotFoundError, "did you mean 'm2-nano'"),
        ({"suites": SUITES[:1], "tokenizer": "no"}, NotFoundError, "no does not exist"),
        ({"suites": SUITES[:1], "device": "cuda"}, ConfigError, "no CUDA device"),
        ({"tool_calls": {"prompts": "no"}}, ConfigError, "tool_calls needs a tokenizer"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_writing(
    tmp_path: Path, fields: dict[str, object], kind: type[M2ForgeError], message: str
) -> None:
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(kind, match=message):
        run_eval(configured(tmp_path / "out", **fields))
    assert not (tmp_path / "out").exists()


def test_prompts_and_corpora_are_looked_at_first(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = configured(tmp_path / "out", suites=SUITES[:1], exact_match={"prompts": "no"})
    with pytest.raises(DataError, match="no: cannot be read"):
        run_eval(config, tokenizer=tokenizer)
    prompts = write_lines(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "x"}], "answer": "x"})
    bare = train_tokenizer(["no markers"], 300, [])
    with pytest.raises(FormatError, match="has no chat template"):
        run_eval(configured(tmp_path / "out", suites=SUITES[:1], exact_match={"prompts": prompts}), tokenizer=bare)
    with pytest.raises(M2ForgeError):
        run_eval(configured(tmp_path / "out", held_out={"corpus": tmp_path / "none"}))
    corpus = write_corpus(tmp_path / "corpus", vocab_size=1000)
    with pytest.raises(ConfigError, match="ids up to 999, the network's vocabulary ends at 511"):
        run_eval(configured(tmp_path / "out", held_out={"corpus": corpus}))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    large = train_tokenizer([f"{number * 7919}" for number in range(2000)], 600, MINIMAX_M2_SPECIALS)
    with pytest.raises(ConfigError, match="vocabulary ends at 511"):
        run_eval(configured(tmp_path / "out", suites=SUITES[:1]), tokenizer=large)
    assert PRESETS["m2-nano"].vocab_size == 512
