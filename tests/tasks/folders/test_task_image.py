"""Dockerfiles: what a sandbox can build itself, and what is refused by name."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge.cli import main
from m2forge.errors import DataError
from m2forge.protocols import Command, Sandbox
from m2forge.sandbox.channel import program
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import ImageStore
from m2forge.sandbox.namespace import run_folder
from m2forge.tasks.folders import task_image as module
from m2forge.tasks.folders.task_image import Copy, NeedsRuntimeError, Run, TaskImage, read_dockerfile, task_image
from tests.sandbox.places import require, use
from tests.tasks.folders.scene import new_folder

TEXT = """# syntax=docker/dockerfile:1
ARG TAG=3.12
FROM python:${TAG}-slim
ENV A=1 B="two words"
ENV C three
WORKDIR /srv
WORKDIR app
COPY --chown=1000:1000 a.py b/ ./
COPY ["with space", "/x y"]
USER 1000
RUN echo "$A" && \\
    # a comment inside
    echo $B
RUN ["echo", "x"]
CMD ["python"]
"""


def write(folder: Path, text: str) -> Path:
    (folder / "Dockerfile").write_text(text)
    return folder / "Dockerfile"


def test_a_dockerfile_is_read(tmp_path: Path) -> None:
    found = read_dockerfile(write(tmp_path, TEXT))
    assert (found.base, found.workdir, found.user) == ("python:3.12-slim", "/srv/app", "1000")
    assert found.env == {"A": "1", "B": "two words", "C": "three"}
    copies = [step for step in found.steps if isinstance(step, Copy)]
    assert copies == [
        Copy(("a.py", "b/"), "/srv/app/", "1000:1000"),
        Copy(("with space",), "/x y", None),
    ]
    runs = [step for step in found.steps if isinstance(step, Run)]
    assert [run.argv for run in runs] == [("/bin/sh", "-c", 'echo "$A" && echo $B'), ("echo", "x")]
    assert (runs[0].workdir, runs[0].user) == ("/srv/app", "1000")


@pytest.mark.parametrize(
    "line",
    ["FROM other", "COPY --from=x a b", "RUN --mount=type=cache x", "ADD https://x/y z", "COPY <<END x", "BOGUS x"],
)
def test_what_needs_a_container_runtime_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(NeedsRuntimeError, match=r"Dockerfile:2: .*podman"):
        read_dockerfile(write(tmp_path, f"FROM a\n{line}\n"))


def test_a_broken_dockerfile_is_refused(tmp_path: Path) -> None:
    for text in ("", "WORKDIR /x\n", "FROM\n", 'FROM a\nCOPY "x y\n'):
        with pytest.raises(DataError):
            read_dockerfile(write(tmp_path, text))


# -- shared layers ----------------------------------------------------------------------------------------------------

SHARED = """FROM base
COPY packages /opt/packages
RUN cat /opt/packages/* > /opt/all && date +%N > /opt/stamp
COPY tree /testbed
RUN cat /opt/all /testbed/a > /testbed/both
"""


@pytest.fixture
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Images that are not the user's."""
    require("namespace")
    program()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_folder.cache_clear()
    yield
    run_folder.cache_clear()


def built(folder: Path, package: str, text: str) -> TaskImage:
    for path, content in (("packages/p", package), ("tree/a", text), ("Dockerfile", SHARED)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return asyncio.run(task_image(folder, None, SandboxConfig(), "host"))


def shown(image: TaskImage, command: str) -> str:
    config = SandboxConfig.model_validate({"image": image.base, "layers": image.layers, "backend": "namespace"})

    async def run(sandbox: Sandbox) -> str:
        return (await sandbox.run(Command(("/bin/sh", "-c", command)))).stdout.text()

    return use(config, run)


@pytest.mark.usefixtures("_store")
def test_folders_share_the_layers_of_their_first_steps(tmp_path: Path) -> None:
    first, second = built(tmp_path / "1", "x", "one"), built(tmp_path / "2", "x", "two")
    other = built(tmp_path / "3", "y", "one")
    found = [shown(image, "cat /opt/stamp /testbed/both").split() for image in (first, second, other)]
    assert [texts[1] for texts in found] == ["xone", "xtwo", "yone"]
    assert found[0][0] == found[1][0] != found[2][0]
    digests = [ImageStore().find(*image.layers).digests for image in (first, second)]
    assert digests[0][:3] == digests[1][:3]


@pytest.mark.usefixtures("_store")
def test_an_image_of_shared_layers_has_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "rm -f /opt/stamp; cd / && find opt logs testbed -exec stat -c '%A %u %n' {} + | sort; cat /testbed/both"
    shared = shown(built(tmp_path / "1", "x", "one"), command)
    monkeypatch.setattr(module, "_split", lambda steps: ((), tuple(steps)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "plain"))
    assert shown(built(tmp_path / "2", "x", "one"), command) == shared
    assert "testbed/both" in shared


@pytest.mark.slow
@pytest.mark.usefixtures("_store")
def test_prune_removes_what_was_built_for_other_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "files").mkdir()
    ImageStore().build("mine", [str(tmp_path / "files")])
    names = list[str]()
    for name in ("kept", "used", "gone"):
        files = {"instruction.md": "Do it.", "tests/test.sh": "true", "environment/Dockerfile": "FROM a\nCOPY x /\n"}
        new_folder(tmp_path / name, {"version": "1.0"}, {**files, "environment/x": name})
        image = asyncio.run(task_image(tmp_path / name / "environment", None, SandboxConfig(), "host"))
        names += image.layers
    ImageStore().resolve(names[1])
    assert main(["image", "prune", str(tmp_path / "kept")]) == 0
    assert capsys.readouterr().out == "removed 1 images that were built for task folders\n"
    assert {image.name for image in ImageStore().images()} == {"mine", *names[:2]}
    # It is built again.
    again = asyncio.run(task_image(tmp_path / "gone" / "environment", None, SandboxConfig(), "host"))
    assert again.layers == (names[2],)
    assert ImageStore().has(names[2])
