"""A digest is of every byte, whichever way the bytes come."""

import hashlib
import logging
from pathlib import Path

import pytest
import torch

from m2forge.errors import CheckpointError
from m2forge.model.manifest import digest, read_checked, received_tensors, refuse_changed

CONTENT = bytes(range(256)) * 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("index", [0, 99, 100, 1279])
def test_a_changed_byte_is_found(path: Path, index: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = digest(path)
    refuse_changed(path, expected)
    memory = torch.empty(2000, dtype=torch.uint8)
    assert read_checked(path, expected, memory).numpy().tobytes() == CONTENT
    changed = bytearray(CONTENT)
    changed[index] ^= 1
    path.write_bytes(changed)
    with pytest.raises(CheckpointError, match="torn or was changed"):
        refuse_changed(path, expected)
    with pytest.raises(CheckpointError, match="torn or was changed"):
        read_checked(path, expected, memory)
    with caplog.at_level(logging.WARNING):
        assert received_tensors(path, expected, {"file": torch.frombuffer(changed, dtype=torch.uint8)}) is None
    assert "other bytes" in caplog.text


def test_an_empty_file_is_torn(path: Path) -> None:
    expected = digest(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="torn or was changed"):
        refuse_changed(path, expected)
    assert digest(path).startswith("xxh3-")


def test_digests_of_whole_files_are_still_compared(path: Path) -> None:
    whole = hashlib.blake2b(CONTENT, digest_size=16).hexdigest()
    refuse_changed(path, whole)
    memory = torch.empty(len(CONTENT), dtype=torch.uint8)
    assert read_checked(path, whole, memory).numpy().tobytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(CheckpointError, match="torn or was changed"):
        refuse_changed(path, whole)
    with pytest.raises(CheckpointError, match="torn or was changed"):
        read_checked(path, whole, memory)


def test_a_file_that_has_grown_is_changed(path: Path) -> None:
    memory = torch.empty(len(CONTENT), dtype=torch.uint8)
    path.write_bytes(CONTENT + b"\0")
    with pytest.raises(CheckpointError, match="torn or was changed"):
        read_checked(path, digest(path), memory)
