"""How far the policy had moved from the one that sampled each trained token: a small file for each of the last steps.

    r = π(token) / π_old(token),    π: the policy that the step began with, π_old: the one that sampled the token

A file holds the names of the step's samples, `ATTEMPT/CALL`, the number of tokens of each, and log r of all of them end
to end in float16: at r = 2 that is right to 0.03%, near r = 1 closer than anybody can see. It is for who looks at
trajectories; nothing is learnt from it, and a step without one is a step all the same.
"""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from m2forge.files import write_atomic
from m2forge.records import FloatArray

LARGEST = 6e4
"""Of log r; float16 ends a little above."""


def write_ratios(folder: Path, step: int, log_ratios: Mapping[str, FloatArray], keep: int) -> None:
    """`keep`: steps of which a file stays."""
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


def forget_ratios(folder: Path, step: int) -> None:
    """The weights are those of `step` again: what came after it never was."""
    for path in folder.glob("step-*.npz"):
        if _step(path) > step:
            path.unlink(missing_ok=True)


def read_ratios(folder: Path, step: int) -> dict[str, FloatArray] | None:
    """log r of each sample's tokens; None where they are not kept."""
    try:
        with np.load(path_of(folder, step), allow_pickle=False) as columns:
            names, sizes, values = columns["names"], columns["sizes"], columns["log_ratios"].astype(np.float32)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return dict(zip(names.tolist(), np.split(values, np.cumsum(sizes)[:-1]), strict=True)) if sizes.size else {}


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.npz"


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
