"""Bad input through `m2forge pipeline`: one message and status 2, or the item is decided on and the rest goes on."""

import gzip
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from m2forge.cli import main
from m2forge.pipelines.stage import Context
from m2forge.pipelines.swe import pipeline, source
from m2forge.pipelines.swe.toolchains import python
from m2forge.pipelines.swe.toolchains.toolchain import Environment, TestRun, Toolchain
from m2forge.pipelines.terminal import posts as posts_module
from m2forge.pipelines.terminal.posts import EgSource, InterCodeSource
from m2forge.tasks.folders.task_image import TaskImage
from tests.pipelines.endpoint import completion, serving
from tests.pipelines.swe import projects
from tests.pipelines.terminal.test_pipeline import SAMPLE

TOP = "sums-1.1"


class NoTests:
    """Stands for sandboxes, in which no test ever runs: a sound candidate is rejected for that, and no earlier."""

    async def version(self, toolchain: Toolchain) -> str:
        return "3.12"

    async def image(self, candidate: object, made: Environment) -> TaskImage:
        return TaskImage("host")

    async def run(
        self, toolchain: Toolchain, image: TaskImage, patches: Sequence[str], targets: Sequence[str]
    ) -> TestRun:
        return TestRun(problem="no report", output="no tests here")


@pytest.fixture(autouse=True)
def _no_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(python, "resolve", lambda requirements, version: ())
    monkeypatch.setattr(pipeline, "Runner", lambda *_: NoTests())


def run(folder: Path, text: str) -> int:
    (folder / "run.toml").write_text(f'name = "r"\nworkers = 2\n{text}')
    return main(["pipeline", str(folder / "run.toml"), "--runs", str(folder / "runs")])


def reasons(folder: Path, state: str) -> dict[str, dict[str, int]]:
    """Rejected or failed items by stage and reason."""
    stages = json.loads((folder / "runs" / "r" / "yields.json").read_text())["stages"]
    return {one["name"]: one[state] for one in stages if one[state]}


def refused(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message with which a configuration ends."""
    assert run(folder, text) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert all(line.startswith(("posts ", "eg ", "intercode ")) for line in progress), progress
    assert error.startswith("m2forge: error: ")
    return error


# -- archives ----------------------------------------------------------------------------------------------------------


def tarred(members: Mapping[str, str | tarfile.TarInfo], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            member = tarfile.TarInfo(f"{TOP}/{name}")
            member.size = len(content.encode())
            tar.addfile(member, io.BytesIO(content.encode()))
    return buffer.getvalue()


def zipped(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{TOP}/{name}", content)
    return buffer.getvalue()


def damaged(data: bytes) -> bytes:
    """The same size, with other bytes in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0x5A for byte in data[middle : middle + 40]) + data[middle + 40 :]


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(f"{TOP}/{name}")
    member.type, member.linkname = kind, target
    return member


def big_header() -> bytes:
    """A tar whose header of extended attributes unpacks to 12 MiB."""
    member = tarfile.TarInfo(f"{TOP}/sums.py")
    member.pax_headers = {"comment": "a" * (12 << 20)}
    return tarred({"sums.py": member})


GOOD = tarred(projects.NEW)
OUTSIDE = Path(tempfile.gettempdir()) / f"m2forge-outside-{os.getpid()}.py"
LINKS = {
    "a": link("a", "/etc/passwd", tarfile.SYMTYPE),
    "b": link("b", "../../etc/passwd", tarfile.LNKTYPE),
    "c": link("c", "", tarfile.CHRTYPE),
    "d": link("d", "", tarfile.FIFOTYPE),
}
READ = "no test parsed"
"""Reason of a later stage: the candidate itself was read without fault."""
ARCHIVES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "sound": (".tar.gz", lambda: GOOD, READ),
    "empty file": (".tar.gz", lambda: b"", "cannot be read"),
    "no archive": (".tar.gz", lambda: b"<html>Not found</html>" * 100, "cannot be read"),
    "cut": (".tar.gz", lambda: GOOD[: len(GOOD) // 2], "cannot be read"),
    "damaged": (".tar.gz", lambda: damaged(GOOD), "cannot be read"),
    "damaged bzip2": (".tar.bz2", lambda: damaged(tarred(projects.NEW, "w:bz2")), "cannot be read"),
    "damaged zip": (".zip", lambda: damaged(zipped({**projects.NEW, "x": "abc" * 9999})), "cannot be read"),
    "cut zip": (".zip", lambda: zipped(projects.NEW)[:300], "cannot be read"),
    "without files": (".tar.gz", lambda: tarred({}), "cannot be read"),
    "too many bytes": (".tar.gz", lambda: tarred({"zeros": "0" * (9 << 20)}), "cannot be read"),
    "too many bytes in a zip": (".zip", lambda: zipped({"zeros": "0" * (9 << 20)}), "cannot be read"),
    "too many bytes in a header": (".tar.gz", big_header, "cannot be read"),
    "too many files": (".tar.gz", lambda: tarred({f"f{n}": "" for n in range(600)}), "cannot be read"),
    "too many links": (
        ".tar.gz",
        lambda: tarred({f"{n}": link(f"{n}", "x", tarfile.SYMTYPE) for n in range(600)}),
        "cannot be read",
    ),
    "paths to the outside": (
        ".tar.gz",
        lambda: tarred({**projects.NEW, str(OUTSIDE): "", f"../../../..{OUTSIDE}": ""}),
        READ,
    ),
    "links and devices": (".tar.gz", lambda: tarred({**projects.NEW, **LINKS}), READ),
    "file and folder of one name": (".tar.gz", lambda: tarred({**projects.NEW, "sums.py/x": ""}), "cannot be read"),
    "name too long": (".tar.gz", lambda: tarred({**projects.NEW, "a" * 300: ""}), "cannot be read"),
    "name that is no UTF-8": (".tar.gz", lambda: tarred({**projects.NEW, "a\udcff.py": "x"}), "cannot be read"),
}


@contextmanager
def index(folder: Path) -> Iterator[str]:
    """A package index of the files of a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """The default writes to standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_bad_archives_are_rejected_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_TREE_BYTES", 8 << 20)
    monkeypatch.setattr(source, "MAX_TREE_FILES", 500)
    pairs, wanted = [], dict[str, str]()
    for place, (ending, make, reason) in enumerate(ARCHIVES.values()):
        name = f"sums{place}"
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}-1.0.tar.gz").write_bytes(tarred(projects.OLD))
        (tmp_path / name / f"{name}-1.1{ending}").write_bytes(make())
        pairs.append(f"{name} 1.0 1.1")
        wanted[f"{name}-1.1"] = reason
    # Not in the index; of another digest.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<a href="other-1.0.tar.gz#sha256=00">x</a>')
    (tmp_path / "other" / "other-1.0.tar.gz").write_bytes(GOOD)
    pairs += ["nowhere 1.0 1.1", "other 1.0 1.1"]
    wanted |= {"nowhere-1.1": "cannot be read", "other-1.1": "cannot be read"}
    with index(tmp_path) as url:
        assert run(tmp_path, f'[swe]\nindex = "{url}"\nsdists = {json.dumps(pairs)}\n') == 0
    assert reasons(tmp_path, "failed") == {}
    found = decided(tmp_path)
    names = {f"sums{place}-1.1": name for place, name in enumerate(ARCHIVES)}
    assert {names.get(id, id): found[id] for id in wanted} == {names.get(id, id): wanted[id] for id in wanted}
    assert not OUTSIDE.exists()


def decided(folder: Path) -> dict[str, str]:
    """Why each item was rejected, by id."""
    rows = sqlite3.connect(folder / "runs" / "r" / "pipeline.db").execute(
        "SELECT id, reason FROM outcome WHERE state = 'rejected'"
    )
    return dict(rows)


# -- repositories ------------------------------------------------------------------------------------------------------


def repository(path: Path) -> str:
    return f'[[swe.repositories]]\npath = "{path}"\npackage = "sums"\n'


WITHOUT_TESTS = {path: text for path, text in projects.OLD.items() if not path.startswith("tests/")}
CHANGED = {**WITHOUT_TESTS, "sums.py": projects.FIXED}


@pytest.mark.parametrize(
    ("states", "rejected"),
    [
        ([("Begin", projects.OLD)], {"no parent": 1}),
        ([("Begin", WITHOUT_TESTS), ("Change", CHANGED)], {"no parent": 1, "tests unchanged": 1}),
        ([("Begin", projects.OLD), ("a" * 3000, projects.NEW)], {"no parent": 1}),
    ],
)
def test_commits_that_are_no_candidates_are_rejected(
    states: list[tuple[str, dict[str, str]]], rejected: dict[str, int], tmp_path: Path
) -> None:
    projects.write_history(tmp_path / "clone", *states)
    assert run(tmp_path, repository(tmp_path / "clone")) == 0
    assert reasons(tmp_path, "rejected")["candidate"] == rejected
    assert reasons(tmp_path, "failed") == {}


def make_empty(path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(path)], check=True)


def make_broken(path: Path) -> None:
    projects.write_history(path, ("Begin", projects.OLD))
    shutil.rmtree(path / ".git" / "objects")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "clone: expected a git clone"),
        (lambda path: path.mkdir(), "clone: expected a git clone"),
        (lambda path: path.write_bytes(b"x"), "clone: expected a git clone"),
        (make_empty, "clone: git rev-list: "),
        (make_broken, "clone: git rev-list: "),
    ],
)
def test_a_path_that_is_no_repository_is_one_message(
    make: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "clone")
    assert message in refused(tmp_path, repository(tmp_path / "clone"), capsys)
    assert not (tmp_path / "runs" / "r" / "pipeline.db").exists()


def test_input_without_permission_is_one_message(tmp_path: Path) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may read everything, and setpriv, which takes that from it, is not there")
    limits = ["--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    start = ["setpriv", *limits] if os.geteuid() == 0 else []
    projects.write_history(tmp_path / "clone", ("Begin", projects.OLD))
    (tmp_path / "Posts.xml").write_bytes(b"<posts/>")
    for path in (tmp_path / "clone", tmp_path / "Posts.xml"):
        path.chmod(0)
    for name, text in (("clone", repository(tmp_path / "clone")), ("Posts.xml", posts(tmp_path / "Posts.xml"))):
        (tmp_path / "run.toml").write_text(f'name = "{name}"\n{text}')
        runs = str(tmp_path / "runs")
        command = [sys.executable, "-m", "m2forge", "pipeline", str(tmp_path / "run.toml"), "--runs", runs]
        done = subprocess.run([*start, *command], capture_output=True, text=True)
        assert done.returncode == 2
        line = done.stderr.splitlines()[-1]
        assert line.startswith("m2forge: error: ")
        assert name in line
        assert "ermission denied" in line
    (tmp_path / "clone").chmod(0o755)


# -- dumps -------------------------------------------------------------------------------------------------------------


def posts(path: Path) -> str:
    # The score rejects every question before it is built.
    return f'[terminal]\nposts = "{path}"\nmin_score = 1000\n'


WHOLE = SAMPLE.read_bytes()


@pytest.mark.parametrize(
    ("name", "data", "is_some"),
    [
        ("Posts.xml", WHOLE[: len(WHOLE) // 2], True),
        ("Posts.xml", WHOLE[: len(WHOLE) // 2] + b"\0\xff<row " + WHOLE[len(WHOLE) // 2 :], True),
        ("Posts.xml.gz", gzip.compress(WHOLE)[:12_000], True),
        ("Posts.xml.bz2", b"BZh9" + WHOLE, False),
        ("Posts.xml", b"<html><body>Not found</body>", False),
        ("Posts.xml", b"", False),
    ],
)
def test_a_damaged_dump_is_used_up_to_the_damage(
    name: str, data: bytes, is_some: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(data)
    assert run(tmp_path, posts(tmp_path / name)) == 0
    assert ("posts" in reasons(tmp_path, "rejected")) == is_some
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{name}: cut or damaged" in warning


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("Posts.xml", None, "no such file"),
        ("Posts.7z", b"7z", "7z archives are not read"),
        ("Posts.xml", b'<!DOCTYPE a [<!ENTITY b "c">]><posts/>', "it defines entities of its own"),
    ],
)
def test_a_dump_that_is_none_is_one_message(
    name: str, data: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    assert message in refused(tmp_path, posts(tmp_path / name), capsys)


@pytest.mark.parametrize(
    ("num_merged", "rejected"), [(1, {"tests unchanged": 1, "no parent": 1}), (2, {"no parent": 1})]
)
def test_adjacent_commits_are_merged(num_merged: int, rejected: dict[str, int], tmp_path: Path) -> None:
    states = [("Begin", projects.OLD), ("Fix", {"sums.py": projects.FIXED}), ("Test", projects.NEW)]
    projects.write_history(tmp_path / "clone", *states)
    assert run(tmp_path, f"{repository(tmp_path / 'clone')}num_merged = {num_merged}\n") == 0
    assert reasons(tmp_path, "rejected")["candidate"] == rejected
    # The commit that changes tests alone, or both together.
    assert reasons(tmp_path, "rejected")["build"] == {READ: 1}


# -- packages ----------------------------------------------------------------------------------------------------------

EG = tarred(
    {"examples/cut.md": "# cut\n\nshow the first field\n\n    cut -f1 a.txt\n\n" + "\n".join(map(str, range(3000)))}
)
QUERIES = {
    "bash_queries.json": json.dumps([{"query": f"Count the files {n}", "gold": "ls | wc -l"} for n in range(99)])
}


def flagged(data: bytes, offset: int, value: int) -> bytes:
    """A zip with another value of two bytes in its headers, by their offset in those of the files."""
    for head, at in ((b"PK\3\4", offset), (b"PK\1\2", offset + 2)):
        place = data.index(head) + at
        data = data[:place] + value.to_bytes(2, "little") + data[place + 2 :]
    return data


PACKAGES: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "cut": ("eg", "eg.tar.gz", lambda: EG[: len(EG) // 2]),
    "damaged": ("eg", "eg.tar.gz", lambda: damaged(EG)),
    "bomb": ("eg", "eg.tar.gz", lambda: tarred({"examples/zeros.md": "0" * (9 << 20)})),
    "bomb of other files": ("eg", "eg.tar.gz", lambda: tarred({"zeros": "0" * (9 << 20)})),
    "bomb in a header": ("eg", "eg.tar.gz", big_header),
    "not UTF-8": ("eg", "cut.md", lambda: b"# cut\n\n\xff\n\n    cut\n"),
    "cut wheel": ("intercode", "a.whl", lambda: zipped(QUERIES)[:200]),
    "damaged wheel": ("intercode", "a.whl", lambda: damaged(zipped(QUERIES))),
    "bomb in a wheel": ("intercode", "a.whl", lambda: zipped({**QUERIES, "zeros": "0" * (9 << 20)})),
    "password": ("intercode", "a.whl", lambda: flagged(zipped(QUERIES), 6, 1)),
    "compression": ("intercode", "a.whl", lambda: flagged(zipped(QUERIES), 8, 99)),
    "nested": ("intercode", "a.whl", lambda: zipped({"bash_queries.json": "[" * 100_000})),
    "no queries": ("intercode", "a.whl", lambda: zipped({"README": ""})),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_damaged_package_is_one_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(posts_module, "MAX_PACKAGE_BYTES", 8 << 20)
    monkeypatch.setattr(posts_module, "MAX_PACKAGE_FILES", 100)
    key, file, make = PACKAGES[name]
    (tmp_path / file).write_bytes(make())
    assert str(tmp_path / file) in refused(tmp_path, f'[terminal]\n{key} = "{tmp_path}/{file}"\n', capsys)


def test_sound_packages_of_that_form_are_read(tmp_path: Path) -> None:
    (tmp_path / "eg.tar.gz").write_bytes(EG)
    (tmp_path / "a.whl").write_bytes(zipped(QUERIES))
    for key, source_class, file in (("eg", EgSource, "eg.tar.gz"), ("intercode", InterCodeSource, "a.whl")):
        items = list(source_class(tmp_path / file).read(cast("Context", None)))
        assert len(items) == {"eg": 1, "intercode": 99}[key]


def test_lines_of_a_dump_of_pull_requests_are_rejected_alone(tmp_path: Path) -> None:
    projects.write_history(tmp_path / "clone", ("Begin", projects.OLD), ("Change", projects.NEW))
    git = ["git", "-C", str(tmp_path / "clone"), "rev-list", "HEAD"]
    new, old = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split()
    lines = [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"{}", b'{"base_commit": "HEAD", "merge_commit": "--all"}']
    lines.append(json.dumps({"base_commit": "1" * 40, "merge_commit": "2" * 40}).encode())
    lines.append(json.dumps({"base_commit": old, "merge_commit": new, "issues": [7], "title": 3}).encode())
    lines.append(b'{"base_commit": "' + old.encode())
    (tmp_path / "pulls.jsonl").write_bytes(b"\n".join(lines))
    text = f'{repository(tmp_path / "clone")}pull_requests = "{tmp_path}/pulls.jsonl"\n'
    assert run(tmp_path, text) == 0
    assert reasons(tmp_path, "failed") == {}
    found = reasons(tmp_path, "rejected")
    assert found["source"] == {"invalid record": 7}
    assert list(found["candidate"].values()) == [1]
    assert found["build"] == {READ: 1}


def test_damaged_debian_sources_are_rejected(tmp_path: Path) -> None:
    for version, data in (("1.0", GOOD), ("1.1", GOOD[:300])):
        (tmp_path / f"sums_{version}.orig.tar.gz").write_bytes(data)
        (tmp_path / f"sums_{version}-1.dsc").write_text(f"Files:\n {'0' * 32} 1 sums_{version}.orig.tar.gz\n")
    (tmp_path / "none_1.dsc").write_text("Files:\n")
    (tmp_path / "gone_1.dsc").write_text(f"Files:\n {'0' * 32} 1 ../../gone_1.orig.tar.gz\n")
    olds = ("sums_1.0-1.dsc", "none_1.dsc", "gone_1.dsc")
    pairs = [[str(tmp_path / name), str(tmp_path / "sums_1.1-1.dsc")] for name in olds]
    assert run(tmp_path, f"[swe]\ndebian = {json.dumps(pairs)}\n") == 0
    assert reasons(tmp_path, "rejected") == {"candidate": {"cannot be read": 3}}
    assert reasons(tmp_path, "failed") == {}


# -- endpoints ---------------------------------------------------------------------------------------------------------


def hang(body: dict[str, Any], number: int) -> tuple[int, bytes]:
    time.sleep(1.0)
    return completion("{}")


@pytest.mark.parametrize(
    ("respond", "state", "reason"),
    [
        (lambda body, number: (200, b"<html>Welcome</html>"), "failed", "no chat completion"),
        (lambda body, number: (200, b""), "failed", "no chat completion"),
        (lambda body, number: (200, b'{"choices": [{"message": 3}]}'), "failed", "no chat completion"),
        (lambda body, number: (200, b"[" * 100_000), "failed", "no chat completion"),
        (lambda body, number: (500, b"<html>"), "failed", "status 500"),
        (lambda body, number: (404, b"no such model"), "failed", "status 404"),
        (hang, "failed", "endpoint unreachable"),
        (lambda body, number: completion("I cannot help with that."), "rejected", "build"),
        (lambda body, number: completion("{" * 5000), "rejected", "build"),
    ],
)
def test_garbage_of_an_endpoint_decides_on_its_item_alone(
    respond: Any, state: str, reason: str, tmp_path: Path
) -> None:
    states = [("Begin", projects.OLD), ("Say more", {"README.md": "Sums.\n"}), ("Change", projects.NEW)]
    projects.write_history(tmp_path / "clone", *states)
    timeout_s = 0.3 if respond is hang else 60
    with serving(respond) as endpoint:
        model = f'url = "{endpoint.url}"\nmodel = "m"\nmax_retries = 1\nretry_s = 0.01\ntimeout_s = {timeout_s}\n'
        text = f'[models.m]\n{model}[swe.build_model]\nmodel = "m"\nmax_rounds = 2\n{repository(tmp_path / "clone")}'
        assert run(tmp_path, text) == 0
    found = reasons(tmp_path, state)
    assert [value for name, value in found.items() if name.startswith("repair")] == [{reason: 1}]
    assert reasons(tmp_path, "rejected")["candidate"] == {"no parent": 1, "source unchanged": 1}
