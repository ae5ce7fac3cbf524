"""Candidates: patches, licences, what changed, and what was written about it."""

import subprocess
from pathlib import Path

import pytest

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.candidate import Candidate, make_candidate, permissive
from m2forge.pipelines.swe.toolchains.python import Python
from m2forge.pipelines.swe.tree import Release, pack_tree, unpack_tree
from m2forge.tasks.folders.folder import FileKind, FolderFile, write_folder
from tests.pipelines.swe import projects


def test_both_patches_turn_the_old_tree_into_the_new(tmp_path: Path) -> None:
    latin = b"caf\xe9\n"
    old, new = projects.release(projects.OLD), projects.release(projects.NEW, "1.1")
    old = Release({**old.tree, "tests/data.txt": FolderFile(latin), "gone.py": FolderFile(b"x = 1\n")})
    new = Release({**new.tree, "tests/data.txt": FolderFile(latin * 2), "run.py": FolderFile(b"", FileKind.EXECUTABLE)})
    found = make_candidate("a", "sums", old, new, {})
    assert isinstance(found, Candidate)
    write_folder(tmp_path / "tree", found.base)
    for patch in (found.patch, found.test_patch):
        subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path / "tree", check=True)
    assert (tmp_path / "tree" / "sums.py").read_text() == projects.FIXED
    assert (tmp_path / "tree" / "tests" / "data.txt").read_bytes() == latin * 2
    assert not (tmp_path / "tree" / "gone.py").exists()
    assert "test_sums" not in found.patch
    assert "sums.py" not in found.test_patch.replace("test_sums.py", "")


def test_a_candidate_survives_json_and_its_base_a_tar() -> None:
    found = projects.candidate()
    base = unpack_tree(pack_tree(found.base))
    assert base == found.base
    assert Candidate.from_dict(found.to_dict(), base) == found
    assert pack_tree(found.base) == pack_tree(dict(reversed(list(found.base.items()))))


def test_the_same_tree_is_the_same_commit() -> None:
    others = projects.candidate(projects.FIXED + "\n# More.\n")
    assert projects.candidate().base_commit == others.base_commit


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("src/a.py", "source"),
        ("tests/test_a.py", "test runnable"),
        ("pkg/tests/data.json", "test"),
        ("test.py", "test runnable"),
        ("testing/helpers.py", "test"),
        ("numpy/testing/a.py", "source"),
        ("conftest.py", "test"),
        ("docs/conf.py", ""),
        ("lib/a.test.js", "test"),
        ("README.md", ""),
    ],
)
def test_paths_are_source_or_tests(path: str, kinds: str) -> None:
    python, tree = Python(), projects.release({path: ""}).tree
    found = {
        "source": python.is_source(path),
        "test": python.is_test(path),
        "runnable": python.targets(tree) == (path,),
    }
    assert " ".join(kind for kind, holds in found.items() if holds) == kinds


@pytest.mark.parametrize(
    ("metadata", "files", "is_allowed"),
    [
        ("License-Expression: MIT\n", {}, True),
        ("License-Expression: BSD-3-Clause OR GPL-2.0-only\n", {}, True),
        ("License: MPL 2.0\n", {}, False),
        ("License: LGPL-3.0-or-newer\n", {}, False),
        ("Classifier: License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)\n", {}, False),
        ("License: MIT\n", {"LICENSE": "GNU GENERAL PUBLIC LICENSE\nVersion 3\n"}, False),
        ("", {"LICENSE": projects.LICENCE}, True),
        ("", {"Cargo.toml": '[package]\nlicense = "MIT/Apache-2.0"\n'}, True),
        ("", {"Cargo.toml": '[package]\nlicense = "GPL-3.0-only"\n', "LICENSE": projects.LICENCE}, False),
        ("", {"package.json": '{"license": "ISC"}'}, True),
        ("", {"package.json": "[]", "Cargo.toml": "["}, False),
        ("", {"LICENSE": "All rights reserved.\n"}, False),
        ("", {}, False),
    ],
)
def test_only_permissive_licences_pass(metadata: str, files: dict[str, str], is_allowed: bool) -> None:
    found = permissive(Release(projects.release(files).tree, metadata))
    assert isinstance(found, str) is is_allowed
    if isinstance(found, Rejection):
        assert found.reason == "licence"


def test_a_change_needs_source_and_tests_or_tests_alone() -> None:
    def change(**changes: str) -> Candidate | Rejection:
        new = {**projects.OLD, **changes}
        return make_candidate("a", "sums", projects.release(projects.OLD), projects.release(new), {})

    for changes, reason in (({"sums.py": projects.FIXED}, "tests unchanged"), ({"README": "a"}, "source unchanged")):
        found = change(**changes)
        assert isinstance(found, Rejection)
        assert found.reason == reason
    alone = change(**{"tests/test_sums.py": projects.NEW_TESTS})
    assert isinstance(alone, Candidate)
    assert alone.patch == ""


def test_the_changelog_gives_the_part_of_the_new_version() -> None:
    (text,) = projects.candidate().texts
    assert text.kind == "changelog"
    assert text.text == "# 1.1\n\nFix `total`, which left out the first number (#12)."
