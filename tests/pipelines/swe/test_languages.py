"""`m2forge pipeline` over tiny projects of other languages, from a git history to a verified task folder."""

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest

from m2forge.cli import main
from m2forge.sandbox.channel import program
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.namespace import run_folder
from m2forge.tasks.folders.environment import prepare
from m2forge.tasks.folders.folder import TaskFolder, read_folders
from m2forge.tasks.folders.swe_bench import folder_record
from m2forge.tasks.folders.trial import attempt
from tests.pipelines.swe import projects
from tests.sandbox.places import require

GO = {
    "go.mod": "module example.com/sums\n\ngo 1.19\n",
    "LICENSE": projects.LICENCE,
    "sums.go": "package sums\n\nfunc First(numbers []int) int { return numbers[0] }\n",
    "sums_test.go": 'package sums\n\nimport "testing"\n\nfunc TestFirst(t *testing.T) {\n'
    '\tif First([]int{4, 5}) != 4 {\n\t\tt.Fatal("not the first")\n\t}\n}\n',
    "inner/inner.go": "package inner\n\nfunc One() int { return 0 }\n",
    "inner/inner_test.go": 'package inner\n\nimport "testing"\n\nfunc TestNothing(t *testing.T) {}\n',
}
GO_FIXED = {
    "sums.go": GO["sums.go"] + "\nfunc Last(numbers []int) int { return numbers[len(numbers)-1] }\n",
    # Before it, this package of tests cannot be compiled: those of the other one must run all the same.
    "sums_test.go": GO["sums_test.go"] + "\nfunc TestLast(t *testing.T) {\n\tfor _, wanted := range []int{5, 6} {\n"
    '\t\tt.Run("ends", func(t *testing.T) {\n\t\t\tif Last([]int{4, wanted}) != wanted {\n'
    '\t\t\t\tt.Errorf("not %d", wanted)\n\t\t\t}\n\t\t})\n\t}\n}\n',
    "inner/inner.go": "package inner\n\nfunc One() int { return 1 }\n",
    "inner/inner_test.go": GO["inner/inner_test.go"]
    + '\nfunc TestOne(t *testing.T) {\n\tif One() != 1 {\n\t\tt.Fatal("not one")\n\t}\n}\n',
}
RUST = {
    "Cargo.toml": '[package]\nname = "sums"\nversion = "0.1.0"\nedition = "2021"\nlicense = "MIT"\n',
    "LICENSE": projects.LICENCE,
    ".gitignore": "/target\nCargo.lock\n",
    "src/lib.rs": "pub fn first(numbers: &[i32]) -> i32 {\n    numbers[0]\n}\n\n"
    "pub fn total(numbers: &[i32]) -> i32 {\n    numbers[1..].iter().sum()\n}\n\n"
    "#[cfg(test)]\nmod tests {\n    #[test]\n    fn inline_first() {\n"
    "        assert_eq!(super::first(&[4]), 4);\n    }\n",
    "tests/first.rs": "#[test]\nfn first() {\n    assert_eq!(sums::first(&[4, 5]), 4);\n}\n",
}
RUST_FIXED = {
    # A test inside of the source comes with the golden patch alone.
    "src/lib.rs": RUST["src/lib.rs"].replace("[1..]", "")
    + "    #[test]\n    fn inline_last() {\n        assert_eq!(super::last(&[4]), 4);\n    }\n}\n\n"
    "pub fn last(numbers: &[i32]) -> i32 {\n    numbers[numbers.len() - 1]\n}\n",
    "tests/first.rs": RUST["tests/first.rs"] + "\n#[test]\nfn total() {\n    assert_eq!(sums::total(&[4, 5]), 9);\n}\n",
    "tests/last.rs": "#[test]\nfn last() {\n    assert_eq!(sums::last(&[4, 5]), 5);\n}\n",
}
RUST["src/lib.rs"] += "}\n"


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Images that are not the user's."""
    require("namespace")
    program()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_folder.cache_clear()
    yield
    run_folder.cache_clear()


def need(*programs: str) -> None:
    """Sandboxes see the programs of /usr alone."""
    if missing := [name for name in programs if shutil.which(name, path="/usr/bin") is None]:
        pytest.skip(f"/usr/bin has no {missing[0]}")


def run(tmp_path: Path, table: str) -> list[TaskFolder]:
    config = tmp_path / "run.toml"
    config.write_text(f'name = "r"\nworkers = 1\n{table}')
    assert main(["pipeline", str(config), "--runs", str(tmp_path / "runs")]) == 0
    folders, rejected = read_folders(tmp_path / "runs" / "r" / "tasks")
    assert rejected == []
    return folders


def make_task(tmp_path: Path, old: Mapping[str, str], new: Mapping[str, str]) -> TaskFolder:
    message = "Let sums know the last number, and count all of them"
    projects.write_history(tmp_path / "clone", ("Begin", old), (message, new))
    (folder,) = run(tmp_path, f'[[swe.repositories]]\npath = "{tmp_path}/clone"\npackage = "sums"\n')
    assert "Let sums know the last number" in folder.instruction()
    assert "ast`" in folder.instruction()
    return folder


def problem_of(folder: TaskFolder, script: str) -> str:
    """Why an attempt that runs a script has perf 0, though its tests gave it 1."""

    async def act() -> str:
        config = SandboxConfig(backend="namespace", timeout_s=60)
        verdict = await attempt(await prepare(folder, config, "host"), script)
        assert verdict.evidence["rewards"] == {"reward": 1.0}
        assert verdict.perf == 0
        return str(verdict.evidence["problem"])

    return asyncio.run(act())


@pytest.mark.slow
def test_a_commit_of_a_go_module_becomes_a_task(tmp_path: Path) -> None:
    need("go")
    folder = make_task(tmp_path, GO, GO_FIXED)
    record = folder_record(folder)
    assert record["language"] == "go"
    assert record["FAIL_TO_PASS"] == [
        "example.com/sums/inner::TestOne",
        "example.com/sums::TestFirst",
        "example.com/sums::TestLast",
        "example.com/sums::TestLast/ends",
        "example.com/sums::TestLast/ends#01",
    ]
    assert record["PASS_TO_PASS"] == ["example.com/sums/inner::TestNothing"]
    assert "- `Last`" in folder.instruction()
    assert json.loads((folder.path / "tests" / "instance.json").read_text())["report"] == "go-json"
    # The tests' process prints what they would print, and ends before one can fail.
    names = ("TestFirst", "TestLast", "TestLast/ends", "TestLast/ends#01", "TestOne", "TestNothing")
    lines = "".join(f"=== RUN   {name}\\n--- PASS: {name} (0.00s)\\n" for name in names) + "PASS\\n"
    forged = f'import "os"\nfunc init() {{ os.Stdout.WriteString("{lines}"); os.Exit(0) }}\n'
    functions = "func First(n []int) int { return 0 }\nfunc Last(n []int) int { return 0 }\n"
    script = f"cat > sums.go <<'END'\npackage sums\n{forged}{functions}END\n"
    script += f"cat > inner/inner.go <<'END'\npackage inner\n{forged}func One() int {{ return 0 }}\nEND\n"
    assert "is forged" in problem_of(folder, script)


@pytest.mark.long
def test_bugs_are_injected_into_a_go_module(tmp_path: Path) -> None:
    pytest.importorskip("tree_sitter_go")
    need("go")
    for name, text in {**GO, **GO_FIXED}.items():
        (tmp_path / "sums-1.0" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sums-1.0" / name).write_text(text)
    config = tmp_path / "run.toml"
    paths = f'injected_paths = ["{tmp_path}/sums-1.0"]'
    config.write_text(f'name = "r"\nworkers = 1\n[swe]\n{paths}\nnum_bugs = 1\n')
    assert main(["pipeline", str(config), "--runs", str(tmp_path / "runs")]) == 0
    (folder,), rejected = read_folders(tmp_path / "runs" / "r" / "tasks")
    assert rejected == []
    record = folder_record(folder)
    failing = [str(id).partition("::Test")[2].partition("/")[0] for id in cast("list[str]", record["FAIL_TO_PASS"])]
    visible = "".join(path.read_text() for path in (folder.path / "environment" / "testbed").rglob("*_test.go"))
    assert failing
    assert not any(f"func Test{name}(" in visible for name in failing)


@pytest.mark.long
def test_a_commit_of_a_rust_crate_becomes_a_task(tmp_path: Path) -> None:
    need("cargo", "rustc", "cc")
    folder = make_task(tmp_path, RUST, RUST_FIXED)
    record = folder_record(folder)
    assert record["language"] == "rust"
    assert record["FAIL_TO_PASS"] == ["tests/first.rs::total", "tests/last.rs::last"]
    assert record["PASS_TO_PASS"] == ["src/lib.rs::tests::inline_first", "tests/first.rs::first"]
    forged = "".join(f"test {name} ... ok\\n" for name in ("tests::inline_first", "first", "total", "last"))
    # Tests' own output is captured, that of the process is not.
    printed = f'std::io::Write::write_all(&mut std::io::stdout(), b"{forged}test result: ok\\n").unwrap()'
    body = f"{{ {printed}; std::process::exit(0) }}"
    functions = "".join(f"pub fn {name}(_: &[i32]) -> i32 {body}\n" for name in ("first", "total", "last"))
    inside = "#[cfg(test)]\nmod tests {\n#[test]\nfn inline_first() { super::first(&[]); }\n}\n"
    assert "is forged" in problem_of(folder, f"cat > src/lib.rs <<'END'\n{functions}{inside}END\n")


@pytest.mark.long
@pytest.mark.parametrize("language", ["go", "rust"])
def test_faults_in_a_local_tree_become_tasks(tmp_path: Path, language: str) -> None:
    need(*{"go": ("go",), "rust": ("cargo", "rustc", "cc")}[language])
    files = {"go": {**GO, **GO_FIXED}, "rust": {**RUST, **RUST_FIXED}}[language]
    for path, text in files.items():
        (tmp_path / "sums-2" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sums-2" / path).write_text(text)
    table = f'[swe]\nnum_bugs = 2\ninjected_paths = ["{tmp_path}/sums-2"]\n'
    folders = run(tmp_path, table)
    assert folders
    for folder in folders:
        record = folder_record(folder)
        assert record["language"] == language
        assert folder.path.name.startswith("sums-2-")
        assert str(record["repo"]) == "injected/sums"
