"""Stages the weights of a policy version in host memory while the network samples, so that loading them is one copy.

    a version's folder ──▶ each file read once, its digest compared ──────────────┐
                                                                                  ├──▶ staging memory ──▶ the network
    a broadcast ──▶ file by file; digests compared once the folder is complete ───┘

A file by broadcast is staged before its digest can be compared, so it becomes weights only if all agree afterwards.
"""

import logging
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from m2forge.model.architecture import public_parts
from m2forge.model.checkpoint import WHOLE_PREFIX, deltas_since, fill
from m2forge.model.folder import FolderSource
from m2forge.model.host_memory import empty_host
from m2forge.model.manifest import NUM_THREADS, digest_of, read_manifest, tensors_in
from m2forge.model.tensor_source import Source
from m2forge.model.transformer import Transformer

PARTS_AT_ONCE = 32
MOST_BUFFER_BYTES = 1 << 29
"""For the files of a version that are read at the same time."""
_log = logging.getLogger(__name__)


class StagingMemory:
    """Host memory for all weights of a network, from which filling it is a copy alone. Once nothing refers to it, the
    network's next one takes its place: memory is slow to allocate, and slower to pin while a GPU samples."""

    def __init__(self, model: Transformer) -> None:
        self.parts = dict(public_parts(model.config))
        free = _free_memory.setdefault(model, SimpleQueue())
        try:
            self.tensors, self._buffers = free.get_nowait()
        except Empty:
            state, names = model.state_dict(), dict.fromkeys(part.name for part in self.parts.values())
            pinned = model.embedding.weight.is_cuda
            self.tensors = {name: empty_host(state[name].shape, state[name].dtype, pinned=pinned) for name in names}
            """By their names in the network, of which one holds many public tensors."""
            self._buffers = list[Tensor]()
        weakref.finalize(self, free.put, (self.tensors, self._buffers)).atexit = False
        self.filled = set[str]()
        """Public names of the tensors that have been copied in."""

    def buffers(self, number: int, num_bytes: int) -> list[Tensor]:
        """Memory for the files from which tensors are copied in; the next version's are read into the same."""
        if len(self._buffers) < number or len(self._buffers[0]) < num_bytes:
            self._buffers[:] = (empty_host((num_bytes,), torch.uint8, pinned=False) for _ in range(number))
        return self._buffers[:number]

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors in, by public name."""
        parts = [self.parts[name] for name in tensors]
        # One call for many: between two, a thread waits for the interpreter, which steps of the sampler hold.
        torch._foreach_copy_([part.of(self.tensors[part.name]) for part in parts], list(tensors.values()))
        self.filled.update(tensors)


_free_memory = weakref.WeakKeyDictionary[Transformer, SimpleQueue[tuple[dict[str, Tensor], list[Tensor]]]]()


class Arrival:
    """A version whose files come by broadcast, one by one, while its folder is not complete yet.

    Whole tensors are staged as soon as their file is there, and are not weights before the manifest of the complete
    folder states each file's digest. Files of adapters and changes are kept as they came."""

    def __init__(self, model: Transformer) -> None:
        """`model`: the network into which the version will be loaded."""
        self.images = dict[str, Tensor]()
        """The bytes of each file that is not staged, by its name."""
        self._model, self._lock = model, threading.Lock()
        self._memory: StagingMemory | None = None
        self._staged = list[tuple[str, str]]()
        """Name and digest of each file that was copied into staging memory; no digest if that failed partway."""

    def add(self, name: str, content: Tensor) -> None:
        """Take a file, whose memory is free again when this returns. Several threads may call this."""
        if not name.startswith(WHOLE_PREFIX):
            self.images[name] = content.clone()
            return
        with self._lock:
            self._memory = self._memory or StagingMemory(self._model)
        digest = ""
        try:
            self._memory.put(tensors_in(content))
            digest = digest_of(content)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            # No digest has been compared yet, so these may be any bytes.
            _log.warning("%s came by broadcast and cannot be staged (%s: %s)", name, type(error).__name__, error)
        self._staged.append((name, digest))

    def staged(self, folder: Path) -> StagingMemory | None:
        """The weights of the version in `folder`, if all its files are staged."""
        if self._memory is None:
            return None
        stated = sorted((name, entry["digest"]) for name, entry in read_manifest(folder).items())
        if sorted(self._staged) != stated or self._memory.filled != self._memory.parts.keys():
            _log.warning("%s: the broadcast brought other files than the manifest states; reading the folder", folder)
            return None
        return self._memory


class Staged:
    """The weights of `source` in host memory, so that filling the network is a copy alone. If `model` holds the weights
    of the folder `loaded`, and deltas lead from there to `source`, these are all that is in memory."""

    def __init__(
        self, model: Transformer, source: Source, loaded: Path | None, arrived: StagingMemory | None = None
    ) -> None:
        """`arrived`: the weights of `source`, if they are staged already (`Arrival.staged`)."""
        self._source, self._memory = source, arrived
        """No memory if the changes are in memory."""
        if arrived is None and deltas_since(source, loaded) is None:
            self._memory = _read_all(model, source)

    @torch.no_grad()
    def fill(self, model: Transformer, loaded: Path | None) -> None:
        """`loaded`: the folder of the weights that `model` holds by now."""
        if self._memory is None:
            fill(model, self._source, loaded)
            return
        state = model.state_dict()
        for name, staged in self._memory.tensors.items():
            state[name].copy_(staged, non_blocking=True)
        if model.embedding.weight.is_cuda:
            torch.cuda.synchronize(model.embedding.weight.device)


def _read_all(model: Transformer, source: Source) -> StagingMemory:
    """All weights of `source`."""
    memory, dtypes = StagingMemory(model), {name: tensor.dtype for name, tensor in model.state_dict().items()}
    if isinstance(source, FolderSource):
        _stage_files(memory, source)
    names = [name for name in memory.parts if name not in memory.filled]

    def stage(first: int) -> None:
        some = names[first : first + PARTS_AT_ONCE]
        memory.put({name: source.read(name, dtypes[memory.parts[name].name]) for name in some})

    with ThreadPoolExecutor(NUM_THREADS if isinstance(source, FolderSource) else 1) as pool:
        list(pool.map(stage, range(0, len(names), PARTS_AT_ONCE)))
    return memory


def _stage_files(memory: StagingMemory, source: FolderSource) -> None:
    """Stage the files of a policy version, each read once: its digest and its tensors are taken from the same bytes."""
    sizes = source.unchecked
    most = max(sizes.values(), default=0)
    num_buffers = min(NUM_THREADS, len(sizes), MOST_BUFFER_BYTES // max(most, 1))
    if not num_buffers:
        return
    free = SimpleQueue[Tensor]()
    for buffer in memory.buffers(num_buffers, most):
        free.put(buffer)

    def stage(file_name: str) -> None:
        buffer = free.get()
        try:
            tensors = source.read_file(file_name, buffer)
            memory.put({name: tensor for name, tensor in tensors.items() if name in memory.parts})
        finally:
            free.put(buffer)

    with ThreadPoolExecutor(num_buffers) as pool:
        list(pool.map(stage, sizes))
