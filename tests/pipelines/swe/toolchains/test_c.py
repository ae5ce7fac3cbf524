"""C: what is tested, what autotools generate, and builds that fail."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.candidate import Candidate, make_candidate
from m2forge.pipelines.swe.task import Observation, hidden_alone
from m2forge.pipelines.swe.toolchains import c_suite
from m2forge.pipelines.swe.toolchains.c import C, without_generated
from m2forge.pipelines.swe.toolchains.table import detect
from m2forge.pipelines.swe.toolchains.toolchain import Environment
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.folders.suite_tests import parse
from m2forge.tasks.folders.swe_tests import patched_files
from tests.pipelines.swe import projects

CMAKE = """cmake_minimum_required(VERSION 3.10)
project(sums C)
enable_testing()
foreach(name one two)
    add_executable(${name} tests/${name}.c)
    add_test(NAME ${name} COMMAND ${name})
endforeach()
"""
GOOD = "int main(void) { return 0; }\n"
MAKEFILE_AM = "TESTS = one two\ncheck_PROGRAMS = one two\none_SOURCES = tests/one.c\ntwo_SOURCES = tests/two.c\n"
CONFIGURE = "AC_INIT([sums], [1.0])\nAM_INIT_AUTOMAKE([foreign subdir-objects])\nAC_PROG_CC\n"
CONFIGURE += "AC_CONFIG_FILES([Makefile])\nAC_OUTPUT\n"
PROJECTS = {
    "cmake": ({"CMakeLists.txt": CMAKE}, ("cmake", "ctest"), ("one", "two")),
    "automake": ({"configure.ac": CONFIGURE, "Makefile.am": MAKEFILE_AM}, ("autoreconf",), ("one", "two")),
}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def suite(tmp_path: Path) -> list[str]:
    return [sys.executable, str(Path(c_suite.__file__)), str(tmp_path / "cache" / "build")]


def run_suite(tmp_path: Path) -> bytes:
    report = tmp_path / "report"
    subprocess.run(suite(tmp_path), cwd=tmp_path / "tree", env={**os.environ, "TEST_REPORT": str(report)}, check=True)
    return report.read_bytes()


@pytest.mark.parametrize("system", PROJECTS)
def test_a_program_that_no_longer_compiles_fails_alone(tmp_path: Path, system: str) -> None:
    files, programs, (one, two) = PROJECTS[system]
    if missing := [name for name in ("gcc", "make", *programs) if shutil.which(name) is None]:
        pytest.skip(f"needs {missing[0]}")
    write(tmp_path / "tree", {**files, "tests/one.c": GOOD, "tests/two.c": GOOD})
    first = parse("programs", run_suite(tmp_path), ["check"])
    assert first.tests == {f"check::{one}": "passed", f"check::{two}": "passed"}
    # Its program of the first build is still there, and must not count.
    write(tmp_path / "tree", {"tests/two.c": "int main(void) { return missing(); }\n"})
    second = parse("programs", run_suite(tmp_path), ["check"])
    assert second.tests[f"check::{one}"] == "passed"
    assert f"check::{two}" not in second.tests
    assert "missing" in second.messages["check"]


LIBTOOL = {
    "configure.ac": CONFIGURE.replace("AC_PROG_CC\n", "AC_PROG_CC\nLT_INIT\n"),
    "Makefile.am": "lib_LTLIBRARIES = libsums.la\nlibsums_la_SOURCES = sums.c\n"
    "TESTS = one two\ncheck_PROGRAMS = one two\nLDADD = libsums.la\n"
    "one_SOURCES = tests/one.c\ntwo_SOURCES = tests/two.c\n",
    "sums.c": "int size = 1;\nint total(void) { return 1; }\n",
    "tests/one.c": "int total(void);\nint main(void) { return total() != 1; }\n",
    "tests/two.c": "extern int size;\nint main(void) { return size != 1; }\n",
}


def outcomes(tmp_path: Path, files: Mapping[str, str]) -> tuple[str, bool]:
    """The outcomes of both tests, and whether their programs were linked."""
    write(tmp_path / "tree", files)
    program = tmp_path / "cache/build/.libs/two"
    before_ns = program.stat().st_mtime_ns if program.is_file() else 0
    tests = parse("programs", run_suite(tmp_path), ["check"]).tests
    shown = " ".join(str(tests.get(f"check::{name}")) for name in ("one", "two"))
    return shown, (program.stat().st_mtime_ns if program.is_file() else 0) != before_ns


@pytest.mark.long
def test_programs_are_linked_again_where_they_must_be(tmp_path: Path) -> None:
    needed = ("gcc", "make", "autoreconf", "libtoolize")
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(f"needs {missing[0]}")
    sums = LIBTOOL["sums.c"]
    assert outcomes(tmp_path, LIBTOOL) == ("passed passed", True)
    # The library alone.
    assert outcomes(tmp_path, {"sums.c": sums.replace("return 1", "return 2")}) == ("failed passed", False)
    # A variable that programs copy.
    wide = sums.replace("int size = 1", "long size[2] = {1, 2}")
    assert outcomes(tmp_path, {"sums.c": wide}) == ("passed passed", True)
    # A symbol that programs need, and one that the library needs.
    assert outcomes(tmp_path, {"sums.c": wide.replace("total", "sum")})[0] == "None passed"
    assert outcomes(tmp_path, {"sums.c": sums}) == ("passed passed", True)
    assert outcomes(tmp_path, {"sums.c": sums.replace("return 1", "return missing()")})[0] == "None None"
    assert outcomes(tmp_path, {"sums.c": sums}) == ("passed passed", True)
    # A test and the library.
    changed = {"sums.c": sums.replace("size = 1", "size = 2"), "tests/two.c": LIBTOOL["tests/two.c"].replace("1", "2")}
    assert outcomes(tmp_path, changed) == ("passed passed", True)
    # An object of the library in a program.
    makefile = LIBTOOL["Makefile.am"] + "two_LDADD = sums.lo libsums.la\n"
    assert outcomes(tmp_path, LIBTOOL | {"Makefile.am": makefile}) == ("passed passed", True)
    assert outcomes(tmp_path, {"sums.c": sums.replace("size = 1", "size = 2")}) == ("passed failed", True)


@pytest.mark.slow
def test_a_tree_is_configured_without_its_sources(tmp_path: Path) -> None:
    files, programs, _ = PROJECTS["automake"]
    if missing := [name for name in ("gcc", "make", *programs) if shutil.which(name) is None]:
        pytest.skip(f"needs {missing[0]}")
    files = {**files, "tests/one.c": GOOD, "tests/two.c": GOOD}
    image = C().files("sums", projects.release(files), Environment("c", (), (), "12"))
    write(
        tmp_path / "tree",
        {
            name.removeprefix("unconfigured/"): file.content.decode()
            for name, file in image.items()
            if name.startswith("unconfigured/")
        },
    )
    assert (tmp_path / "tree" / "tests/one.c").read_text() == ""
    subprocess.run([*suite(tmp_path), "--configure"], cwd=tmp_path / "tree", check=True)
    makefile = tmp_path / "cache" / "build" / "Makefile"
    configured_ns = makefile.stat().st_mtime_ns
    write(tmp_path / "tree", files)
    found = parse("programs", run_suite(tmp_path), ["check"])
    assert found.tests == {"check::one": "passed", "check::two": "passed"}
    assert makefile.stat().st_mtime_ns == configured_ns


def test_what_needs_sources_to_configure_is_left_to_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "tree", PROJECTS["automake"][0])
    monkeypatch.setattr(c_suite, "steps", lambda *commands, cwd: "configure: error: cannot find sources")
    c_suite.configure(tmp_path / "tree", tmp_path / "cache" / "build")
    assert list((tmp_path / "cache").iterdir()) == []


def configured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, makefile: str) -> list[str]:
    """The options of each call of a project's configure, a shell script."""
    write(tmp_path, {"bin/autoreconf": "#!/bin/sh\n", "tree/Makefile.am": makefile})
    write(tmp_path, {"tree/configure": f'#!/bin/sh\necho "$*" >>calls\n{script}\n'})
    for name in ("bin/autoreconf", "tree/configure"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setitem(c_suite.ENV, "PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert c_suite.configure_automake(tmp_path / "tree") is None
    return (tmp_path / "tree" / "calls").read_text().split("\n")[:-1]


@pytest.mark.parametrize(
    ("makefile", "options"),
    [("LDADD = libsums.la\n", ["--disable-static"]), ("LDADD = .libs/libsums.a\n", []), ("LDFLAGS = -static\n", [])],
)
def test_static_libraries_are_made_where_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makefile: str, options: list[str]
) -> None:
    (call,) = configured_with(tmp_path, monkeypatch, "exit 0", makefile)
    assert call.split() == ["CFLAGS=-g", *options]


def test_a_configure_that_refuses_options_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = configured_with(tmp_path, monkeypatch, "[ $# = 0 ]", MAKEFILE_AM)
    assert calls == ["CFLAGS=-g --disable-static", ""]


def test_a_tree_is_c_if_a_build_file_builds_it() -> None:
    tree = {"Makefile": FolderFile(b"check:\n"), "a.c": FolderFile(b""), "tests/Makefile": FolderFile(b"")}
    assert isinstance(detect(tree), C)
    assert C().targets(tree) == ("check",)
    assert C().targets({**tree, "Makefile": FolderFile(b"all:\n")}) == ()


def test_what_autotools_wrote_is_no_part_of_a_release() -> None:
    texts = {
        "configure.ac": "AC_INIT",
        "configure": "#! /bin/sh\n# Guess values. Generated by GNU Autoconf 2.71 for sums 1.0.\n",
        "src/Makefile.in": "# Makefile.in generated by automake 1.16.5 from Makefile.am.\n",
        "version.h.in": "#define VERSION @VERSION@\n",
        "build-aux/missing": "#! /bin/sh\n",
        "sums.c": "",
    }
    tree = {name: FolderFile(text.encode()) for name, text in texts.items()}
    assert set(without_generated(tree)) == {"configure.ac", "version.h.in", "sums.c"}
    del tree["configure.ac"]
    assert set(without_generated(tree)) == set(tree)


def test_a_test_is_located_by_its_program_or_its_text() -> None:
    tests = {"tests/parse.c": "", "tests/all.c": "void adds_two(void) {}"}
    assert C().locate("check::tests/parse", tests) == ("tests/parse.c", "tests/parse")
    assert C().locate("check::suite::adds_two", tests) == ("tests/all.c", "adds_two")
    assert C().locate("check::other", tests) is None


PRINTED = {
    "ok 1 - a\nnot ok 2 - b\nok 3 - c # SKIP no\nnot ok 4 - d # TODO\n": {
        "a": "passed",
        "b": "failed",
        "c": "skipped",
        "d": "skipped",
    },
    "# Subtest: s\n    # Subtest: a\n    ok 1 - a\n    1..1\nok 1 - s\n": {"s > a": "passed", "s": "passed"},
    "t.c:9:a:PASS\nt.c:10:b:FAIL: Expected 1\nt.c:11:c:IGNORE\n3 Tests": {"a": "passed", "b": "failed", "c": "skipped"},
    "[ RUN      ] a\n[       OK ] a\n[  FAILED  ] b\n[  FAILED  ] 1 test(s)": {"a": "passed", "b": "failed"},
    "t.c:9:P:Core:a:0: Passed\nt.c:12:F:Core:b:0: no\n": {"Core:a": "passed", "Core:b": "failed"},
}


@pytest.mark.parametrize("output", PRINTED)
def test_single_tests_are_read_from_what_programs_print(output: str) -> None:
    line = {"target": "check", "name": "p", "outcome": "failed", "output": output}
    found = parse("programs", json.dumps(line).encode(), ["check"])
    assert found.tests == {"check::p": "failed"} | {f"check::p::{name}": one for name, one in PRINTED[output].items()}


def test_assertions_of_tape_belong_to_the_test_above_them() -> None:
    output = "TAP version 13\n# adds\nok 1 equal\n# takes\nok 2 equal\nnot ok 3 equal\n\n1..3\n# tests 3\n# pass  2\n"
    line = {"target": "test/a.js", "outcome": "failed", "output": output, "is_grouped": True}
    found = parse("programs", json.dumps(line).encode(), ["test/a.js"])
    assert found.tests == {"test/a.js::adds > equal": "passed", "test/a.js::takes > equal": "failed"}


SOURCES = {"LICENSE": projects.LICENCE, "sums.c": "int total(void) { return 1; }\n", "tests/one.c": GOOD}
FIXED = {**SOURCES, "sums.c": "int total(void) { return 2; }\n", "tests/two.c": GOOD}
TWO = {"CMakeLists.txt": CMAKE, "Makefile.am": MAKEFILE_AM}
LATER = {"CMakeLists.txt": "add_library(more more.c)\n", "Makefile.am": "lib_LIBRARIES = more.a\n"}


def pair(name: str, more: str = "") -> Candidate:
    """A fix with a test that the build file at the top lists."""
    one = TWO[name].replace(" two\n", "\n").replace("one two)", "one)").replace("two_SOURCES = tests/two.c\n", "")
    top = {"configure.ac": CONFIGURE} if name == "Makefile.am" else {}
    old, new = {**SOURCES, **top, name: one}, {**FIXED, **top, name: TWO[name] + more}
    found = make_candidate("sums-1.1", "sums", projects.release(old), projects.release(new, "1.1"), {"kind": "test"})
    assert isinstance(found, Candidate), found
    return found


@pytest.mark.parametrize("name", TWO)
def test_a_build_file_that_lists_a_test_is_hidden_with_it(name: str) -> None:
    found = pair(name)
    assert patched_files(found.patch) == ["sums.c"]
    assert patched_files(found.test_patch) == [name, "tests/two.c"]
    assert set(found.tests) == {"tests/two.c"}


@pytest.mark.parametrize("name", TWO)
def test_a_test_that_the_golden_patch_lists_is_not_hidden(name: str) -> None:
    mixed = pair(name, LATER[name])
    assert patched_files(mixed.patch) == [name, "sums.c"]
    seen = Observation(("check::two",), ("check::one",), (), {}, 0)
    rejected = hidden_alone(mixed, seen)
    assert isinstance(rejected, Rejection)
    assert rejected.evidence == {"by_golden_patch": ["check::two"]}
    assert hidden_alone(pair(name), seen) == seen


def test_build_files_may_take_all_tests_of_a_folder() -> None:
    tree = {"tests/two.c": FolderFile(GOOD.encode()), "CMakeLists.txt": FolderFile(b"file(GLOB tests tests/*.c)\n")}
    assert C().is_built("tests/two.c", tree)
    assert not C().is_built("tests/two.c", {**tree, "CMakeLists.txt": FolderFile(b"add_test(one one)\n")})
