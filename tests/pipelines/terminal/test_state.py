"""Final states: what counts as the same, and what does not."""

import gzip
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from m2forge.pipelines.terminal import state


def make(root: Path) -> None:
    (root / "d").mkdir(parents=True)
    (root / "a.txt").write_text("one\ntwo\n")
    (root / "d" / "b.json").write_text('{"x": 1, "y": [2]}')
    (root / "d" / "link").symlink_to("../a.txt")
    (root / "out.txt").write_text("b  \na\n\n")


def expected(root: Path, **changes: object) -> dict[str, object]:
    values = {"entries": state.state(str(root)), "optional": ["extra.py"], "compares_modes": False}
    return values | {"output": "out.txt", "is_ordered": True} | changes


def problems(root: Path, wanted: dict[str, object]) -> list[str]:
    return state.problems(json.loads(json.dumps(wanted)), state.state(str(root)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda root: (root / "a.txt").write_text("one\n"), "a.txt: differs"),
        (lambda root: (root / "a.txt").unlink(), "a.txt: missing"),
        (lambda root: (root / "new").write_text(""), "new: should not exist"),
        (lambda root: (root / "out.txt").write_text("a\nb\n"), "out.txt: other output than expected"),
        (lambda root: (root / "d" / "b.json").write_text('{"x": 2, "y": [2]}'), "d/b.json: differs"),
        (lambda root: ((root / "d/link").unlink(), (root / "d/link").write_text("one\ntwo\n")), "d/link: differs"),
        (lambda root: ((root / "a.txt").unlink(), (root / "a.txt").mkdir()), "a.txt: differs"),
    ],
)  # fmt: skip
def test_another_final_state_is_a_problem(change: Callable[[Path], object], problem: str, tmp_path: Path) -> None:
    make(tmp_path / "w")
    wanted = expected(tmp_path / "w")
    assert problems(tmp_path / "w", wanted) == []
    change(tmp_path / "w")
    assert problems(tmp_path / "w", wanted) == [problem]


def test_layout_of_json_and_white_space_of_output_do_not_count(tmp_path: Path) -> None:
    root = tmp_path / "w"
    make(root)
    wanted = expected(root)
    (root / "d" / "b.json").write_text('{\n "y": [2],\n "x": 1}\n')
    (root / "out.txt").write_text("b\na")
    (root / "extra.py").write_text("pass")
    os.utime(root / "a.txt", (0, 0))
    (root / "a.txt").chmod(0o600)
    assert problems(root, wanted) == []
    assert problems(root, wanted | {"compares_modes": True}) == ["a.txt: differs"]
    (root / "out.txt").write_text("a\nb")
    assert problems(root, wanted | {"is_ordered": False}) == []


def test_archives_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    for number, name in enumerate(("first", "second")):
        root = tmp_path / name
        make(root / "w")
        os.utime(root / "w" / "a.txt", (number, number))
        with tarfile.open(root / "x.tar.gz", "w:gz", compresslevel=1 + 8 * number) as archive:
            for member in ["a.txt", "d"][:: 1 - 2 * number]:
                archive.add(root / "w" / member, member if number else f"./{member}")
        (root / "y.gz").write_bytes(gzip.compress(b"text", mtime=number))
    states = [state.state(str(tmp_path / name)) for name in ("first", "second")]
    for path in ("x.tar.gz", "y.gz"):
        assert states[0][path]["packed"] == states[1][path]["packed"]
    (tmp_path / "second" / "y.gz").write_bytes(gzip.compress(b"other"))
    assert state.state(str(tmp_path / "second"))["y.gz"]["packed"] != states[0]["y.gz"]["packed"]


def test_repositories_are_compared_without_hashes_of_commits(tmp_path: Path) -> None:
    found = []
    for number, name in enumerate(("first", "second")):
        root = tmp_path / name
        root.mkdir()
        env = os.environ | {"GIT_AUTHOR_DATE": f"{number + 1}000000000 +0000", "GIT_COMMITTER_DATE": "1000000000 +0000"}
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        (root / "f").write_text("x")
        for command in (["init", "-q", "-b", "main"], ["add", "f"], [*who, "commit", "-qm", "one"]):
            subprocess.run(["git", *command], cwd=root, env=env, check=True)
        found.append(state.state(str(root)))
    assert found[0] == found[1]
    assert found[0][".git"]["log"] == ["one"]
    (tmp_path / "second" / "f").write_text("changed")
    assert state.state(str(tmp_path / "second"))[".git"] != found[0][".git"]


def test_an_output_in_a_repository_is_no_change_of_it(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "f").write_text("x")
    entries = state.state(str(tmp_path)) | {"output.txt": {"kind": "file", "mode": "0644", "text": "f\n"}}
    wanted = {"entries": entries, "optional": [], "output": "output.txt", "compares_modes": False, "is_ordered": True}
    (tmp_path / "output.txt").write_text("f\n")
    assert state.problems(wanted, state.state(str(tmp_path))) == []
    subprocess.run(["git", "add", "f"], cwd=tmp_path, check=True)
    assert state.problems(wanted, state.state(str(tmp_path))) == [".git: differs"]


def test_the_program_prints_a_reward_without_this_package(tmp_path: Path) -> None:
    make(tmp_path / "w")
    (tmp_path / "expected.json").write_text(json.dumps(expected(tmp_path / "w")))
    command = [sys.executable, "-I", state.__file__, "check", str(tmp_path / "expected.json"), str(tmp_path / "w")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"
    (tmp_path / "w" / "a.txt").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "a.txt: missing\n")
