"""`m2forge pipeline` over pairs of Debian archives: a C project with a Makefile, a Node project with node:test."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from m2forge.cli import main
from m2forge.sandbox.channel import program
from m2forge.sandbox.namespace import run_folder
from m2forge.tasks.folders.folder import TaskFolder, read_folders
from m2forge.tasks.folders.swe_bench import folder_record
from tests.pipelines.endpoint import completion, serving
from tests.pipelines.swe import projects
from tests.pipelines.swe.test_languages import problem_of
from tests.pipelines.swe.test_source import write_tar
from tests.sandbox.places import require

MAKEFILE = "all:\n\ncheck: tests/check\n\t./tests/check\n\ntests/check: tests/check.c sums.c\n\t$(CC) -o $@ $^\n"
C_SOURCE = "int total(int a, int b) { return a - b; }\nint first(int a, int b) { return a; }\n"
C_FIXED = C_SOURCE.replace("a - b", "a + b") + "int last(int a, int b) { return b; }\n"
C_TEST = """#include <stdio.h>
int total(int a, int b), first(int a, int b);
int main(void)
{
    int failed = first(4, 5) != 4;
    printf("%s - first\\n", failed ? "not ok 1" : "ok 1");
    return failed;
}
"""
C_NEW_TEST = C_TEST.replace(
    "    return", '    printf("%s - total\\n", total(1, 2) == 3 ? "ok 2" : "not ok 2");\n    return'
)
NODE_SOURCE = "exports.total = (a, b) => a - b\nexports.first = (a, b) => a\n"
NODE_TEST = """const { test, describe } = require('node:test')
const assert = require('node:assert')
const sums = require('../sums.js')

describe('sums', () => {
  test('first', () => assert.equal(sums.first(4, 5), 4))
})
"""
NODE_NEW_TEST = NODE_TEST + "test('total', () => assert.equal(sums.total(1, 2), 3))\n"
CHANGES = {"LICENSE": projects.LICENCE, "CHANGES.md": projects.OLD["CHANGES.md"]}
NEW_CHANGES = {"LICENSE": projects.LICENCE, "CHANGES.md": projects.NEW["CHANGES.md"]}
C_OLD = {**CHANGES, "Makefile": MAKEFILE, "sums.c": C_SOURCE, "tests/check.c": C_TEST}
NODE_OLD = {**CHANGES, "package.json": '{"name": "sums"}', "sums.js": NODE_SOURCE, "test/sums.test.js": NODE_TEST}
C_NEW = {**C_OLD, **NEW_CHANGES, "sums.c": C_FIXED, "tests/check.c": C_NEW_TEST}
NODE_NEW = {
    **NODE_OLD,
    **NEW_CHANGES,
    "sums.js": NODE_SOURCE.replace("a - b", "a + b"),
    "test/sums.test.js": NODE_NEW_TEST,
}


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    require("namespace")
    program()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_folder.cache_clear()
    yield
    run_folder.cache_clear()


def run(tmp_path: Path, old: Mapping[str, str], new: Mapping[str, str], tables: str = "") -> TaskFolder:
    """The one task folder that a pair of archives becomes; its gates ran the solution and nothing."""
    for version, files in (("1.0", old), ("1.1", new)):
        write_tar(tmp_path / f"sums_{version}.orig.tar.gz", dict(files))
    pair = [f"{tmp_path}/sums_{version}.orig.tar.gz" for version in ("1.0", "1.1")]
    (tmp_path / "run.toml").write_text(f'name = "r"\nworkers = 1\n[swe]\ndebian = [{pair}]\n{tables}')
    assert main(["pipeline", str(tmp_path / "run.toml"), "--runs", str(tmp_path / "runs")]) == 0
    (folder,), rejected = read_folders(tmp_path / "runs" / "r" / "tasks")
    assert rejected == []
    assert "which left out the first number" in folder.instruction()
    return folder


@pytest.mark.slow
def test_a_makefile_project_becomes_a_task(tmp_path: Path) -> None:
    if shutil.which("gcc", path="/usr/bin") is None or shutil.which("make", path="/usr/bin") is None:
        pytest.skip("needs gcc and make")
    folder = run(tmp_path, C_OLD, C_NEW)
    record = folder_record(folder)
    assert record["FAIL_TO_PASS"] == ["check::make check::total"]
    assert record["PASS_TO_PASS"] == ["check::make check", "check::make check::first"]
    # The program prints what tests print, and ends before they can fail.
    forged = 'int first(int a, int b) { puts("ok 1 - first\\nok 2 - total"); exit(0); }'
    source = f"#include <stdio.h>\n#include <stdlib.h>\n{forged}\n{C_SOURCE.splitlines()[0]}\n"
    script = f"cat > sums.c <<'END'\n{source}END\n"
    assert "is forged" in problem_of(folder, script)


@pytest.mark.slow
def test_a_node_project_becomes_a_task(tmp_path: Path) -> None:
    if shutil.which("node", path="/usr/bin") is None:
        pytest.skip("needs node")
    folder = run(tmp_path, NODE_OLD, NODE_NEW)
    record = folder_record(folder)
    assert record["FAIL_TO_PASS"] == ["test/sums.test.js::total"]
    assert record["PASS_TO_PASS"] == ["test/sums.test.js::sums", "test/sums.test.js::sums > first"]
    printed = "TAP version 13\\n# Subtest: sums\\n    ok 1 - first\\nok 1 - sums\\nok 2 - total"
    script = f"printf %s 'exports.first = () => {{ console.log(\"{printed}\"); process.reallyExit(0) }}' > sums.js"
    assert "is forged" in problem_of(folder, script)


@pytest.mark.long
def test_a_build_model_sets_options_of_the_compiler(tmp_path: Path) -> None:
    if shutil.which("gcc", path="/usr/bin") is None or shutil.which("make", path="/usr/bin") is None:
        pytest.skip("needs gcc and make")
    strict = {"Makefile": MAKEFILE.replace("$(CC)", "$(CC) -std=c89 $(CFLAGS)")}
    later = {"tests/check.c": C_NEW_TEST.replace("{\n", "{\n    for (int i = 0; i < 2; i++) total(i, i);\n", 1)}
    earlier = {"tests/check.c": C_TEST.replace("{\n", "{\n    for (int i = 0; i < 2; i++) first(i, i);\n", 1)}
    action = json.dumps({"action": "set", "variable": "CFLAGS", "value": "-std=gnu99"})
    with serving(lambda body, number: completion(action)) as endpoint:
        tables = f'build_model = {{model = "m"}}\n[models.m]\nurl = "{endpoint.url}"\nmodel = "m"\n'
        folder = run(tmp_path, {**C_OLD, **strict, **earlier}, {**C_NEW, **strict, **later}, tables)
    assert len(endpoint.requests) == 1
    assert "initial declarations are only allowed in C99" in endpoint.requests[0]["messages"][1]["content"]
    assert folder_record(folder)["FAIL_TO_PASS"] == ["check::make check::total"]
    assert 'ENV CFLAGS="-std=gnu99"' in (folder.path / "environment" / "Dockerfile").read_text()
