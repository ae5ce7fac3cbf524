"""Readers of candidates: archives, clones, dumps of pull requests, Debian sources."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from m2forge.errors import DataError, NotFoundError
from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe import source
from m2forge.pipelines.swe.candidate import Candidate
from m2forge.pipelines.swe.source import (
    Clone,
    debian_candidate,
    named_release,
    pull_request_candidate,
    read_archive,
    read_pull_requests,
    read_release,
    sdist_candidate,
)
from tests.pipelines.swe import projects


def write_tar(path: Path, files: dict[str, str], top: str = "sums-1.0") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo(f"{top}/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return path


def test_a_folder_is_read_as_its_archive_is(tmp_path: Path) -> None:
    folder = tmp_path / "sums-1.0"
    for name, text in {**projects.OLD, ".git/config": "", "x.egg-info/PKG-INFO": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "link.py").symlink_to("/etc/passwd")
    archive = write_tar(tmp_path / "sums-1.0.tar.gz", projects.OLD)
    assert read_release(folder).tree == read_release(archive).tree


def test_names_of_archives_have_package_and_version() -> None:
    names = ("sums-1.0.tar.gz", "go-sums_1.0+ds.orig.tar.xz", "sums-1.0", "sums")
    found = [named_release(Path(name)) for name in names]
    assert found == [("sums", "1.0"), ("go-sums", "1.0-ds"), ("sums", "1.0"), ("sums", "0")]


def test_an_sdist_is_read_without_metadata_and_links(tmp_path: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: sums\nVersion: 1.0\nLicense: MIT\n"
    extra = {"PKG-INFO": metadata, "sums.egg-info/PKG-INFO": metadata, ".v/site-packages/x.py": "", "../up.py": ""}
    release = read_archive(write_tar(tmp_path / "sums-1.0.tar.gz", {**projects.OLD, **extra}))
    assert set(release.tree) == set(projects.OLD)
    assert (release.metadata, release.name) == (metadata, "1.0")


def test_a_broken_archive_or_a_bomb_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_tar(tmp_path / "a.tar.gz", projects.OLD)
    (tmp_path / "cut.tar.gz").write_bytes(whole.read_bytes()[:200])
    with pytest.raises(DataError, match=r"cut.tar.gz: cannot be unpacked"):
        read_archive(tmp_path / "cut.tar.gz")
    monkeypatch.setattr(source, "MAX_TREE_BYTES", 100)
    monkeypatch.setattr(source, "MAX_TREE_FILES", 1)
    with pytest.raises(DataError, match="unpacks to over"):
        read_archive(whole)


def test_a_pair_of_cached_sdists_becomes_a_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "m2forge" / "swe" / "sdists"
    folder.mkdir(parents=True)
    write_tar(folder / "my-sums-1.0.tar.gz", projects.OLD)
    write_tar(folder / "my-sums-1.1.tar.gz", projects.NEW)
    found = sdist_candidate("My_Sums", "1.0", "1.1")
    assert isinstance(found, Candidate)
    assert (found.id, found.package, found.origin["kind"]) == ("my-sums-1.1", "my-sums", "sdist")


def test_commits_become_candidates_with_their_message(tmp_path: Path) -> None:
    states = (("first", projects.OLD), ("Fix the total", {"sums.py": projects.FIXED}), ("Test it", projects.NEW))
    projects.write_history(tmp_path / "clone", *states)
    clone = Clone(tmp_path / "clone", "sums")
    commits = clone.commits(10)
    reasons = [found.reason for commit in commits if isinstance(found := clone.candidate(commit), Rejection)]
    assert reasons == ["tests unchanged", "no parent"]
    # Two adjacent commits together have both.
    (newest, base), _ = clone.merged(commits, 2)
    merged = clone.candidate(newest, base)
    assert isinstance(merged, Candidate)
    assert [text.text for text in merged.texts if text.kind == "commit"] == ["Test it\n\nFix the total"]


def test_a_dump_of_pull_requests_goes_on_after_a_bad_line(tmp_path: Path) -> None:
    projects.write_history(tmp_path / "clone", ("first", projects.OLD), ("Fix", projects.NEW))
    clone = Clone(tmp_path / "clone", "sums")
    new, old = clone.commits(2)
    good = f'{{"base_commit": "{old}", "merge_commit": "{new}", "title": "Fix", "issues": [{{"title": "Wrong sum"}}]}}'
    lost = good.replace(new, "0" * 40)
    (tmp_path / "dump.jsonl").write_text(f'{good}\n[1]\n{{"title": "a"}}\n{lost}\n{good[:40]}')
    records = [record for _, record in read_pull_requests(tmp_path / "dump.jsonl")]
    found = [one if isinstance(one, Rejection) else pull_request_candidate(clone, one) for one in records]
    reasons = [one.reason for one in found if isinstance(one, Rejection)]
    assert reasons == ["invalid record", "invalid record", "no parent", "invalid record"]
    assert isinstance(found[0], Candidate)
    assert [(text.kind, text.text) for text in found[0].texts[:2]] == [("issue", "Wrong sum"), ("pull request", "Fix")]


def github(number: int, commit: str, **changes: object) -> dict[str, object]:
    """The fields of GitHub's REST record of a pull request that count, and one of many that do not."""
    base = {"sha": "0" * 40, "ref": "main", "repo": {"full_name": "ada/sums"}}
    merged = {"merged_at": "2026-01-01T00:00:00Z", "merge_commit_sha": commit, "state": "closed"}
    text = {"title": "Fix the total", "body": "Fixes #3, closes other/sums#4, see #5.\r\nResolves ada/sums#6"}
    return {"number": number, "base": base, "user": {"login": "ada"}, **merged, **text, **changes}


ISSUES = [{"number": n, "title": f"Issue {n}", "body": None} for n in (3, 4, 5)] + [
    {"number": 6, "title": "A pull request", "pull_request": {}}
]


@pytest.mark.parametrize("form", ["lines", "array", "pages"])
def test_records_of_github_become_candidates(form: str, tmp_path: Path) -> None:
    projects.write_history(tmp_path / "clone", ("first", projects.OLD), ("Fix", projects.NEW))
    clone = Clone(tmp_path / "clone", "sums")
    new, old = clone.commits(2)
    # The base was at another commit, which the clone lacks, when the branch began.
    records = [github(1, new), github(2, new, merged_at=None, state="open"), github(7, "main")]
    text = {
        "lines": "\n".join(map(json.dumps, records)),
        "array": json.dumps(records, indent=1),
        "pages": json.dumps(records[:1]) + json.dumps(records[1:]) + "[]",
    }[form]
    (tmp_path / "pulls").write_text(text)
    (tmp_path / "issues").write_text(json.dumps(ISSUES))
    read = [record for _, record in read_pull_requests(tmp_path / "pulls", tmp_path / "issues")]
    assert [one.reason for one in read if isinstance(one, Rejection)] == ["not merged", "invalid record"]
    assert not isinstance(read[0], Rejection)
    found = pull_request_candidate(clone, read[0])
    assert isinstance(found, Candidate)
    assert (found.origin["old"], found.origin["new"]) == (old, new)
    assert [text.text for text in found.texts if text.kind == "issue"] == ["Issue 3"]
    (alone,) = [text for text in found.texts if text.kind == "pull request"]
    assert alone.text.startswith("Fix the total\n\nFixes #3")


@pytest.mark.parametrize(
    "text", ['[{"a": 1}, {"b"', '[{"a": 1} {}]', '[{"a": 1}', '[{"a": 1}, 7', '[{"a": 1}]x', "[[[["]
)
def test_a_damaged_array_ends_with_one_rejection(text: str, tmp_path: Path) -> None:
    (tmp_path / "pulls").write_text(text)
    found = [record for _, record in read_pull_requests(tmp_path / "pulls")]
    assert all(isinstance(one, Rejection) and one.reason == "invalid record" for one in found)
    assert 1 <= len(found) <= 3


def test_a_file_without_issues_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "issues").write_text('[{"title": "no number"}]')
    with pytest.raises(DataError, match="record 1 is no issue of GitHub: no number"):
        list(read_pull_requests(tmp_path / "pulls", tmp_path / "issues"))


def test_debian_sources_are_read_by_their_dsc(tmp_path: Path) -> None:
    for version, files in (("1.0", projects.OLD), ("1.1", projects.NEW)):
        name = f"sums_{version}.orig.tar.gz"
        write_tar(tmp_path / name, files)
        (tmp_path / f"sums_{version}-1.dsc").write_text(f"Source: sums\nFiles:\n {'a' * 32} 100 {name}\n")
    found = debian_candidate(tmp_path / "sums_1.0-1.dsc", tmp_path / "sums_1.1-1.dsc")
    assert isinstance(found, Candidate)
    assert (found.package, found.origin["new"]) == ("sums", "1.1-1")
    with pytest.raises(NotFoundError, match=r"none.dsc: expected"):
        debian_candidate(tmp_path / "none.dsc", tmp_path / "none.dsc")
