"""The report of a build: documents read, dropped and kept, tokens by domain, problems. Written next to the shards."""

from collections.abc import Mapping
from pathlib import Path

from m2forge.config import Config
from m2forge.corpus.document import Problems
from m2forge.records import JsonValue

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
            f"read {self.num_read:,} documents, {self.num_bytes / 1e6:,.1f} MB; kept {self.num_kept:,}",
            f"dropped: {dropped}",
        ]
        for domain, count in self.train_tokens.items():
            share, epochs = self.mixture.get(domain, 0.0), self.epochs.get(domain, 0.0)
            text.append(
                f"{domain}: {count:,} tokens, {self.held_out_tokens.get(domain, 0):,} held out, "
                f"{self.long_tokens.get(domain, 0):,} in long samples; {share:.1%} of the mixture, {epochs:.2f} epochs"
            )
        for kind, problem in self.problems.items():
            text += [f"{problem.count:,} {kind}: {place}" for place in problem.first[:1]]
            text += [f"    {place}" for place in problem.first[1:]]
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
