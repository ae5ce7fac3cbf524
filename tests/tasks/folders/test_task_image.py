"""Dockerfiles: what a sandbox can build itself, and what is refused by name."""

from pathlib import Path

import pytest

from m2forge.errors import DataError
from m2forge.tasks.folders.task_image import Copy, NeedsRuntimeError, Run, read_dockerfile

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
