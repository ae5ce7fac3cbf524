"""Build a corpus: documents in; a folder of token shards, which `CorpusReader` opens, and a report out.

Stages: scan (read, filter, sign), deduplicate, tokenize, assemble (splits, long samples, mixture). Each stage keeps its
finished parts in the work folder, so the same call after a kill resumes there and produces the same bytes, whatever the
number of workers. The destination appears at the end, atomically.

The report, written next to the shards, counts the documents read, dropped and retained, tokens by domain, and problems.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2forge.config import Config
from m2forge.corpus.config import CorpusConfig
from m2forge.corpus.judge.duplicate import Repeat, find_duplicates
from m2forge.corpus.judge.example import make_classifier
from m2forge.corpus.judge.scan import domain_names, num_bands, scan_part
from m2forge.corpus.manifest import MANIFEST_NAME, TOKENIZER_NAME, Kind
from m2forge.corpus.mixture import resolve_mixture
from m2forge.corpus.read.document import Problems
from m2forge.corpus.read.source import Part
from m2forge.corpus.token_set import CorpusWriter
from m2forge.corpus.write.document_table import Tables
from m2forge.corpus.write.long_sample import long_samples
from m2forge.corpus.write.stage_store import StageStore, open_stage_store, remove_work
from m2forge.corpus.write.surviving import Survivors, gather
from m2forge.corpus.write.tokenise import fingerprint, get_tokenizer, token_dtype, tokenise_part
from m2forge.errors import ConfigError, DataError, ExistsError
from m2forge.files import staged_folder, write_atomic
from m2forge.observe.progress import progress
from m2forge.records import JsonValue
from m2forge.text.tokenizer import Tokenizer

REPORT_NAME = "report.json"


class ProblemCount(Config):
    count: int
    first: tuple[str, ...]
    """The first few problems, with file and line."""


class CorpusReport(Config):
    fingerprint: str
    """Hash of the configuration and the input files: builds with equal fingerprints produce the same corpus."""
    num_bytes: int
    """Bytes of text read."""
    num_read: int
    num_kept: int
    """Documents in the corpus, training and held out."""
    dropped: Mapping[str, int]
    """Dropped documents by reason: a quality rule, below_threshold, exact_duplicate, near_duplicate."""
    train_tokens: Mapping[str, int]
    """Training tokens by domain; the two below are by domain too."""
    held_out_tokens: Mapping[str, int]
    long_tokens: Mapping[str, int]
    mixture: Mapping[str, float]
    epochs: Mapping[str, float]
    """Epochs over each domain while as many tokens are drawn as the corpus has."""
    problems: Mapping[str, ProblemCount]

    def lines(self) -> list[str]:
        """The report as human-readable lines."""
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items()) or "none"
        text = [
            f"read {self.num_read:,} documents, {self.num_bytes / 1e6:,.1f} MB; {self.num_kept:,} survived the filters",
            f"dropped: {dropped}",
        ]
        for domain, count in self.train_tokens.items():
            share, epochs = self.mixture.get(domain, 0.0), self.epochs.get(domain, 0.0)
            text.append(
                f"{domain}: {count:,} tokens, {self.held_out_tokens.get(domain, 0):,} held out, "
                f"{self.long_tokens.get(domain, 0):,} in long samples; {share:.1%} of the mixture, {epochs:.2f} epochs"
            )
        for kind, problem in self.problems.items():
            text += [f"{problem.count:,} {kind}: {location}" for location in problem.first[:1]]
            text += [f"    {location}" for location in problem.first[1:]]
        return text


def read_report(folder: Path) -> CorpusReport:
    return CorpusReport.model_validate_json((folder / REPORT_NAME).read_bytes())


def report_text(report: CorpusReport) -> str:
    return report.model_dump_json(indent=1) + "\n"


def problem_counts(problems: Problems) -> dict[str, ProblemCount]:
    return {
        kind.value: ProblemCount(count=problems.counts[kind], first=tuple(problems.examples[kind]))
        for kind in sorted(problems.counts)
    }


def add_counts(total: dict[str, int], more: JsonValue) -> None:
    assert isinstance(more, Mapping)
    for name, count in more.items():
        assert isinstance(count, int)
        total[name] = total.get(name, 0) + count


CLASSIFIER_NAME = "classifier.bin"

_log = logging.getLogger(__name__)


def build_corpus(config: CorpusConfig, dest: Path, *, num_workers: int = 1) -> CorpusReport:
    """Build the corpus of `config` at `dest`. A finished build of the same input is reused."""
    if num_workers < 1:
        raise ConfigError(f"num_workers must be at least 1, received {num_workers}")
    with open_stage_store(config, dest) as work:
        try:
            done = _finished(dest, work)
        except ExistsError:
            remove_work(dest)
            raise
        if done is None:
            try:
                done = _build(config, work, dest, num_workers)
            except DataError:
                if config.strict:
                    remove_work(dest)
                raise
    remove_work(dest)
    if done.problems:
        count = sum(problem.count for problem in done.problems.values())
        _log.warning("%d lines or files could not be read and were left out; see %s", count, dest / REPORT_NAME)
    return done


def _finished(dest: Path, work: StageStore) -> CorpusReport | None:
    if (dest / MANIFEST_NAME).exists() and (dest / REPORT_NAME).exists():
        report = read_report(dest)
        if report.fingerprint == work.fingerprint:
            return report
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ExistsError(f"{dest} holds something else than this corpus; choose another destination or remove it")
    return None


def _build(config: CorpusConfig, work: StageStore, dest: Path, num_workers: int) -> CorpusReport:
    _scan(config, work, num_workers)
    scanned = Tables(work.stage_folders("scan"))
    repeat = _deduplicate(config, work, scanned)
    is_surviving = repeat == Repeat.NONE
    folder = work.folder / TOKENIZER_NAME
    tokenizer = get_tokenizer(config.tokenizer, scanned, is_surviving, config.seed, folder)
    _tokenise(work, scanned, is_surviving, tokenizer)
    built = work.folder / "corpus"
    # A run killed between this stage and the last rename only needs the rename.
    if not built.exists():
        with staged_folder(built) as staged:
            report = _assemble(config, work, scanned, repeat, tokenizer, staged)
            (staged / REPORT_NAME).write_text(report_text(report))
    built.replace(dest)
    return read_report(dest)


def _scan(config: CorpusConfig, work: StageStore, num_workers: int) -> None:
    classifier_path = None
    if config.quality.classifier is not None:
        classifier_path = work.folder / CLASSIFIER_NAME
        if not classifier_path.exists():
            make_classifier(config, config.quality.classifier, list(work.parts())).save(classifier_path)
    num_bytes = 0
    with progress(work.num_parts, "scan") as bar:
        jobs = ((part, config, classifier_path, work.stage("scan", index)) for index, part in enumerate(work.parts()))
        for part_bytes in _in_order(_scan_job, jobs, num_workers):
            num_bytes += part_bytes
            bar.advance(1, {"MB": f"{num_bytes / 1e6:,.0f}"})


def _scan_job(job: tuple[Part, CorpusConfig, Path | None, Path]) -> int:
    part, config, classifier_path, folder = job
    if not folder.exists():
        scan_part(part, config, classifier_path, folder)
    return part.num_bytes


Job = tuple[Part, CorpusConfig, Path | None, Path]


def _in_order(function: Callable[[Job], int], jobs: Iterable[Job], num_workers: int) -> Iterator[int]:
    """Results in job order, so that a strict build always reports the same first problem."""
    if num_workers == 1:
        yield from map(function, jobs)
        return
    # Spawned, not forked: this process may be running the tokenizer's threads.
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        remaining = iter(jobs)
        running = [pool.submit(function, job) for job in islice(remaining, 2 * num_workers)]
        try:
            while running:
                yield running.pop(0).result()
                running += [pool.submit(function, job) for job in islice(remaining, 1)]
        finally:
            pool.shutdown(cancel_futures=True)


def _deduplicate(config: CorpusConfig, work: StageStore, scanned: Tables) -> npt.NDArray[np.uint8]:
    path = work.folder / "repeat.bin"
    if not path.exists():
        write_atomic(path, find_duplicates(scanned, config.dedup, num_bands(config)).tobytes())
    return np.fromfile(path, np.uint8)


def _tokenise(work: StageStore, scanned: Tables, is_surviving: npt.NDArray[np.bool_], tokenizer: Tokenizer) -> None:
    with progress(int(is_surviving.sum()), "tokenise") as bar:
        for index, table in enumerate(scanned.parts):
            surviving = is_surviving[scanned.first[index] : scanned.first[index + 1]]
            folder = work.stage("tokens", index)
            if not folder.exists():
                tokenise_part(table, surviving, tokenizer, folder)
            bar.advance(int(surviving.sum()))


def _assemble(
    config: CorpusConfig,
    work: StageStore,
    scanned: Tables,
    repeat: npt.NDArray[np.uint8],
    tokenizer: Tokenizer,
    staged: Path,
) -> CorpusReport:
    tokenised = Tables(work.stage_folders("tokens"))
    survivors = Survivors(
        scanned, tokenised, token_dtype(tokenizer), domain_names(config), config.held_out, config.seed
    )
    with CorpusWriter(staged, vocab_size=tokenizer.vocab_size) as writer:
        with progress(work.num_parts, "assemble") as bar:
            for part in survivors.parts():
                for split, in_split in survivors.splits(part):
                    for index in np.unique(part.domain[in_split]).tolist():
                        tokens, lengths = gather(part.tokens, np.flatnonzero(in_split & (part.domain == index)))
                        writer.add_many(survivors.domains[index], tokens, lengths, split=split)
                bar.advance()
        if config.long is not None:
            for sample in long_samples(config.long, survivors, tokenizer, work.folder):
                writer.add(sample.domain, np.concatenate(sample.tokens), split="train", kind=Kind.LONG)
        train_tokens = writer.num_tokens("train")
        if not train_tokens:
            raise DataError(_empty_corpus_message(scanned, repeat))
        mixture = resolve_mixture(config.mixture, train_tokens)
        shutil.copytree(work.folder / TOKENIZER_NAME, staged / TOKENIZER_NAME)
        if (work.folder / CLASSIFIER_NAME).exists():
            shutil.copy(work.folder / CLASSIFIER_NAME, staged / CLASSIFIER_NAME)
        writer.finish(
            mixture.shares,
            tokenizer=fingerprint(work.folder / TOKENIZER_NAME),
            end_of_text_id=tokenizer.end_of_text_id,
        )
    problems, dropped = _totals(scanned, repeat)
    return CorpusReport(
        fingerprint=work.fingerprint,
        num_bytes=sum(part.count("num_bytes") for part in scanned.parts),
        num_read=sum(part.count("num_read") for part in scanned.parts),
        num_kept=int((repeat == Repeat.NONE).sum()),
        dropped=dropped,
        train_tokens=train_tokens,
        held_out_tokens=writer.num_tokens("held_out"),
        long_tokens=writer.num_tokens("train", Kind.LONG),
        mixture=mixture.shares,
        epochs=mixture.epochs,
        problems=problem_counts(problems),
    )


def _totals(scanned: Tables, repeat: npt.NDArray[np.uint8]) -> tuple[Problems, dict[str, int]]:
    problems, dropped = Problems(), dict[str, int]()
    for part in scanned.parts:
        problems.merge(Problems.from_json(part.summary["problems"]))
        add_counts(dropped, part.summary["dropped"])
    for reason, kind in (("exact_duplicate", Repeat.EXACT), ("near_duplicate", Repeat.NEAR)):
        if count := int((repeat == kind).sum()):
            dropped[reason] = count
    return problems, dict(sorted(dropped.items()))


def _empty_corpus_message(scanned: Tables, repeat: npt.NDArray[np.uint8]) -> str:
    problems, dropped = _totals(scanned, repeat)
    reasons = {**dropped, **{kind.value: count for kind, count in problems.counts.items()}}
    summary = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "the sources are empty"
    return f"no training document is left: {summary}; change quality, dedup, held_out or the sources"
