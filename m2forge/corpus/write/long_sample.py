"""Long samples of training documents, for context-extension phases.

Three kinds: the code files of a repository joined so that imported files come first; documents that are long by
themselves; documents on the same topic joined. In a joined sample each document still ends with the end-of-text token,
and a code file starts with a comment that names it.

The files of a repository are ordered by dependency. Imports of Python, JavaScript, TypeScript, C and C++ are found by
regular expressions; an import counts if it resolves to a file of the repository. Cycles are broken at the file with the
fewest unmet imports, ties by name.
"""

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from posixpath import dirname, join, normpath

import numpy as np
import numpy.typing as npt

from m2forge.corpus.config import LongConfig
from m2forge.corpus.judge.topic import NUM_BUCKETS, group
from m2forge.corpus.write.surviving import SurvivingPart, Survivors
from m2forge.records import IntArray
from m2forge.text.tokenizer import Tokenizer

_PYTHON = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+\(?([\w, \t*]*)|import[ \t]+([\w., \t]+))", re.M
)
_SCRIPT = re.compile(r"""(?:\bfrom|\bimport|\brequire\(|\bimport\()\s*['"](\.{1,2}/[^'"]+)['"]""")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)
_SCRIPT_ENDINGS = ("", ".js", ".ts", ".jsx", ".tsx", ".mjs", ".vue", "/index.js", "/index.ts", "/index.tsx")


def dependency_order(files: Mapping[str, str]) -> list[str]:
    """The names of `files` (name → text), each after the files it imports, as far as cycles allow."""
    needs = {name: imports(name, text, files) - {name} for name, text in files.items()}
    needed_by: dict[str, list[str]] = {name: [] for name in files}
    for name, others in needs.items():
        for other in others:
            needed_by[other].append(name)
    # Heap entries of a file whose count has dropped since are stale and skipped.
    waiting = [(len(others), name) for name, others in needs.items()]
    heapq.heapify(waiting)
    open_needs = {name: len(others) for name, others in needs.items()}
    order: list[str] = []
    while waiting:
        count, name = heapq.heappop(waiting)
        if open_needs.get(name) != count:
            continue
        del open_needs[name]
        order.append(name)
        for other in needed_by[name]:
            if other in open_needs:
                open_needs[other] -= 1
                heapq.heappush(waiting, (open_needs[other], other))
    return order


def imports(name: str, text: str, files: Mapping[str, str]) -> set[str]:
    """The files that the file `name` imports."""
    ending = name[name.rfind(".") :].lower()
    if ending in (".py", ".pyi", ".pyx"):
        return _python_imports(name, text, files)
    if ending in (".js", ".jsx", ".ts", ".tsx", ".mjs", ".vue"):
        paths = [normpath(join(dirname(name), target)) for target in _SCRIPT.findall(text)]
        return {found for path in paths if (found := _first(files, [path + end for end in _SCRIPT_ENDINGS]))}
    if ending in (".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".cu", ".cuh", ".m", ".mm"):
        targets = _INCLUDE.findall(text)
        tried = [[normpath(join(dirname(name), target)), normpath(target)] for target in targets]
        return {found for paths in tried if (found := _first(files, paths))}
    return set()


def _python_imports(name: str, text: str, files: Mapping[str, str]) -> set[str]:
    found: set[str] = set()
    for source, members, modules in _PYTHON.findall(text):
        if modules:
            for module in modules.split(","):
                words = module.split()
                if words:
                    found |= _python_files(name, words[0], files)
            continue
        inside = [member.split()[0] for member in members.split(",") if member.split()]
        dotted = [f"{source}{'' if source.endswith('.') else '.'}{member}" for member in inside]
        # `from package import module` means the module if it exists, else the package itself.
        within = [_python_files(name, target, files) for target in dotted]
        found |= set().union(*within)
        if not within or not all(within):
            found |= _python_files(name, source, files)
    return found


def _python_files(name: str, module: str, files: Mapping[str, str]) -> set[str]:
    """The file of a module, relative to the importing file or in any parent folder."""
    num_dots = len(module) - len(module.lstrip("."))
    path = module.lstrip(".").replace(".", "/")
    folder = dirname(name)
    if num_dots:
        for _ in range(num_dots - 1):
            folder = dirname(folder)
        found = _first(files, _python_paths(join(folder, path).rstrip("/")))
        return {found} if found else set()
    while True:
        if found := _first(files, _python_paths(join(folder, path))):
            return {found}
        if not folder:
            return set()
        folder = dirname(folder)


def _python_paths(path: str) -> list[str]:
    return [f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}.pyx"]


def _first(files: Mapping[str, str], paths: Sequence[str]) -> str | None:
    return next((path for path in paths if path in files), None)


Tokens = npt.NDArray[np.integer]

_MAX_GROUPS = 1024
_HASH_COMMENTS = (".py", ".pyi", ".pyx", ".sh", ".rb", ".r", ".jl", ".pl", ".ps1", ".ex", ".exs", ".coffee")


@dataclass(frozen=True, slots=True)
class LongSample:
    domain: str
    tokens: list[Tokens]
    """Consecutive pieces of the sample."""


def long_samples(config: LongConfig, survivors: Survivors, tokenizer: Tokenizer, work: Path) -> Iterator[LongSample]:
    """All long samples in a fixed order. `work`: a folder for data too large for memory."""
    if config.natural:
        yield from _natural(config, survivors)
    if config.code:
        yield from _code(config, survivors, tokenizer)
    if config.related:
        for index, domain in enumerate(survivors.domains):
            if domain != "code":
                yield from _related(config, survivors, index, work)


def _natural(config: LongConfig, survivors: Survivors) -> Iterator[LongSample]:
    for part in survivors.parts():
        long_enough = np.diff(part.tokens.offsets) >= config.min_tokens
        for index in np.flatnonzero(long_enough & ~part.is_held_out).tolist():
            yield LongSample(survivors.domains[part.domain[index]], [part.tokens[index]])


@dataclass(frozen=True, slots=True)
class _File:
    part: int
    index: int
    num_tokens: int


def _code(config: LongConfig, survivors: Survivors, tokenizer: Tokenizer) -> Iterator[LongSample]:
    repository: tuple[int, tuple[str, ...]] | None = None
    files: dict[str, _File] = {}
    for key, name, file in _code_files(config, survivors):
        if key != repository:
            yield from _repository(config, survivors, tokenizer, files)
            repository, files = key, {}
        files[name] = file
    yield from _repository(config, survivors, tokenizer, files)


def _code_files(config: LongConfig, survivors: Survivors) -> Iterator[tuple[tuple[int, tuple[str, ...]], str, _File]]:
    """Repository, name and location of every code file. Sources are read in order, so a repository's are contiguous."""
    if "code" not in survivors.domains:
        return
    code = survivors.domains.index("code")
    for part in survivors.parts():
        source = part.scanned.count("source")
        names = part.scanned.texts("name")
        lengths = np.diff(part.tokens.offsets)
        for index in np.flatnonzero((part.domain == code) & ~part.is_held_out).tolist():
            name = names.text(int(part.row[index]))
            if name:
                folders = tuple(name.split("/")[:-1])
                yield (source, folders[: config.repository_depth]), name, _File(part.index, index, int(lengths[index]))


def _repository(
    config: LongConfig, survivors: Survivors, tokenizer: Tokenizer, files: dict[str, _File]
) -> Iterator[LongSample]:
    if sum(file.num_tokens for file in files.values()) < config.min_tokens or len(files) < 2:
        return
    texts = {}
    for name, file in files.items():
        part: SurvivingPart = survivors.part(file.part)
        texts[name] = part.scanned.texts("text").text(int(part.row[file.index]))
    stretches: list[Tokens] = []
    filled, num_files = 0, 0
    for name in dependency_order(texts):
        mark = "#" if name.lower().endswith(_HASH_COMMENTS) else "//"
        header = np.array(tokenizer.encode(f"{mark} {name}\n"))
        tokens = survivors.part(files[name].part).tokens[files[name].index]
        size = len(header) + len(tokens)
        if filled + size > config.max_tokens:
            if filled >= config.min_tokens and num_files > 1:
                yield LongSample("code", stretches)
            stretches, filled, num_files = [], 0, 0
        if size <= config.max_tokens:
            stretches += [header, tokens]
            filled += size
            num_files += 1
    if filled >= config.min_tokens and num_files > 1:
        yield LongSample("code", stretches)


def _related(config: LongConfig, survivors: Survivors, domain: int, work: Path) -> Iterator[LongSample]:
    """Groups of one domain's shorter documents, most similar first, until its share of the tokens is reached."""
    path = work / f"sketch-{survivors.domains[domain]}.bin"
    location, length, total = _write_sketches(config, survivors, domain, path)
    num_tokens = int(length.sum(dtype=np.int64))
    if num_tokens < config.min_tokens:
        return
    sketches = np.memmap(path, np.int8, mode="r").reshape(-1, NUM_BUCKETS)
    num_groups = max(1, min(_MAX_GROUPS, num_tokens // config.max_tokens, len(location) // 4))
    member, likeness = group(sketches, num_groups)
    order = np.lexsort((-likeness, member)).astype(np.int32)
    chosen = _packs(config, member[order], length[order])
    close = [float(likeness[order[begin:end]].mean()) for begin, end in chosen]
    left = config.related_share * total
    for rank in sorted(range(len(chosen)), key=lambda index: (-close[index], index)):
        rows = order[slice(*chosen[rank])]
        size = int(length[rows].sum())
        if size > left:
            break
        left -= size
        yield LongSample(survivors.domains[domain], [survivors.part(p).tokens[i] for p, i in location[rows].tolist()])


def _write_sketches(
    config: LongConfig, survivors: Survivors, domain: int, path: Path
) -> tuple[IntArray, IntArray, int]:
    """Write the sketches of a domain's shorter documents to a file; returns their locations, lengths, and the domain's
    tokens."""
    locations, lengths, total = [np.zeros((0, 2), np.int32)], [np.zeros(0, np.int32)], 0
    with path.open("wb") as file:
        for part in survivors.parts():
            length = np.diff(part.tokens.offsets)
            mine = (part.domain == domain) & ~part.is_held_out
            total += int(length[mine].sum())
            index = np.flatnonzero(mine & (length < config.min_tokens))
            file.write(part.scanned.column("sketch", np.int8, NUM_BUCKETS)[part.row[index]].tobytes())
            lengths.append(length[index].astype(np.int32))
            locations.append(np.stack([np.full(len(index), part.index), index], axis=1).astype(np.int32))
    return np.concatenate(locations), np.concatenate(lengths), total


def _packs(config: LongConfig, member: IntArray, length: IntArray) -> list[tuple[int, int]]:
    """Ranges of documents of one group, filled up to max_tokens and at least min_tokens long."""
    bounds = np.concatenate([np.flatnonzero(np.diff(member, prepend=-1)), [len(member)]]).tolist()
    ends = np.zeros(len(length) + 1, np.int64)
    np.cumsum(length, out=ends[1:])
    packs = []
    for begin, end in pairwise(bounds):
        while begin < end:
            stop = int(np.searchsorted(ends, ends[begin] + config.max_tokens, side="right")) - 1
            stop = max(begin + 1, min(stop, end))
            if ends[stop] - ends[begin] >= config.min_tokens:
                packs.append((begin, stop))
            begin = stop
    return packs
