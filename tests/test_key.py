"""Keys of servers: from private files and pipes alone."""

import os
from pathlib import Path

import pytest

from m2forge.errors import ConfigError
from m2forge.key import MAX_KEY_BYTES, make_key, read_key_file


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_is_read_from_a_private_file_or_a_pipe(tmp_path: Path) -> None:
    key = make_key()
    assert make_key() != key
    assert read_key_file(write(tmp_path / "key", f" {key}\n".encode())) == key
    end, start = os.pipe()
    os.write(start, key.encode())
    os.close(start)
    assert read_key_file(Path(f"/dev/fd/{end}")) == key
    os.close(end)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_other_users_may_access_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"mode 0{mode:o}.*chmod 600"):
        read_key_file(write(tmp_path / "key", b"secret", mode))


@pytest.mark.parametrize("content", [b"", b"\n", b"se cret", "schl\u00fcssel".encode(), b"a\nb", b"a" * 5000])
def test_what_a_header_cannot_carry_is_no_key(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=f"1 to {MAX_KEY_BYTES} ASCII characters"):
        read_key_file(write(tmp_path / "key", content))


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: the key cannot be read"):
        read_key_file(tmp_path / "none")
