"""Sources in, a `Store` of encoded trajectories out: a run calls `prepare` before it trains.

The store is a pure function of the sources' contents, the configuration, the chat format and the seed. Its key is a
hash of these: a folder with a store of the same key is reused, nothing is encoded again. Problems are counted in the
report; with `strict` they raise a `DataError` and nothing is left behind. A `Selection` limits the store to the trained
or to the held-out trajectories.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from m2forge.errors import DataError, FormatError
from m2forge.files import staged_folder
from m2forge.sft.config import PromptPart, SFTDataConfig
from m2forge.sft.distill import draw_dropped, drop_parts, find_part
from m2forge.sft.encode import Encoded, encode
from m2forge.sft.held_out import Selection, conversation_hash
from m2forge.sft.report import Note, Rejection, Report
from m2forge.sft.source import list_files, read_source
from m2forge.sft.store import META, Store, StoreWriter
from m2forge.sft.trajectory import Trajectory
from m2forge.text.format import ChatFormat, Rendered
from m2forge.text.message import Message, Tool, ToolCall

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
    """Encode the sources into `folder`, or open it if they are encoded already. `selection`: the trajectories to use;
    None: all."""
    key = _key(config, chat_format, seed, selection)
    store = Store.open_if_current(folder, key)
    if store is None:
        if (folder / META).is_file():
            _remove(folder)
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
        kept = [result for result in results if isinstance(result, Encoded)]
        if not kept:
            self._report.add_note(next(result for result in results if isinstance(result, Note)), trajectory.source)
            return
        if any(encoded.cut for encoded in kept):
            self._report.add_note(Note.CUT, trajectory.source)
        self._write(kept, results, source, conversation)

    def _write(
        self, kept: Sequence[Encoded], results: Sequence[Encoded | Note], source: int, conversation: int | None
    ) -> None:
        documents: dict[int, int] = {}
        for encoded in kept:
            if id(encoded) not in documents:
                documents[id(encoded)] = self._writer.add_document(encoded)
        # If a draw's prompt makes the trajectory too long, the document of another draw is used.
        shown = [result if isinstance(result, Encoded) else kept[0] for result in results]
        self._writer.add_trajectory(source, [documents[id(encoded)] for encoded in shown], conversation)
        self._report.num_kept += 1
        self._report.num_turns += kept[0].num_turns
        self._report.num_tokens += len(kept[0].ids)
        self._report.num_trained_tokens += int(kept[0].trained.sum())

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
        # A chat format without tools still serves conversations that use none.
        return chat_format.render([_PROBE[1], *_PROBE[4:]])


def _key(config: SFTDataConfig, chat_format: ChatFormat, seed: int, selection: Selection | None) -> str:
    """A hash of everything the store depends on."""
    probe = _render_probe(chat_format)
    identity = [LAYOUT, seed, config.model_dump(mode="json"), chat_format.tokenizer.fingerprint]
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
