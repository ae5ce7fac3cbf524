"""Speed and memory of the corpus builder and reader.

Builder: MB of text per second of processor time up to tokenisation (read, judge, deduplicate), on the standard
library's sources in several forms; tokenisation against the library's bare `encode_batch_fast` on the same texts; peak
memory per document, as the difference between two corpora of different size. Reader: time per pack against a training
step of `m2-nano` over the same tokens, for many small documents and for few long ones.

Processor seconds are counted, of all threads and processes, so that other work on the machine does not decide the
result. Files were just written, so they are read from the system's cache.

    python benchmarks/corpus.py [--json] [--quick]
"""

import json
import os
import statistics
import sysconfig
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import datasketch
import numpy as np
import torch
from report import Bar, arguments, finish, print_table
from tokenizers import Tokenizer as LibraryTokenizer

from m2forge.corpus.config import CorpusConfig, LongConfig, QualityConfig, Source
from m2forge.corpus.judge.duplicate import MinHash, Repeat, find_duplicates
from m2forge.corpus.judge.scan import domain_names, num_bands, scan_part
from m2forge.corpus.judge.words import cut, shingles
from m2forge.corpus.read.source import list_parts
from m2forge.corpus.reader import CorpusReader
from m2forge.corpus.token_set import CorpusWriter
from m2forge.corpus.write.document_table import Table, Tables
from m2forge.corpus.write.long_sample import long_samples
from m2forge.corpus.write.surviving import Survivors
from m2forge.corpus.write.tokenise import token_dtype, tokenise_part
from m2forge.kernels.head_loss import linear_cross_entropy
from m2forge.model.build import build
from m2forge.model.preset import preset
from m2forge.text.tokenizer import load_tokenizer, train_tokenizer

CONTEXT, PACK_TOKENS = 4096, 32768
TOKENISED_BYTES = 12_000_000
WHOLE = "whole process"


def library_texts(num_bytes: int) -> list[str]:
    """Sources of the standard library, each once, up to `num_bytes`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts.append(text)
        size += len(text)
        if size >= num_bytes:
            break
    return texts


def write_jsonl(path: Path, texts: Sequence[str]) -> int:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return sum(len(text.encode()) for text in texts)


def processor_s(action: Callable[[], object]) -> float:
    """Processor seconds of an action, in this process."""
    start = time.process_time()
    action()
    return time.process_time() - start


@dataclass(frozen=True)
class Scanned:
    seconds: float
    num_bytes: int
    tables: Tables


def before_tokenisation(folder: Path, name: str, texts: Sequence[str]) -> Scanned:
    num_bytes = write_jsonl(folder / f"{name}.jsonl", texts)
    config = CorpusConfig(sources=(Source(path=str(folder / f"{name}.jsonl")),))
    parts = list(list_parts(config.sources, config.part_bytes))
    folders = [folder / f"{name}-{index}" for index in range(len(parts))]

    def stages() -> None:
        for part, part_folder in zip(parts, folders, strict=True):
            scan_part(part, config, None, part_folder)
        find_duplicates(Tables(folders), config.dedup, num_bands(config))

    seconds = processor_s(stages)
    return Scanned(seconds, num_bytes, Tables(folders))


def builder(folder: Path, num_bytes: int) -> list[Bar]:
    texts = library_texts(num_bytes)
    paragraphs = [part for text in texts for part in text.split("\n\n") if len(part) > 80]
    forms = {
        "whole files": texts,
        "files and a copy of each, one word in fifty changed": [*texts, *(varied(text) for text in texts)],
        "paragraphs": paragraphs,
    }
    rows, rates = [], {}
    whole = None
    for index, (name, documents) in enumerate(forms.items()):
        scanned = before_tokenisation(folder, f"form-{index}", documents)
        whole = whole or scanned
        rates[name] = scanned.num_bytes / 1e6 / scanned.seconds
        rows.append((name, f"{len(documents):,}", f"{scanned.num_bytes / 1e6:.1f}", f"{rates[name]:.1f}"))
    print_table(
        "Builder before tokenisation: read JSONL, judge, sign, deduplicate",
        ("", "documents", "MB", "MB per processor second"),
        rows,
    )
    signatures(texts)
    assert whole is not None
    return [
        Bar.at_least("builder before tokenisation: MB/s per core", min(rates.values()), 5.0),
        *tokenisation(folder, whole.tables),
    ]


def signatures(texts: Sequence[str]) -> None:
    """MinHash alone, words to signatures of 128 places, beside datasketch's."""
    chosen = [text for text in texts if len(text) < 100_000][:60]
    num_bytes = sum(len(text.encode()) for text in chosen)

    def ours() -> None:
        batch = cut([text.encode() for text in chosen])
        MinHash(128).sign(shingles(batch, 5), len(chosen))

    def peer() -> None:
        for text in chosen:
            words = text.lower().encode().split()
            runs = {b" ".join(words[n : n + 5]) for n in range(max(1, len(words) - 4))}
            datasketch.MinHash(num_perm=128).update_batch(list(runs))

    seconds = {name: processor_s(action) for name, action in (("m2forge", ours), ("datasketch", peer))}
    print_table(
        f"MinHash signatures of {num_bytes / 1e6:.1f} MB",
        ("", "MB per processor second"),
        [(name, f"{num_bytes / 1e6 / s:.1f}") for name, s in seconds.items()],
    )


def varied(text: str) -> str:
    words = text.split(" ")
    words[::50] = ["other"] * len(words[::50])
    return " ".join(words)


def tokenisation(folder: Path, tables: Tables) -> list[Bar]:
    """The tokenise stage against the library on the same texts, which it takes in the batches that suit it best.

    Each run has a process of its own: in one process a tokenizer runs the slower the more were used before it.
    """
    table = tables.parts[0]
    column = table.texts("text")
    num_texts = min(len(column), int(np.searchsorted(column.offsets, TOKENISED_BYTES)))
    num_bytes = int(column.offsets[num_texts])
    tokenizer = train_tokenizer([column.text(row) for row in range(min(200, num_texts))], 4096, ("<|endoftext|>",))
    tokenizer.save(folder / "tokenizer")
    sizes = {"library, one call": num_texts, "library, 100 texts a call": 100, "m2forge, tokenise stage": 0}
    seconds: dict[str, list[float]] = {name: [] for name in sizes}
    for _ in range(2):
        for name, size in sizes.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                seconds[name].append(pool.submit(tokenise_s, table, num_texts, folder, size).result())
    best = {name: min(times) for name, times in seconds.items()}
    limit = min(best["library, one call"], best["library, 100 texts a call"])
    print_table(
        f"Tokenisation of {num_bytes / 1e6:.1f} MB, 4096 tokens in the vocabulary, best of 2 processes",
        ("", "processor s", "MB per processor second", "over the best of the library"),
        [(name, f"{s:.2f}", f"{num_bytes / 1e6 / s:.2f}", f"{s / limit:.2f}x") for name, s in best.items()],
    )
    return [Bar.at_most("tokenisation over bare encode_batch_fast", best["m2forge, tokenise stage"] / limit, 1.15)]


def tokenise_s(table: Table, num_texts: int, folder: Path, batch_size: int) -> float:
    """Processor seconds of the library over batches of texts, or with a batch size of 0 of the tokenise stage."""
    if batch_size == 0:
        tokenizer = load_tokenizer(folder / "tokenizer")
        kept = np.arange(table.count("num_rows")) < num_texts
        return processor_s(lambda: tokenise_part(table, kept, tokenizer, Path(tempfile.mkdtemp(dir=folder))))
    library = LibraryTokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    column = table.texts("text")
    texts = [column.text(row) for row in range(num_texts)]

    def bare() -> None:
        for begin in range(0, num_texts, batch_size):
            library.encode_batch_fast(texts[begin : begin + batch_size], add_special_tokens=False)

    return processor_s(bare)


def memory(folder: Path, counts: tuple[int, int]) -> list[Bar]:
    """Memory of the two stages that look at all documents at once. The others work part by part.

    Allocations are traced, since what a process holds also depends on what earlier stages left in its heap. The slope
    between two sizes leaves out what does not grow.
    """
    peaks = []
    for count in counts:
        path = folder / f"small-{count}.jsonl"
        write_small_documents(path, count)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peaks.append(pool.submit(stage_peaks, path, folder / f"stages-{count}").result())
    slopes = {stage: (peaks[1][stage] - peaks[0][stage]) / (counts[1] - counts[0]) for stage in peaks[0]}
    print_table(
        "Peak memory by stage, MiB; the whole process by what the system counts as its own",
        ("", *(f"{count:,} documents" for count in counts), "bytes per document"),
        [
            (stage, *(f"{peak[stage] / 2**20:.1f}" for peak in peaks), f"{slopes[stage]:.1f}" if stage != WHOLE else "")
            for stage in peaks[0]
        ],
    )
    most = max(slope for stage, slope in slopes.items() if stage != WHOLE)
    return [Bar.at_most(f"builder: bytes of memory per document, {counts[0]:,} to {counts[1]:,}", most, 64.0)]


def write_small_documents(path: Path, count: int) -> None:
    """Documents of a dozen words; one in ten repeats an earlier one."""
    rng = np.random.default_rng(0)
    words = np.array(sorted({word for text in library_texts(2_000_000) for word in text.split() if word.isalpha()}))
    with path.open("w") as file:
        line = ""
        for begin in range(0, count, 10_000):
            chosen = words[rng.integers(0, len(words), (min(10_000, count - begin), 12))]
            for index, row in enumerate(chosen):
                line = line if index % 10 == 9 else json.dumps({"text": " ".join(row.tolist())}) + "\n"
                file.write(line)


def stage_peaks(source: Path, folder: Path) -> dict[str, int]:
    """Run the stages of a build; peak bytes of those that hold something per document, and of the process."""
    config = CorpusConfig(
        sources=(Source(path=str(source), domain="web"),),
        quality=QualityConfig(rules=()),
        long=LongConfig(min_tokens=512, max_tokens=4096),
        part_bytes=4_000_000,
    )
    assert config.long is not None
    parts = list(list_parts(config.sources, config.part_bytes))
    scan_folders = [folder / f"scan-{index}" for index in range(len(parts))]
    token_folders = [folder / f"tokens-{index}" for index in range(len(parts))]
    with Watch() as watch:
        for part, part_folder in zip(parts, scan_folders, strict=True):
            scan_part(part, config, None, part_folder)
        tables = Tables(scan_folders)
        dedup, repeat = traced(lambda: find_duplicates(tables, config.dedup, num_bands(config)))
        texts = tables.parts[0].texts("text")
        tokenizer = train_tokenizer([texts.text(row) for row in range(2000)], 1024, ("<|endoftext|>",))
        for index, table in enumerate(tables.parts):
            kept = repeat[tables.first[index] : tables.first[index + 1]] == Repeat.NONE
            tokenise_part(table, kept, tokenizer, token_folders[index])
        all_kept = Survivors(tables, Tables(token_folders), token_dtype(tokenizer), domain_names(config), 0.01, 0)
        settings = config.long
        long, _ = traced(lambda: sum(1 for _ in long_samples(settings, all_kept, tokenizer, folder)))
    return {"deduplicate": dedup, "long samples": long, WHOLE: watch.peak}


Result = TypeVar("Result")


def traced(action: Callable[[], Result]) -> tuple[int, Result]:
    """Peak bytes that Python and numpy allocated during an action, and what it returned."""
    tracemalloc.start()
    result = action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, result


class Watch:
    """Samples this process's memory until the block ends."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, own_bytes())
            time.sleep(0.005)


def own_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell a process's own memory")


def write_tokens(folder: Path, num_documents: int, mean_length: int) -> None:
    rng = np.random.default_rng(0)
    block = rng.integers(0, 8192, 4_000_000).astype(np.uint16)
    with CorpusWriter(folder, vocab_size=8192) as writer:
        for domain, share in (("web", 0.6), ("code", 0.3), ("books", 0.1)):
            left = max(1, round(num_documents * share))
            while left:
                count = min(left, max(1, len(block) // (2 * mean_length)))
                lengths = rng.integers(mean_length // 2, mean_length * 3 // 2, count)
                tokens = np.resize(block, int(lengths.sum()))
                writer.add_many(domain, tokens, lengths, split="train")
                left -= count
        writer.finish({"web": 0.4, "code": 0.5, "books": 0.1})


def step_s(pack_tokens: int) -> float:
    """A training step of m2-nano, the smallest model: forward and backward, without an optimizer."""
    config = preset("m2-nano")
    model = build(config)
    length = min(512, pack_tokens)
    tokens = torch.randint(0, config.vocab_size, (pack_tokens // length, length))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        linear_cross_entropy(model(tokens).hidden_ND, model.head_weight, tokens.flatten())[0].backward()

    times = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


def reading(folder: Path, small: int, long_documents: tuple[int, int]) -> list[Bar]:
    step = step_s(PACK_TOKENS // 16) * 16
    rows, bars = [], []
    for name, num_documents, mean_length in (
        (f"{small:,} documents of 200 tokens", small, 200),
        (f"{long_documents[0]} documents of {long_documents[1] / 1e6:g} MB", long_documents[0], long_documents[1] // 4),
    ):
        corpus = folder / f"tokens-{num_documents}"
        write_tokens(corpus, num_documents, mean_length)
        start = time.perf_counter()
        reader = CorpusReader(corpus, context=CONTEXT, pack_tokens=PACK_TOKENS, seed=0)
        opened = time.perf_counter() - start
        times = [processor_s(reader.next_pack) for _ in range(208)][8:]
        mean = statistics.mean(times)
        rows.append(
            (
                name,
                f"{opened * 1e3:.0f}",
                f"{mean * 1e3:.2f}",
                f"{mean / step:.3%}",
                f"{0.02 * PACK_TOKENS / mean:,.0f}",
            )
        )
        bars.append(Bar.at_most(f"reading, share of an m2-nano step: {name}", mean / step, 0.02))
    print_table(
        f"Packs of {PACK_TOKENS} tokens, context {CONTEXT}; an m2-nano step over as many takes {step:.2f} s here",
        ("", "open ms", "pack ms", "of the step", "tokens/s fed at 2%"),
        rows,
    )
    return bars


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.quick:
            # Memory per document shows only where documents outweigh the batches: not within a minute.
            bars = [*builder(folder, 3_000_000), *reading(folder, 100_000, (10, 5_000_000))]
        else:
            bars = [
                *builder(folder, 40_000_000),
                *memory(folder, (250_000, 1_000_000)),
                *reading(folder, 1_000_000, (100, 50_000_000)),
            ]
    finish(bars, options.json)


if __name__ == "__main__":
    main()
