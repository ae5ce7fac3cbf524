"""Images: what archives may do when they are unpacked, names and digests, and the `image` command."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from m2forge import cli
from m2forge.errors import DataError, NotFoundError
from m2forge.records import JsonValue
from m2forge.sandbox import image
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import ImageStore
from m2forge.sandbox.shared_images import SharedImages
from tests.sandbox.places import require, shell


def make_tar(path: Path, members: list[tuple[str, bytes, str, str]]) -> Path:
    """Members by name, type, content and link."""
    with tarfile.open(path, "w") as archive:
        for name, kind, content, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size, info.mode = kind, link, len(content), 0o755
            archive.addfile(info, io.BytesIO(content.encode()))
    return path


def test_layers_with_owners_are_stored_as_they_are(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "x").write_text("x")
    if os.geteuid() == 0:
        os.chown(layer / "x", 77, 78)
    owners = (layer / "x").stat().st_uid, (layer / "x").stat().st_gid
    store = ImageStore(tmp_path / "images")
    stored = store.store_layers("task", [layer], "test")
    assert not layer.exists()
    assert store.has("task")
    assert not store.has("other")
    assert store.digest("task") == stored.digest
    (found,) = store.resolve("task").layers
    assert ((found / "x").stat().st_uid, (found / "x").stat().st_gid) == owners


FILE, LINK, HARD, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("../out", FILE, "x", "")],
        [("a/../../out", FILE, "x", "")],
        [("a", LINK, "", "{outside}"), ("hard", HARD, "", "../secret")],
        [("hard", HARD, "", "{outside}/secret")],
    ],
)
def test_a_hostile_archive_is_refused_whole(tmp_path: Path, members: list[tuple[str, bytes, str, str]]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("untouched")
    filled = [(name, kind, text, link.format(outside=outside)) for name, kind, text, link in members]
    store = ImageStore(tmp_path / "images")
    with pytest.raises(DataError):
        store.build("bad", [str(make_tar(tmp_path / "bad.tar", filled))])
    assert list((tmp_path / "images").rglob("*secret*")) == []
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert list((tmp_path / "images" / "layers").iterdir()) == []
    assert store.images() == []


def test_a_link_is_not_followed_while_unpacking(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    members = [("a", LINK, "", str(outside)), ("a/planted", FILE, "x", "")]
    ImageStore(tmp_path / "images").build("a", [str(make_tar(tmp_path / "a.tar", members))])
    assert list(outside.iterdir()) == []


def test_archive_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MIN_BYTES", 1 << 20)
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("zeros")
        info.size = 50 << 20
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    store = ImageStore(tmp_path / "images")
    with pytest.raises(DataError, match="more than"):
        store.build("bomb", [str(tmp_path / "bomb.tar.gz")])
    monkeypatch.setattr(image, "MAX_ENTRIES", 10)
    many = [(f"f{number}", FILE, "", "") for number in range(20)]
    with pytest.raises(DataError, match="10 files"):
        store.build("many", [str(make_tar(tmp_path / "many.tar", many))])
    (tmp_path / "text.tar").write_text("no archive")
    with pytest.raises(DataError, match="cannot be unpacked"):
        store.build("text", [str(tmp_path / "text.tar")])


def test_a_killed_build_leaves_no_layer(tmp_path: Path) -> None:
    layers = tmp_path / "images" / "layers"
    # The number of a living process says nothing: it may be another one's by now.
    (layers / f".partial-{os.getppid()}-x" / "half").mkdir(parents=True)
    (layers / ".partial-y").mkdir()
    lock = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", lock, str(layers / ".partial-y")]
    (tmp_path / "folder").mkdir()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        built = ImageStore(tmp_path / "images").build("mine", [str(tmp_path / "folder")])
        assert sorted(path.name for path in layers.iterdir()) == [".partial-y", built.digest]
        writer.kill()
    (tmp_path / "folder" / "x").write_text("x")
    other = ImageStore(tmp_path / "images").build("other", [str(tmp_path / "folder")])
    assert {path.name for path in layers.iterdir()} == {built.digest, other.digest}


def test_a_layer_that_is_being_written_stays(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    (tmp_path / "folder").mkdir()
    store.build("mine", [str(tmp_path / "folder")])
    with store._partial() as partial:
        (partial / "half").write_text("x")
        (tmp_path / "folder" / "x").write_text("x")
        store.build("other", [str(tmp_path / "folder")])
        assert (partial / "half").exists()
    assert not partial.exists()


def test_an_image_never_has_a_layer_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ImageStore(tmp_path / "images")
    (tmp_path / "folder").mkdir()
    store.build("first", [str(tmp_path / "folder")])
    add_folder = ImageStore._add_folder

    def add_then_lose(self: ImageStore, folder: Path) -> str:
        digest = add_folder(self, folder)
        self.remove("first")
        return digest

    monkeypatch.setattr(ImageStore, "_add_folder", add_then_lose)
    with pytest.raises(DataError, match="was removed meanwhile; build it again"):
        store.build("second", [str(tmp_path / "folder")])
    assert store.images() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "folder"
    cache.mkdir()
    folder.mkdir()
    (folder / "big").write_bytes(bytes(2 << 20))
    command = f"mount -t tmpfs -o size=1m none {cache} && exec {sys.executable} -m m2forge image build mine {folder}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_names_digests_aliases_and_removal(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("x")
    store = ImageStore(tmp_path / "images")
    built = store.build("python:3.12", [str(folder)])
    assert store.build("again", [str(folder)]).digest == built.digest
    assert store.build("alias", ["python:3.12"]).digests == built.digests
    assert [found.name for found in store.images()] == ["again", "alias", "python:3.12"]
    layer = tmp_path / "images" / "layers" / built.digest
    for name in ("again", "alias", "python:3.12"):
        assert layer.is_dir()
        store.remove(name)
    assert not layer.exists()
    with pytest.raises(NotFoundError, match="there is no 'pithon'"):
        store.resolve("pithon")
    for name in ("", "host", "sha256:1", "/x", "../x"):
        with pytest.raises(DataError):
            store.build(name, [str(folder)])


def test_an_image_in_use_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    store = ImageStore(tmp_path / "images")
    built = store.build("used", [str(folder)])
    assert store.resolve(f"sha256:{built.digest[:12]}").layers == store.resolve("used").layers
    with pytest.raises(DataError, match="in use"):
        store.remove("used")


def test_layers_of_tars_hide_files_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("namespace")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    below = make_tar(
        tmp_path / "a.tar", [("opt/gone", FILE, "1", ""), ("opt/d/old", FILE, "2", ""), ("opt/stays", FILE, "3", "")]
    )
    hidden = [("opt/.wh.gone", FILE, "", ""), ("opt/d/.wh..wh..opq", FILE, "", "")]
    above = make_tar(tmp_path / "b.tar", [*hidden, ("opt/d/new", FILE, "", "")])
    ImageStore().build("stack", [str(below), str(above)])
    config = SandboxConfig(backend="namespace", layers=("stack",))
    assert shell("find /opt -type f | sort", config).stdout.text() == "/opt/d/new\n/opt/stays\n"


def test_the_host_image_shows_no_home_and_no_keys() -> None:
    require("namespace")
    outcome = shell("ls -A /root /home; ls /etc /var; cat /etc/passwd", SandboxConfig(backend="namespace"))
    shown = outcome.stdout.text().split()
    assert not {"shadow", "ssh", "private", "sudoers", "log", "lib", ".ssh", ".cache"} & set(shown)
    assert "root:x:0:0:root:/root:/bin/sh" in shown


def test_the_image_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    assert cli.main(["image", "build", "mine", str(tmp_path / "folder")]) == 0
    assert cli.main(["image", "list"]) == 0
    assert "mine" in capsys.readouterr().out.splitlines()[-1]
    assert cli.main(["image", "rm", "mine"]) == 0
    assert cli.main(["image", "rm", "mine"]) == 2
    assert cli.main(["image", "build", "mine"]) == 2
    (tmp_path / "folder" / "Dockerfile").touch()
    monkeypatch.setenv("PATH", os.devnull)
    assert cli.main(["image", "build", "mine", str(tmp_path / "folder")]) == 2
    assert "install podman" in capsys.readouterr().err


def make_folder(path: Path, text: str) -> str:
    (path / "etc").mkdir(parents=True)
    (path / "etc" / "word").write_text(text)
    (path / "etc" / "link").symlink_to("word")
    if os.geteuid() == 0:
        os.chown(path / "etc" / "word", 77, 78)
    return str(path)


def test_a_shared_name_means_the_same_files_on_all_machines(tmp_path: Path) -> None:
    shared = SharedImages(tmp_path / "shared")
    here, there = (ImageStore(tmp_path / name, shared) for name in ("here", "there"))
    here.build("base", [make_folder(tmp_path / "one", "one")])
    there.build("base", [make_folder(tmp_path / "two", "two")])
    (first,), (second,) = (store.resolve("base").layers for store in (here, there))
    assert (first.parent, second.parent) == (tmp_path / "here" / "layers", tmp_path / "there" / "layers")
    assert first.name == second.name
    words = [layer / "etc" / "word" for layer in (first, second)]
    assert [word.read_text() for word in words] == ["one", "one"]
    assert words[0].stat().st_uid == words[1].stat().st_uid
    assert (second / "etc" / "link").readlink() == Path("word")
    # Alone, the other machine still means its own image, and can remove what it has fetched.
    alone = ImageStore(tmp_path / "there", None)
    assert (alone.resolve("base").layers[0] / "etc" / "word").read_text() == "two"
    (fetched,) = (image.name for image in alone.images() if image.name != "base")
    assert fetched.startswith("base@sha256:")
    assert not there.has("other")


def test_a_name_that_another_machine_built_is_not_built_again(tmp_path: Path) -> None:
    shared = SharedImages(tmp_path / "shared")
    here, there = (ImageStore(tmp_path / name, shared) for name in ("here", "there"))
    layer = tmp_path / "layer"
    make_folder(layer, "built")
    here.store_layers("task-1", [layer], "test")
    assert not there.has("task-1")
    assert here.resolve("task-1").layers[0].is_dir()
    assert there.has("task-1")
    assert (there.resolve("task-1").layers[0] / "etc" / "word").read_text() == "built"


@pytest.mark.parametrize("damage", ["changed", "cut"])
def test_a_damaged_shared_layer_is_refused_whole(tmp_path: Path, damage: str) -> None:
    shared = SharedImages(tmp_path / "shared")
    here, there = (ImageStore(tmp_path / name, shared) for name in ("here", "there"))
    here.build("base", [make_folder(tmp_path / "one", "one")])
    here.resolve("base")
    (path,) = (tmp_path / "shared" / "layers").iterdir()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"one", b"two") if damage == "changed" else data[:-40])
    with pytest.raises(DataError, match="not those of its digest" if damage == "changed" else "broke off"):
        there.resolve("base")
    assert not list((tmp_path / "there" / "layers").iterdir())


def test_the_first_of_two_machines_decides(tmp_path: Path) -> None:
    shared = SharedImages(tmp_path / "shared")
    for name in ("one", "two"):
        store = ImageStore(tmp_path / name / "images", None)
        store.build("base", [make_folder(tmp_path / name / "files", name)])
        record: dict[str, JsonValue] = {
            "layers": [store.find("base").digest],
            "source": name,
            "created_s": 0.0,
            "env": {},
        }
        shared.put("base", record, store.resolve("base").layers, image.id_base())
    assert shared.names == ["base"]
    assert (shared.read("base") or {})["source"] == "one"
