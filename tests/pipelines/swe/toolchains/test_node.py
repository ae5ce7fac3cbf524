"""Node: what test files execute."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from m2forge.pipelines.swe.toolchains import node
from m2forge.pipelines.swe.toolchains.node import Node
from m2forge.pipelines.swe.toolchains.toolchain import Coverage, Ranges

SOURCE = """// Größe: 😀
exports.sign = (a) => {
  if (a < 0) {
    return 'negative' + a
  }
  return a === 0 ? 'zero' : 'positive'
}
exports.unused = (a) => a + 1
"""


def reaches(coverage: Coverage, text: str, source: str = SOURCE) -> bool:
    start = source.encode().index(text.encode())
    return coverage.reaches("sign.js", source, start, start + len(text.encode()))


def covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *tests: str) -> Coverage:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    monkeypatch.setattr(node, "TESTBED", str(tmp_path))
    (tmp_path / "sign.js").write_text(SOURCE)
    env = {**os.environ, Node.coverage_variable: str(tmp_path / "coverage")}
    for test in tests:
        subprocess.run(["node", "-e", f"const sums = require('./sign.js')\n{test}"], cwd=tmp_path, env=env, check=True)
    files = Node().read_coverage(tmp_path / "coverage")
    assert files is not None
    return Coverage(files, 0.0)


def test_a_run_reaches_the_branches_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = covered(tmp_path, monkeypatch, "sums.sign(1)")
    found = [
        reaches(coverage, text) for text in ("a < 0", "'negative' + a", "a === 0", "'zero'", "'positive'", "a + 1")
    ]
    assert found == [True, False, True, False, True, False]
    assert not coverage.reaches("other.js", SOURCE, 0, 1)


def test_a_run_reaches_what_any_process_executes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = covered(tmp_path, monkeypatch, "sums.sign(1)", "sums.sign(-1)")
    found = [reaches(coverage, text) for text in ("'negative' + a", "'positive'", "'zero'", "a + 1")]
    assert found == [True, True, False, False]


def test_a_text_that_a_loader_changed_counts_as_reached() -> None:
    ranges: Ranges = [(0, len(SOURCE) + 10, 0)]
    assert reaches(Coverage({"sign.js": [ranges]}, 0.0), "a + 1")


@pytest.mark.parametrize("content", ["", "{}", '{"result": [{"url": "file:///a"}]}', None])
def test_coverage_that_cannot_be_read_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "coverage-1-2-0.json").write_text(content)
    assert Node().read_coverage(tmp_path) is None
