"""Files and folders appear whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from m2forge import files
from m2forge.errors import ExistsError
from m2forge.files import append_line, open_lines, staged_folder, whole_lines, write_atomic, write_line


def test_write_atomic_replaces_text_and_makes_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_atomic(path, "first")
    write_atomic(path, "zweites ü")
    assert path.read_text(encoding="utf-8") == "zweites ü"
    assert [entry.name for entry in path.parent.iterdir()] == ["b.txt"]


def test_write_atomic_takes_bytes_with_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_atomic(tmp_path / "atomic", b"\x00\xff")
    assert (tmp_path / "atomic").read_bytes() == b"\x00\xff"
    assert stat.S_IMODE((tmp_path / "atomic").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_failed_write_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").touch()
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", "cannot replace a folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_staged_folder_appears_on_success_only(tmp_path: Path) -> None:
    dest = tmp_path / "deep" / "model"
    with staged_folder(dest) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_bytes(b"w")
        assert not dest.exists()
    assert (dest / "sub" / "weights").read_bytes() == b"w"
    assert [entry.name for entry in dest.parent.iterdir()] == ["model"]


def test_a_staged_folder_is_synced_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = set[str]()

    def sync(path: Path) -> None:
        assert path == tmp_path or not (tmp_path / "model").exists()
        synced.add(path.name)

    monkeypatch.setattr(files, "sync_path", sync)
    with staged_folder(tmp_path / "model") as folder:
        (folder / "inner").mkdir()
        for number in range(40):
            (folder / "inner" / str(number)).write_text("")
    assert synced == {*map(str, range(40)), "inner", folder.name, tmp_path.name}


def test_a_folder_that_cannot_be_synced_does_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync_path", sync)
    with pytest.raises(OSError, match="No space"), staged_folder(tmp_path / "model") as folder:
        (folder / "weights").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_staged_folder_is_removed_on_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "model") as folder:
        (folder / "half").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_staged_folder_takes_the_place_of_an_empty_folder(tmp_path: Path) -> None:
    with staged_folder(tmp_path) as folder:
        (folder / "x").touch()
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_staged_folder_refuses_an_occupied_destination(tmp_path: Path, kind: str) -> None:
    dest = tmp_path / "dest"
    if kind == "folder":
        dest.mkdir()
        (dest / "precious").touch()
    elif kind == "file":
        dest.touch()
    else:
        dest.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ExistsError, match="dest exists and is not") as raised, staged_folder(dest):
        pytest.fail("the block must not run")
    assert isinstance(raised.value, FileExistsError)
    assert [entry.name for entry in tmp_path.iterdir()] == ["dest"]


def test_a_destination_filled_meanwhile_is_kept(tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    with pytest.raises(ExistsError), staged_folder(dest):
        dest.mkdir()
        (dest / "other").touch()
    assert [entry.name for entry in tmp_path.rglob("*")] == ["dest", "other"]


@pytest.mark.parametrize("torn", [b"", b"x", b"\0" * 10, b"x" * 200_000])
def test_a_torn_last_line_is_cut_off_before_a_line_is_appended(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "made" / "lines.jsonl"
    append_line(path, "first")
    append_line(path, "second ä")
    with path.open("ab") as file:
        file.write(torn)
    lines = [b"first", "second ä".encode()]
    assert whole_lines(path.read_bytes()) == lines
    append_line(path, "third")
    assert whole_lines(path.read_bytes()) == [*lines, b"third"]
    path.write_bytes(torn)
    assert whole_lines(path.read_bytes()) == []
    append_line(path, "alone")
    assert path.read_bytes() == b"alone\n"


@pytest.mark.parametrize("refuses", [False, True])
def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    path, write, sizes = tmp_path / "lines.jsonl", os.write, [3, 4]

    def write_some(descriptor: int, data: memoryview) -> int:
        if refuses and not sizes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: sizes.pop(0)] if sizes else data)

    descriptor = open_lines(path)
    write_line(descriptor, "first")
    monkeypatch.setattr(os, "write", write_some)
    if refuses:
        with pytest.raises(OSError, match="No space"):
            write_line(descriptor, "a second line")
    else:
        write_line(descriptor, "a second line")
    monkeypatch.undo()
    write_line(descriptor, "third")
    os.close(descriptor)
    assert path.read_text().split() == ["first", *([] if refuses else ["a", "second", "line"]), "third"]
