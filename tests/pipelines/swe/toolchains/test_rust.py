"""Rust: test programs of packages, where tests stand, and what is refused."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from m2forge.errors import DataError
from m2forge.pipelines.swe.action import NO_EDITS
from m2forge.pipelines.swe.toolchains.rust import Rust
from m2forge.pipelines.swe.toolchains.table import detect
from m2forge.pipelines.swe.toolchains.toolchain import Environment
from m2forge.tasks.folders.suite_tests import PASSED, parse
from tests.pipelines.swe import projects

PACKAGE = '[package]\nname = "sums"\n'
FILES = {
    "Cargo.toml": PACKAGE,
    "src/lib.rs": "/// ```\n/// 1;\n/// ```\npub fn a() {}\n#[cfg(test)]\nmod tests;\n",
    "src/tests.rs": "#[test]\nfn inside() {}\n",
    "tests/a.rs": "#[test]\nfn outside() {}\n",
    "tests/b/main.rs": "",
    "tests/common/mod.rs": "",
}


def test_targets_are_the_programs_that_cargo_tests() -> None:
    tree = projects.release(FILES).tree
    assert detect(tree).name == "rust"
    assert Rust().targets(tree) == ("doc", "src/lib.rs", "tests/a.rs", "tests/b/main.rs")


def test_members_of_a_workspace_have_targets() -> None:
    members = {f"core/{path}": text for path, text in FILES.items()}
    tree = projects.release({"Cargo.toml": '[workspace]\nmembers = ["core"]\n', **members}).tree
    targets = Rust().targets(tree)
    assert targets == ("core/doc", "core/src/lib.rs", "core/tests/a.rs", "core/tests/b/main.rs")
    command = Rust().command(targets)
    wanted = [f"--manifest-path=core/Cargo.toml {option}" for option in ("--doc", "--lib", "--test=a", "--test=b")]
    assert list(command[command.index("core/doc") + 1 :: 2]) == wanted


@pytest.mark.parametrize(
    ("id", "place"),
    [
        ("tests/a.rs::outside", ("tests/a.rs", "outside")),
        ("tests/a.rs::made_by_a_macro", ("tests/a.rs", "made_by_a_macro")),
        ("src/lib.rs::tests::inside", ("src/tests.rs", "inside")),
        ("src/lib.rs::tests::outside", None),
        ("doc::src/lib.rs - a 1", None),
    ],
)
def test_a_test_inside_of_source_stands_in_no_test_file(id: str, place: tuple[str, str] | None) -> None:
    tests = {path: text for path, text in FILES.items() if Rust().is_test(path)}
    assert Rust().locate(id, tests) == place


def test_crates_of_others_must_be_vendored() -> None:
    needs = {"Cargo.toml": PACKAGE + '[dev-dependencies]\nserde = "1"\nown = {path = "own"}\n'}
    with pytest.raises(DataError, match="depends on serde, and"):
        Rust().environment(projects.release(needs), "1.63", (), NO_EDITS)
    config = '[source.crates-io]\nreplace-with = "vendored-sources"\n'
    vendored = projects.release({**needs, ".cargo/config.toml": config})
    assert Rust().environment(vendored, "1.63", (), NO_EDITS).toolchain == "rust"


@pytest.mark.parametrize(("manifest", "is_dynamic"), [("", True), ('[profile.dev]\npanic = "abort"\n', False)])
def test_programs_that_abort_are_linked_statically(manifest: str, is_dynamic: bool) -> None:
    release = projects.release({**FILES, "Cargo.toml": PACKAGE + manifest})
    recipe = Rust().files("sums", release, Environment("rust", (), (), "1.63"))["Dockerfile"].content
    assert (b"prefer-dynamic" in recipe) is is_dynamic


def test_an_image_holds_the_programs_of_its_targets() -> None:
    release = projects.release(FILES)
    made = Environment("rust", (), (), "1.63")
    recipe = Rust().files("sums", release, made, ("doc", "tests/a.rs"))["Dockerfile"].content
    assert b"--no-run --test=a)" in recipe
    assert b"--workspace" not in recipe
    assert b"--no-run --workspace)" in Rust().files("sums", release, made)["Dockerfile"].content


def test_faults_are_tried_in_an_image_with_incremental_state() -> None:
    made = Environment("rust", (), (), "1.63", ("RUST_LOG=off",))
    plain, trial = (
        Rust().files("sums", projects.release(FILES), one)["Dockerfile"].content.decode()
        for one in (made, Rust().trial_environment(made))
    )
    assert re.findall(r"ENV CARGO_INCREMENTAL=\S+", plain)[-1] == "ENV CARGO_INCREMENTAL=0"
    assert re.findall(r"ENV CARGO_INCREMENTAL=\S+", trial)[-1] == "ENV CARGO_INCREMENTAL=1"


def test_only_files_that_changed_are_touched(tmp_path: Path) -> None:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    env = {
        **os.environ,
        "TEST_REPORT": str(tmp_path.parent / "report"),
        "CARGO_TARGET_DIR": str(tmp_path.parent / "out"),
    }

    def touched() -> set[str]:
        for path in FILES:
            os.utime(tmp_path / path, (1, 1))
        subprocess.run(Rust().command(()), cwd=tmp_path, env=env, check=True)
        return {path for path in FILES if (tmp_path / path).stat().st_mtime > 1}

    assert touched() == set(FILES)
    assert touched() == set()
    (tmp_path / "src/lib.rs").write_text("pub fn b() {}\n")
    assert touched() == {"src/lib.rs"}
    assert touched() == set()
    (tmp_path / "src/lib.rs").write_text(FILES["src/lib.rs"])
    assert touched() == {"src/lib.rs"}


@pytest.mark.slow
def test_programs_that_compile_run_beside_one_that_does_not(tmp_path: Path) -> None:
    if any(shutil.which(name, path="/usr/bin") is None for name in ("cargo", "rustc", "cc")):
        pytest.skip("/usr/bin has no cargo, rustc or cc")
    files = {
        "Cargo.toml": PACKAGE + 'version = "0.1.0"\nedition = "2021"\n',
        "src/lib.rs": "pub fn one() -> i32 {\n    1\n}\n",
        "tests/bad.rs": "#[test]\nfn two() {\n    sums::two();\n}\n",
        "tests/good.rs": "#[test]\nfn one() {\n    assert_eq!(sums::one(), 1);\n}\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    command, report = Rust().command(Rust().targets(projects.release(files).tree)), tmp_path / "report"
    env = {**os.environ, "PATH": "/usr/bin:/bin", "TEST_REPORT": str(report), "CARGO_HOME": str(tmp_path / "home")}
    subprocess.run(command, cwd=tmp_path, env=env, check=False)
    found = parse("libtest", report.read_bytes(), ())
    assert found.tests == {"tests/good.rs::one": PASSED}
    assert "cannot find function `two`" in found.messages["tests/bad.rs"]
