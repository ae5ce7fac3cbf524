"""Sources in, a `Store` of encoded trajectories out: a run calls `prepare` before it trains.

The store is a pure function of the sources' contents, the configuration, the chat format and the seed. Its key is a
hash of these: a folder with a store of the same key is reused, nothing is encoded again. Problems are counted in the
report; with `strict` they raise a `DataError` and nothing is left behind. A `Selection` limits the store to the trained
or to the held-out trajectories.

A source is a file, or a folder, whose files are read in path order. A folder is one of these:

    saved by datasets      `Dataset.save_to_disk`: state.json lists the Arrow files; `DatasetDict.save_to_disk`:
                           dataset_dict.json lists the splits, each a folder of the former kind
    anything else          all files of known kinds in it, at any depth, such as data/train-00000-of-00002.parquet

A file name says its split as on the Hugging Face hub: NAME-00000-of-00002, or the words train, validation or test in it
or in its folder's name. `split` selects one; tables of several splits are refused without it, so that no run trains on
a test split by accident. Folders of JSONL and ATIF files are read whole unless `split` is set.

Prompt distillation drops parts of the system prompt at their rates, so that the model learns to do without. Whether a
part is dropped is a pure function of seed, trajectory, draw and part: the same in every process, and independent
between parts. The blank lines that only a dropped part needed are removed with it.
"""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from m2forge.errors import ConfigError, DataError, FormatError, NotFoundError
from m2forge.files import staged_folder
from m2forge.sft.atif import read_atif
from m2forge.sft.compressed_file import plain_suffix
from m2forge.sft.config import PromptPart, SFTDataConfig, SourceConfig
from m2forge.sft.encode import Encoded, encode
from m2forge.sft.report import Note, Rejection, Report
from m2forge.sft.row_file import read_arrow, read_jsonl, read_parquet
from m2forge.sft.split import Selection, conversation_hash
from m2forge.sft.trajectory import Trajectory
from m2forge.sft.trajectory_store import META, Store, StoreWriter
from m2forge.text.format import ChatFormat, Rendered
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.train.run_dir import make_private

_KIND_OF: dict[str, Literal["jsonl", "atif", "parquet", "arrow"]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "atif",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_TABLES = ("parquet", "arrow")
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_SHARD = re.compile(r"([\w.]+)-\d{5}-of-\d{5}$")
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}


def list_files(source: SourceConfig) -> list[Path]:
    """The files of `source`. A folder yields its files of the requested kind, except hidden ones."""
    path = Path(source.path)
    if path.is_file():
        if source.split is not None:
            raise ConfigError(f"{path}: split {source.split!r} selects among the files of a folder; leave it out")
        return [path]
    if not path.is_dir():
        raise NotFoundError(f"{path}: no such file or folder; give the path of trajectories as JSONL, ATIF or a table")
    if source.kind in ("auto", "arrow"):
        if (path / _SPLITS).is_file():
            return _saved_files(path / _pick(path, source.split, _saved_splits(path)))
        if (path / _STATE).is_file():
            return _saved_files(path, source.split)
    wanted = {suffix for suffix, kind in _KIND_OF.items() if source.kind in ("auto", kind)}
    files = sorted(
        file
        for file in path.rglob("*")
        if plain_suffix(file) in wanted
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.is_file()
    )
    if not files:
        raise NotFoundError(f"{path}: the folder holds no {' or '.join(sorted(wanted))} file")
    return _of_split(path, files, source.split)


def read_source(source: SourceConfig, report: Report) -> Iterator[Trajectory]:
    """Yields valid trajectories in an order that depends only on paths and contents; problems go to `report`."""
    is_folder = Path(source.path).is_dir()
    for file in list_files(source):
        kind = _KIND_OF.get(plain_suffix(file), "jsonl") if source.kind == "auto" else source.kind
        match kind:
            case "atif":
                yield from read_atif(file, report, source.unpack, foreign=is_folder)
            case "parquet":
                yield from read_parquet(file, report, source.unpack, source.row_format)
            case "arrow":
                yield from read_arrow(file, report, source.unpack, source.row_format)
            case _:
                yield from read_jsonl(file, report, source.unpack, source.row_format)


# -- folders that datasets has saved ----------------------------------------------------------------------------------


def _saved_splits(folder: Path) -> list[str]:
    splits = _read_json(folder / _SPLITS).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise DataError(f"{folder / _SPLITS}: expected a list of splits, received {splits!r}; save the dataset again")
    return splits


def _saved_files(folder: Path, split: str | None = None) -> list[Path]:
    """The Arrow files of one saved dataset. `split`: the split that it must be."""
    state = _read_json(folder / _STATE)
    if split is not None and state.get("_split") != split:
        raise NotFoundError(f"{folder}: the dataset's split is {state.get('_split')!r}, not {split!r}")
    entries = state.get("_data_files")
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(f"{folder / _STATE}: expected names of data files, received {entries!r}; save it again")
    if state.get("_indices_data_files"):
        raise DataError(f"{folder}: saved with an index by an old datasets library; load it and save it again")
    files = [folder / str(name) for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise NotFoundError(f"{folder}: {missing[0]} is missing, which {_STATE} lists; save the dataset again")
    return files


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); save the dataset again") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected an object, received {value!r}; save the dataset again")
    return value


# -- splits -----------------------------------------------------------------------------------------------------------


def _of_split(folder: Path, files: list[Path], split: str | None) -> list[Path]:
    by_file = {file: _split_of(file.relative_to(folder)) for file in files}
    tables = {by_file[file] for file in files if _KIND_OF[plain_suffix(file)] in _TABLES} - {None}
    if split is None and len(tables) < 2:
        return files
    names = sorted({name for name in by_file.values() if name is not None})
    chosen = _pick(folder, split, names)
    return [file for file in files if by_file[file] == chosen]


def _pick(folder: Path, split: str | None, splits: list[str]) -> str:
    found = ", ".join(splits) or "none"
    if split is None and len(splits) != 1:
        raise ConfigError(f"{folder}: the folder has the splits {found}; set split to the one to read")
    if split is not None and split not in splits:
        raise NotFoundError(f"{folder}: the folder has no split {split!r}; it has {found}")
    return splits[0] if split is None else split


def _split_of(path: Path) -> str | None:
    """The split that a path below a source names, the file before its folders."""
    stem = path.name.removesuffix("".join(path.suffixes[-2:]) if path.suffix in (".gz", ".zst") else path.suffix)
    if shard := _SHARD.search(stem):
        return _SPLIT_WORDS.get(shard[1], shard[1])
    for name in (stem, *reversed(path.parent.parts)):
        for word in re.split(r"[^a-z0-9]+", name.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_HEADING = re.compile(r" {0,3}(#{1,6})\s")


def draw_dropped(parts: Sequence[PromptPart], seed: int, trajectory: str, draw: int) -> tuple[bool, ...]:
    """Which parts this draw drops. `trajectory`: a unique name of the trajectory."""
    return tuple(_uniform(f"{seed}/{trajectory}/{draw}/{index}") < part.rate for index, part in enumerate(parts))


def drop_parts(
    messages: Sequence[Message], parts: Sequence[PromptPart]
) -> tuple[tuple[Message, ...], tuple[bool, ...]]:
    """The messages without `parts`, and which messages stay: a system prompt left empty is dropped entirely."""
    remaining: list[Message] = []
    stays: list[bool] = []
    for message in messages:
        if message.role == "system" and parts:
            spans = [span for part in parts for span in find_part(message.content, part)]
            message = dataclasses.replace(message, content=_cut_spans(message.content, spans))
            stays.append(bool(message.content.strip()))
        else:
            stays.append(True)
        if stays[-1]:
            remaining.append(message)
    return tuple(remaining), tuple(stays)


def find_part(prompt: str, part: PromptPart) -> list[tuple[int, int]]:
    """Every occurrence of the part in the prompt, as start and end."""
    match part.kind:
        case "text":
            return [found.span() for found in re.finditer(re.escape(part.match), prompt)]
        case "regex":
            spans = [found.span() for found in re.finditer(part.match, prompt, re.MULTILINE)]
            return [(start, end) for start, end in spans if end > start]
        case "heading":
            return _find_sections(prompt, part.match)


def _find_sections(prompt: str, heading: str) -> list[tuple[int, int]]:
    """Sections under `heading`, each up to the next heading of the same or a higher level. Code blocks are skipped."""
    level = len(heading) - len(heading.lstrip("#"))
    sections: list[tuple[int, int]] = []
    start: int | None = None
    fence = ""
    offset = 0
    for line in prompt.splitlines(keepends=True):
        opened = _FENCE.match(line)
        mark = _HEADING.match(line)
        if opened and not fence:
            fence = opened[1]
        elif opened and opened[1].startswith(fence):
            fence = ""
        elif mark and not fence:
            if start is not None and len(mark[1]) <= level:
                sections.append((start, offset))
                start = None
            if start is None and line.strip() == heading.strip():
                start = offset
        offset += len(line)
    return [*sections, (start, offset)] if start is not None else sections


def _cut_spans(text: str, spans: Sequence[tuple[int, int]]) -> str:
    pieces: list[str] = []
    end = 0
    for start, stop in sorted(spans):
        if start >= end:
            pieces.append(text[end:start])
        end = max(end, stop)
    if not pieces:
        return text
    joined = pieces[0].lstrip("\n")
    for piece in [*pieces[1:], text[end:]]:
        left, right = joined.rstrip("\n"), piece.lstrip("\n")
        num_lines = max(len(joined) - len(left), len(piece) - len(right))
        joined = left + "\n" * num_lines + right if left else right
    return joined.rstrip("\n")


def _uniform(key: str) -> float:
    """A pseudo-random number in [0, 1) that depends on `key` alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


LAYOUT = 1
"""Version of the store's layout on disk; a store of another version is rebuilt."""

_PROBE = (
    Message("system", "Be brief.\n\n## Rules\nNone."),
    Message("user", "What is 17 + 25? Äpfel, 東京, 🙂"),
    Message("assistant", "Let me see.", thinking="Add them.", tool_calls=(ToolCall("add", {"a": 17, "b": 25}, "c1"),)),
    Message("tool", "42", tool_call_id="c1"),
    Message("assistant", "It is 42.", thinking="The tool says 42."),
    Message("user", "def thanks():\n    return None  # 0123456789"),
    Message("assistant", "Gladly."),
)
"""A conversation that uses every feature: different chat formats render it differently."""


def prepare(
    config: SFTDataConfig, chat_format: ChatFormat, folder: Path, seed: int, selection: Selection | None = None
) -> Store:
    """Encode the sources into `folder`, in a run's directory, or open it if they are encoded already. `selection`: the
    trajectories to use; None: all."""
    key = _key(config, chat_format, seed, selection)
    store = Store.open_if_current(folder, key)
    if store is None:
        if (folder / META).is_file():
            _remove(folder)
        make_private(folder.parent)
        with staged_folder(folder) as partial:
            _Preparation(config, chat_format, partial, seed, selection).run(key)
        store = Store(folder)
    store.report.log()
    return store


def _remove(folder: Path) -> None:
    """Rename before removing: a half-removed folder would be neither a valid store nor a free path."""
    doomed = folder.with_name(f".{folder.name}.old.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


class _Preparation:
    def __init__(
        self, config: SFTDataConfig, chat_format: ChatFormat, folder: Path, seed: int, selection: Selection | None
    ) -> None:
        self._config = config
        self._selection = selection
        self._format = chat_format
        self._seed = seed
        self._writer = StoreWriter(folder)
        self._report = Report()
        self._matched = [False] * len(config.prompt_parts)
        # Parts that are always or never dropped give one prompt for every draw.
        undecided = any(0 < part.rate < 1 for part in config.prompt_parts)
        self._num_draws = config.num_prompt_draws if undecided else 1

    def run(self, key: str) -> None:
        config, report = self._config, self._report
        # The trained side of the same sources reports what cannot be read.
        reading = Report() if self._holds_out and self._divides else report
        try:
            for index, source in enumerate(config.sources):
                for number, trajectory in enumerate(read_source(source, reading)):
                    self._take(trajectory, index, f"{index}/{number}")
            for part, matched in zip(config.prompt_parts, self._matched, strict=True):
                if not matched and not self._holds_out:
                    report.add_note(Note.UNMATCHED_PART, f"{part.kind} {part.match!r}")
            if config.strict:
                report.refuse_problems()
            if not self._writer.num_trajectories:
                purpose = "evaluate" if self._holds_out else "train on"
                raise DataError(f"no trajectory to {purpose}: {report.describe()}")
            self._writer.finish(key, config.context, [source.weight for source in config.sources], report)
        finally:
            self._writer.close()

    @property
    def _holds_out(self) -> bool:
        return self._selection is not None and self._selection.side == "held_out"

    @property
    def _divides(self) -> bool:
        """Whether some of the sources' trajectories are trained and others held out."""
        return self._selection is not None and self._selection.share < 1

    def _take(self, trajectory: Trajectory, source: int, name: str) -> None:
        """Add a trajectory, if it is on the selected side."""
        conversation = None
        if self._selection is not None:
            conversation = conversation_hash(trajectory)
            if not self._selection.includes(conversation):
                if not self._holds_out:
                    self._report.num_trajectories += 1
                    self._report.add_note(Note.HELD_OUT, trajectory.source)
                return
        self._report.num_trajectories += 1
        self._add(trajectory, source, name, conversation if self._holds_out else None)

    def _add(self, trajectory: Trajectory, source: int, name: str, conversation: int | None) -> None:
        """Encode the variants of one trajectory, each distinct prompt once. `conversation`: a hash to store with it."""
        self._match_parts(trajectory)
        by_prompt: dict[tuple[str, ...], Encoded | Note] = {}
        results = []
        try:
            for draw in range(self._num_draws):
                variant = self._variant(trajectory, name, draw)
                prompt = tuple(message.content for message in variant.messages if message.role == "system")
                if prompt not in by_prompt:
                    by_prompt[prompt] = encode(variant, self._format, self._config.context, self._config.too_long)
                results.append(by_prompt[prompt])
        except Rejection as rejection:
            self._report.add_problem(rejection)
            return
        variants = [result for result in results if isinstance(result, Encoded)]
        if not variants:
            self._report.add_note(next(result for result in results if isinstance(result, Note)), trajectory.source)
            return
        if any(encoded.cut for encoded in variants):
            self._report.add_note(Note.CUT, trajectory.source)
        self._write(variants, results, source, conversation)

    def _write(
        self, variants: Sequence[Encoded], results: Sequence[Encoded | Note], source: int, conversation: int | None
    ) -> None:
        documents: dict[int, int] = {}
        for encoded in variants:
            if id(encoded) not in documents:
                documents[id(encoded)] = self._writer.add_document(encoded)
        # If a draw's prompt makes the trajectory too long, the document of another draw is used.
        shown = [result if isinstance(result, Encoded) else variants[0] for result in results]
        self._writer.add_trajectory(source, [documents[id(encoded)] for encoded in shown], conversation)
        self._report.num_kept += 1
        self._report.num_turns += variants[0].num_turns
        self._report.num_tokens += len(variants[0].ids)
        self._report.num_trained_tokens += int(variants[0].trained.sum())

    def _variant(self, trajectory: Trajectory, name: str, draw: int) -> Trajectory:
        parts = self._config.prompt_parts
        dropped = draw_dropped(parts, self._seed, name, draw)
        chosen: list[PromptPart] = [part for part, drop in zip(parts, dropped, strict=True) if drop]
        messages, stays = drop_parts(trajectory.messages, chosen)
        trained = tuple(flag for flag, stay in zip(trajectory.trained, stays, strict=True) if stay)
        return dataclasses.replace(trajectory, messages=messages, trained=trained)

    def _match_parts(self, trajectory: Trajectory) -> None:
        for index, part in enumerate(self._config.prompt_parts):
            if not self._matched[index]:
                self._matched[index] = any(
                    message.role == "system" and find_part(message.content, part) for message in trajectory.messages
                )


def _render_probe(chat_format: ChatFormat) -> Rendered:
    try:
        return chat_format.render(_PROBE, (Tool("add", "Add.", {"type": "object", "properties": {}}),))
    except FormatError:
        pass
    # A chat format without tools, or without thinking, still serves conversations that use none.
    try:
        return chat_format.render([_PROBE[1], *_PROBE[4:]])
    except FormatError:
        return chat_format.render(_PROBE[5:])


def _key(config: SFTDataConfig, chat_format: ChatFormat, seed: int, selection: Selection | None) -> str:
    """A hash of everything the store depends on."""
    probe = _render_probe(chat_format)
    identity = [LAYOUT, seed, config.model_dump(mode="json", exclude_none=True), chat_format.tokenizer.fingerprint]
    identity += [chat_format.name, probe.ids, probe.trained]
    if selection is not None:
        identity.append(selection.identity())
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16)
    for source in config.sources:
        for file in list_files(source):
            digest.update(json.dumps(str(file)).encode())
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "blake2b").digest())
    return digest.hexdigest()
