"""Whole builds: what goes in comes out, once, the same however it was built; a killed build goes on."""

import functools
import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from m2forge.corpus.build import build_corpus
from m2forge.corpus.config import (
    ClassifierConfig,
    CorpusConfig,
    DedupConfig,
    LongConfig,
    QualityConfig,
    Source,
    TokenizerConfig,
)
from m2forge.corpus.manifest import Kind, Split, read_manifest
from m2forge.corpus.reader import CorpusReader
from m2forge.corpus.token_set import ShardView
from m2forge.errors import DataError, ExistsError, NotFoundError
from m2forge.text.tokenizer import load_tokenizer
from tests.forked import start

TOKENIZER = TokenizerConfig(vocab_size=300, train_bytes=4000)
END = "<|endoftext|>"


SYLLABLES = np.array(["ka", "lo", "mi", "ter", "van", "su", "re", "dol", "pin", "gra"])


@functools.cache
def prose(seed: int, num_words: int = 40) -> str:
    """Sentences of random words: kept by all rules and like no other."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(SYLLABLES, rng.integers(2, 4))) for _ in range(num_words)]
    return "The " + " ".join(words) + " and that is all of it."


def write_lines(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(folder: Path, split: Split = "train", kind: Kind = Kind.PLAIN) -> dict[str, list[str]]:
    """The decoded documents of a built corpus, by domain."""
    manifest = read_manifest(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    found: dict[str, list[str]] = {}
    for token_set in manifest.sets:
        if token_set.split == split and token_set.kind is kind:
            for shard in token_set.shards:
                view = ShardView(folder, shard, manifest.token_bytes)
                texts = [tokenizer.decode(view.document(n).tolist()) for n in range(shard.num_documents)]
                found.setdefault(token_set.domain, []).extend(texts)
    return found


def contents(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_documents_come_out_whole_and_once(tmp_path: Path) -> None:
    texts = [prose(n) for n in range(60)]
    web = write_lines(tmp_path / "in" / "web.jsonl", [*texts, texts[3], texts[5].replace("The", "A"), "Short."])
    with web.open("a") as file:
        file.write("{broken\n")
    (tmp_path / "in" / "a.py").write_text("def f(x):\n    return x + 1  # a small function, é\n" * 2)
    config = CorpusConfig(
        sources=(Source(path=str(web), domain="web"), Source(path=str(tmp_path / "in"), suffixes=(".py",))),
        tokenizer=TOKENIZER,
        dedup=DedupConfig(threshold=0.7),
        held_out=0.2,
        long=None,
    )
    report = build_corpus(config, tmp_path / "out")
    train, held_out = documents(tmp_path / "out"), documents(tmp_path / "out", "held_out")
    found = sorted(text for split in (train, held_out) for text in split.get("web", []))
    assert found == sorted(text + END for text in texts)
    assert 2 <= len(held_out["web"]) <= 25
    assert train["code"] == [(tmp_path / "in" / "a.py").read_text() + END]
    assert (report.num_read, report.num_kept) == (64, 61)
    assert report.dropped == {"too_short": 1, "exact_duplicate": 1, "near_duplicate": 1}
    assert report.problems["not_json"].first[0].startswith(f"{web}:64: not JSON")
    assert any("web.jsonl:64" in line for line in report.lines())
    assert report.train_tokens == {
        s.domain: s.num_tokens for s in read_manifest(tmp_path / "out").sets if s.split == "train"
    }
    assert not (tmp_path / ".out.work").exists()
    pack = CorpusReader(tmp_path / "out", context=64, pack_tokens=256, seed=0).next_pack()
    assert 192 < pack.tokens.size <= 256


def many_sources(folder: Path) -> CorpusConfig:
    """A configuration with every stage in use and a dozen parts."""
    for n in range(6):
        write_lines(folder / f"{n}.jsonl", [prose(100 * n + m, 60) for m in range(40)])
    for n in range(6):
        (folder / "code").mkdir(exist_ok=True)
        imported = f"import m{n + 1}\n" if n < 5 else ""
        lines = "".join(f"def function_{m}_{n}(value):\n    return value * {m} + {n}\n" for m in range(30))
        (folder / "code" / f"m{n}.py").write_text(imported + lines)
    return CorpusConfig(
        sources=(Source(path=str(folder / "*.jsonl"), domain="web"), Source(path=str(folder / "code"))),
        tokenizer=TOKENIZER,
        quality=QualityConfig(classifier=ClassifierConfig(num_documents=40)),
        long=LongConfig(min_tokens=512, max_tokens=4096, repository_depth=0, related_share=0.5),
        dedup=DedupConfig(num_perm=32, num_bands=4),
        part_bytes=12_000,
    )


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    config = many_sources(tmp_path / "in")
    build_corpus(config, tmp_path / "one")
    build_corpus(config, tmp_path / "two", num_workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_killed_build_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    config = many_sources(tmp_path / "in")
    build_corpus(config, tmp_path / "whole")
    num_killed = 0
    # Killed when so many files have appeared: while scanning, tokenising and assembling.
    for num_files in (20, 100, 200, 240):
        process = start(build_corpus, config, tmp_path / "out")
        while process.is_alive() and count_files(tmp_path / ".out.work") < num_files:
            time.sleep(0.001)
        process.kill()
        process.join()
        num_killed += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            break
        assert not (tmp_path / "out").exists()
    assert num_killed >= 2
    build_corpus(config, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / ".out.work").exists()


def count_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def test_finished_work_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = many_sources(tmp_path / "in")
    with monkeypatch.context() as patch:
        patch.setattr("m2forge.corpus.build._assemble", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_corpus(config, tmp_path / "out")
    with monkeypatch.context() as patch:
        for stage in ("scan_part", "find_duplicates", "tokenise_part", "make_classifier"):
            patch.setattr(f"m2forge.corpus.build.{stage}", lambda *_: 1 / 0)
        report = build_corpus(config, tmp_path / "out")
        # And once more, with nothing left to do at all.
        assert build_corpus(config, tmp_path / "out") == report
    changed = config.model_copy(update={"seed": 1})
    with pytest.raises(ExistsError, match="holds something else"):
        build_corpus(changed, tmp_path / "out")
    assert not (tmp_path / ".out.work").exists()


def test_sources_that_are_refused_leave_nothing_behind(tmp_path: Path) -> None:
    config = CorpusConfig(sources=(Source(path=str(tmp_path / "nowhere")),), tokenizer=TOKENIZER)
    with pytest.raises(NotFoundError, match="no such file or folder"):
        build_corpus(config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_odd_file_names_and_dead_links_are_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    name = os.fsdecode(b"caf\xe9")
    (folder / f"{name}.txt").write_text(prose(0))
    (folder / f"{name}-bad.txt").write_bytes(b"\xff")
    (folder / f"{name}.parquet").write_bytes(b"")
    (folder / f"{name}.jsonl.zst").write_bytes(b"")
    (folder / "gone.py").symlink_to(folder / "nowhere")
    config = CorpusConfig(sources=(Source(path=str(folder)),), tokenizer=TOKENIZER, held_out=0.0)
    report = build_corpus(config, tmp_path / "out")
    assert report.num_kept == 1
    assert "caf\\udce9-bad.txt" in report.problems["not_utf8"].first[0]
    assert any("gone.py: cannot be read" in place for place in report.problems["unreadable"].first)


def test_strict_builds_keep_nothing_of_broken_input(tmp_path: Path) -> None:
    good = write_lines(tmp_path / "a.jsonl", [prose(n) for n in range(5)])
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"text": "x"}\n{"txt": "y"}\n')
    config = CorpusConfig(sources=(Source(path=str(good)), Source(path=str(bad))), tokenizer=TOKENIZER, strict=True)
    with pytest.raises(DataError, match=r"b\.jsonl:2: no key 'text'"):
        build_corpus(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.work").exists()


def test_a_corpus_of_nothing_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["Short.", "Also short."])
    with pytest.raises(DataError, match="no training document is left: 2 too_short"):
        build_corpus(CorpusConfig(sources=(Source(path=str(path)),)), tmp_path / "out")


def test_a_classifier_from_sources_decides_what_is_kept(tmp_path: Path) -> None:
    good, bad = [prose(n) for n in range(30)], [prose(n) + " casino jackpot winner" * 9 for n in range(30, 60)]
    positive, negative = write_lines(tmp_path / "good.jsonl", good[:20]), write_lines(tmp_path / "bad.jsonl", bad[:20])
    mixed = write_lines(tmp_path / "mixed.jsonl", [*good[20:], *bad[20:]])
    classifier = ClassifierConfig(
        labels="sources", positive=(Source(path=str(positive)),), negative=(Source(path=str(negative)),)
    )
    config = CorpusConfig(
        sources=(Source(path=str(mixed), domain="web"),),
        tokenizer=TOKENIZER,
        quality=QualityConfig(rules=(), threshold=0.5, classifier=classifier),
        held_out=0.0,
    )
    report = build_corpus(config, tmp_path / "out")
    assert report.dropped == {"below_threshold": 10}
    assert sorted(documents(tmp_path / "out")["web"]) == sorted(text + END for text in good[20:])
    assert (tmp_path / "out" / "classifier.bin").exists()


def test_long_samples_join_code_in_dependency_order_and_topics(tmp_path: Path) -> None:
    config = many_sources(tmp_path / "in").model_copy(update={"held_out": 0.0})
    write_lines(tmp_path / "in" / "long.jsonl", [prose(9999, 3000)])
    report = build_corpus(config, tmp_path / "out")
    samples = documents(tmp_path / "out", kind=Kind.LONG)
    files = {f"m{n}.py": (tmp_path / "in" / "code" / f"m{n}.py").read_text() for n in range(6)}
    joined = [text for text in samples["code"] if text.startswith("# m")]
    assert joined
    # Each file imports the next, so the last comes first; each is named and ends like a document of its own.
    names = [name for text in joined for name in re.findall(r"# (m\d\.py)\n", text)]
    assert names == ["m5.py", "m4.py", "m3.py", "m2.py", "m1.py", "m0.py"]
    assert joined[0].startswith(f"# m5.py\n{files['m5.py']}{END}# m4.py\n{files['m4.py']}{END}")
    natural = [text for text in samples["web"] if text.count(END) == 1]
    related = [text for text in samples["web"] if text.count(END) > 1]
    assert natural == [prose(9999, 3000) + END]
    assert related
    plain = documents(tmp_path / "out")["web"]
    for text in related:
        assert all(part + END in plain for part in text.split(END)[:-1])
    assert report.long_tokens["web"] <= 0.5 * report.train_tokens["web"] + 10_000
