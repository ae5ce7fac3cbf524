"""Readers of the packages eg and intercode-bench, on small packages of the same form."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import cast

import pytest

from m2forge.errors import DataError, NotFoundError
from m2forge.pipelines.stage import Context, Item, Rejection
from m2forge.pipelines.terminal.posts import EgSource, InterCodeSource, read_blocks
from m2forge.pipelines.terminal.script import candidates, steps

EG = """# cut

show the second column, split on ':'

    cut -d ':' -f2 input.txt


# Basic Usage

The file of these examples:

    $ cat cut.txt
    a b:c d

Split on spaces (`-d ' '`):

    $ cut -d ' ' -f 2- cut.txt
    b:c d
"""
NO_CONTEXT = cast("Context", None)


def test_examples_of_eg_become_questions(tmp_path: Path) -> None:
    path = tmp_path / "eg-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("eg-1.0/eg/examples/cut.md", EG), ("eg-1.0/README.md", "# no example\n\n    rm x\n")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    items = [one for one in EgSource(path).read(NO_CONTEXT) if isinstance(one, Item)]
    assert [one.id for one in items] == ["eg-cut-1", "eg-cut-2"]
    assert [candidates(steps(read_blocks(one.text("answer")))) for one in items] == [
        ["cut -d ':' -f2 input.txt"],
        ["cut -d ' ' -f 2- cut.txt"],
    ]
    assert "a b:c d" in items[1].text("question")
    assert items[0].data["licence"] == "MIT"


def test_queries_of_intercode_become_questions(tmp_path: Path) -> None:
    path = tmp_path / "intercode.whl"
    records = [{"query": "Count files in /testbed", "gold": "find /testbed -type f | wc -l"}, {"query": 3}]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("intercode/assets/datasets/bash_queries.json", json.dumps(records))
    item, rejection = InterCodeSource(path).read(NO_CONTEXT)
    assert isinstance(item, Item)
    assert candidates(steps(read_blocks(item.text("answer")))) == ["find testbed -type f | wc -l"]
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "not a query"


def test_a_package_that_is_none_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        EgSource(tmp_path / "eg.tar.gz").fingerprint()
    (tmp_path / "x.whl").write_text("not a zip")
    (tmp_path / "bash_queries.json").write_text('{"query": "x"}')
    with pytest.raises(DataError, match="expected a list of queries"):
        list(InterCodeSource(tmp_path / "bash_queries.json").read(NO_CONTEXT))
    with pytest.raises(DataError, match="cannot be unpacked"):
        list(InterCodeSource(tmp_path / "x.whl").read(NO_CONTEXT))
