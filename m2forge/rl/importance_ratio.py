"""Stores the importance ratio of each trained token, in a small file for each of the last steps.

    r = π(token) / π_old(token),    π: the policy at the start of the step, π_old: the one that sampled the token

A file holds the names of the step's samples, `ATTEMPT/CALL`, the number of tokens of each, and their log r concatenated
in float16, which is accurate to 0.03% at r = 2 and more accurate near r = 1. The run page shows it beside trajectories;
training does not read it, so a missing file does no harm.
"""

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2forge.files import write_atomic
from m2forge.records import FloatArray

LARGEST = 6e4
"""Bound of |log r|; float16 ends a little above."""


def write_ratios(folder: Path, step: int, log_ratios: Mapping[str, FloatArray], keep: int) -> None:
    """Write the file of a step and delete all but the last `keep` steps."""
    if keep:
        columns = {
            "names": np.array(list(log_ratios)),
            "sizes": np.array([values.size for values in log_ratios.values()], np.int32),
            "log_ratios": np.concatenate([np.empty(0, np.float32), *log_ratios.values()]),
        }
        columns["log_ratios"] = columns["log_ratios"].clip(-LARGEST, LARGEST).astype(np.float16)
        packed = io.BytesIO()
        np.savez(packed, allow_pickle=False, **columns)
        write_atomic(path_of(folder, step), packed.getvalue())
    for path in folder.glob("step-*.npz"):
        if _step(path) <= step - keep:
            path.unlink(missing_ok=True)


def delete_ratios(folder: Path, step: int) -> None:
    """Delete the files of steps after `step`, from which the trainer resumes."""
    for path in folder.glob("step-*.npz"):
        if _step(path) > step:
            path.unlink(missing_ok=True)


def read_ratios(folder: Path, step: int) -> dict[str, FloatArray] | None:
    """log r of each sample's tokens by name; None if the file is missing or unreadable."""
    try:
        with zipfile.ZipFile(path_of(folder, step)) as archive:
            names, sizes, values = (_read_column(archive, name) for name in ("names", "sizes", "log_ratios"))
    except (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile):
        return None
    values = values.astype(np.float32)
    return dict(zip(names.tolist(), np.split(values, np.cumsum(sizes)[:-1]), strict=True)) if sizes.size else {}


def _read_column(archive: zipfile.ZipFile, name: str) -> npt.NDArray[np.generic]:
    """Read an array of an archive that `np.savez` wrote. Refuses compressed members and those whose header states
    another size than the data has, because numpy would allocate the stated size."""
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
        raise ValueError(f"{name} is compressed")
    with archive.open(member) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} has another format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        data = file.read()
    if dtype.hasobject or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {len(data)} bytes, shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.npz"


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
