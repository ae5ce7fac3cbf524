"""Builds a C project and runs its tests, one after another: a repository in, the report of its test programs out.

    c_suite.py FOLDER [--configure | --build]

The repository, the current folder, is copied to FOLDER, and only files that changed since the last copy are
written there, so that compilers do only what a change needs and the repository stays clean. The project's own build
files say how its tests run:

    CMakeLists.txt with add_test    cmake, ctest
    configure.ac, Makefile.am       autoreconf, configure, make check in every folder with tests
    Makefile                        make check, or make test

The report is written to the path in TEST_REPORT, JSON Lines: {target, name, outcome, output} for a test program, and
{target, broken} where something could not be built; tests that could be built run all the same. --build: no test runs.
--configure: nothing is compiled either; what fails then is left to the build.

It imports the standard library alone, because images carry a copy of this file.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

TARGET = "check"
MAX_OUTPUT = 200_000
TEST_S = 120
BUILD_FILES = re.compile(r"(?:^|/)(?:configure\.(?:ac|in)|[^/]*\.m4|Makefile\.am)$")
STATIC = re.compile(r"\w\.a\b|-static\b")
DIRECT = re.compile(r"\w\.l?o\b|OBJEXT|_OBJECTS\b")
"""A Makefile.am that may link objects of a library into programs."""
CMAKE_OPTION = re.compile(r"^\s*option\s*\(\s*\"?(\w*(?:TEST|UNIT)\w*)", re.MULTILINE | re.IGNORECASE)
OUTCOMES = {
    "PASS": "passed",
    "XFAIL": "passed",
    "FAIL": "failed",
    "XPASS": "failed",
    "ERROR": "failed",
    "SKIP": "skipped",
}
ENV = {**os.environ, "CMOCKA_MESSAGE_OUTPUT": "TAP", "CK_VERBOSE": "verbose", "LC_ALL": "C"}
"""Variables by which test libraries print every single test."""
Record = dict[str, str]


def run(*command: str, cwd: Path) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=cwd, env=ENV, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout.decode(errors="replace")


def copy_changes(source: Path, folder: Path) -> list[str]:
    """Copy files that are not as they were when they were copied last; returns their paths."""
    known_path = folder.with_name("copied.json")
    known = json.loads(known_path.read_text()) if known_path.is_file() else {}
    found, changed = {}, []
    for top, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if name != ".git")
        for path in (Path(top) / name for name in sorted(names)):
            if path.is_file():
                name = str(path.relative_to(source))
                mode = path.stat().st_mode & 0o111
                found[name] = hashlib.sha256(b"%o " % mode + path.read_bytes()).hexdigest()
                if known.get(name) != found[name]:
                    changed.append(name)
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).unlink(missing_ok=True)
                    shutil.copy(path, folder / name)
    for name in known.keys() - found.keys():
        (folder / name).unlink(missing_ok=True)
        changed.append(name)
    known_path.write_text(json.dumps(found))
    return changed


def build_system(folder: Path) -> str:
    def says(pattern: str, word: str) -> bool:
        return any(re.search(word, path.read_text(errors="replace"), re.M) for path in folder.rglob(pattern))

    if (folder / "CMakeLists.txt").is_file() and says("CMakeLists.txt", r"\badd_test\b|enable_testing"):
        return "cmake"
    if any((folder / name).is_file() for name in ("configure.ac", "configure.in")) and says("Makefile.am", ""):
        return "automake"
    return "make"


def make(*arguments: str, cwd: Path) -> tuple[int, str]:
    return run("make", "-k", f"-j{os.cpu_count() or 1}", *arguments, cwd=cwd)


def broken(output: str) -> Record:
    lines = [line for line in output.splitlines() if re.search(r"\berror\b|undefined reference|\*\*\*", line)]
    return {"target": TARGET, "broken": "\n".join(lines[:20]) or output[-2000:]}


def remove_linked(folder: Path) -> None:
    """Remove programs and libraries that were linked, so that what cannot be built is not there from an older build."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                head = file.read(1000)
            is_linked = head.startswith(b"\x7fELF") and head[16:17] != b"\x01"
            if is_linked or head.startswith(b"!<arch>") or b"libtool wrapper" in head or b"libtool library" in head:
                path.unlink()


def steps(*commands: Sequence[str], cwd: Path) -> str | None:
    """Run commands until one fails; returns its output."""
    for command in commands:
        status, output = run(*command, cwd=cwd)
        if status:
            return output
    return None


# -- CMake ------------------------------------------------------------------------------------------------------------


def configure_cmake(folder: Path) -> str | None:
    out = folder.with_name("cmake")
    texts = [path.read_text(errors="replace") for path in folder.rglob("*") if path.name in CMAKE_FILES]
    options = sorted({name for text in texts for name in CMAKE_OPTION.findall(text)} | {"BUILD_TESTING"})
    set_options = [f"-D{name}=ON" for name in options if not re.search("VALGRIND|COVERAGE|FUZZ|SANIT", name, re.I)]
    return steps(("cmake", "-S", str(folder), "-B", str(out), "-DCMAKE_BUILD_TYPE=Debug", *set_options), cwd=folder)


def build_cmake(folder: Path, changed: Sequence[str]) -> Iterator[Record]:
    out = folder.with_name("cmake")
    failed = configure_cmake(folder)
    if failed is not None:
        yield broken(failed)
        return
    status, output = run("cmake", "--build", str(out), "--", "-k", f"-j{os.cpu_count() or 1}", cwd=folder)
    if status:
        yield broken(output)


CMAKE_FILES = ("CMakeLists.txt", "DefineOptions.cmake")


def test_cmake(folder: Path) -> Iterator[Record]:
    out = folder.with_name("cmake")
    report = out / "junit.xml"
    report.unlink(missing_ok=True)
    # By default, ctest keeps 1 kB of what a test prints.
    sizes = ("--test-output-size-passed", str(MAX_OUTPUT), "--test-output-size-failed", str(MAX_OUTPUT))
    command = ("ctest", "--test-dir", str(out), "--timeout", str(TEST_S), *sizes, "--output-junit", str(report))
    run(*command, cwd=folder)
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.is_file() else ():
        skipped = case.find("skipped")
        message = "" if skipped is None else str(skipped.get("message", ""))
        if message.startswith("Unable to find executable"):
            continue  # It was not built.
        outcome = "skipped" if skipped is not None else "passed" if case.get("status") == "run" else "failed"
        output = "".join(case.itertext())
        yield {"target": TARGET, "name": str(case.get("name")), "outcome": outcome, "output": output}


# -- automake ---------------------------------------------------------------------------------------------------------


def configure_automake(folder: Path) -> str | None:
    """Configure for quick builds, or by the project's defaults where that fails. As with CMake, compilers do not
    optimize; the POSIX shell runs libtool faster than bash; tests link shared libraries, so no static ones are made
    unless a build file names one."""
    failed = steps(("autoreconf", "-fi"), cwd=folder)
    if failed is not None:
        return failed
    texts = (path.read_text(errors="replace") for path in folder.rglob("Makefile.am"))
    options = () if any(STATIC.search(text) for text in texts) else ("--disable-static",)
    quick = ("env", "CONFIG_SHELL=/bin/sh", "/bin/sh", "./configure", "CFLAGS=-g", *options)
    return None if steps(quick, cwd=folder) is None else steps(("./configure",), cwd=folder)


def build_automake(folder: Path, changed: Sequence[str]) -> Iterator[Record]:
    if not (folder / "Makefile").is_file() or any(BUILD_FILES.search(name) for name in changed):
        failed = configure_automake(folder)
        if failed is not None:
            yield broken(failed)
            return
    # Only after a build that ended well every program is newer than its own objects.
    whole = folder.with_name("whole")
    before = linked_state(folder) if whole.is_file() else None
    whole.unlink(missing_ok=True)
    status, output = make(cwd=folder)
    if before is not None and not status:
        keep_programs(folder, *before)
    # Compile the test programs, and run none.
    built, more = make("check", "TESTS=", cwd=folder)
    if status or built:
        yield broken(output + more)
    else:
        whole.touch()


def linked_state(folder: Path) -> tuple[dict[Path, int], dict[Path, list[str]]]:
    """When each file was written, and what each shared library defines and needs."""
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    libraries = [path for path in times if path.parent.name == ".libs" and re.search(r"\.so[.\d]*$", path.name)]
    return times, {path: interface(path) for path in libraries}


def interface(library: Path) -> list[str]:
    """Names and kinds of a library's symbols. Programs hold copies of its variables, so their sizes belong to it."""
    status, output = run("nm", "-D", "--format=posix", str(library), cwd=library.parent)
    words = [line.split() for line in output.splitlines()]
    return [] if status else sorted(" ".join(word[:2] + (word[3:] if word[1] in "BDRV" else [])) for word in words)


def keep_programs(folder: Path, times: "dict[Path, int]", interfaces: "dict[Path, list[str]]") -> None:
    """Mark programs as linked where only shared libraries were built, and with the interfaces that they had: libtool
    would link every program again, which takes longer than the rest of a build."""
    texts = (path.read_text(errors="replace") for path in folder.rglob("Makefile.am"))
    if any(DIRECT.search(text) for text in texts):
        return
    found, current = linked_state(folder)
    changed = [path for path, time_ns in found.items() if times.get(path) != time_ns]
    if any(path.suffix == ".a" or (path.suffix == ".o" and path.parent.name != ".libs") for path in changed):
        return
    if current != interfaces or not all(current.values()):
        return
    for path in found:
        is_linked = path not in changed and path.parent / ".libs" / path.name in found
        if is_linked and b"wrapper script for .libs" in path.read_bytes()[:1000]:
            path.touch()


def test_automake(folder: Path) -> Iterator[Record]:
    for makefile in sorted(folder.rglob("Makefile")):
        if not re.search(r"^check-TESTS:", makefile.read_text(errors="replace"), re.MULTILINE):
            continue
        place = makefile.parent
        for old in place.rglob("*.trs"):
            old.unlink()
            old.with_suffix(".log").unlink(missing_ok=True)
        # Not check-TESTS, which runs nothing where one program cannot be built.
        make("test-suite.log", cwd=place)
        for path in sorted(place.rglob("*.trs")):
            words = re.findall(r"^:test-result: (\w+)", path.read_text(errors="replace"), re.MULTILINE)
            found = {OUTCOMES.get(word, "failed") for word in words}
            outcome = "failed" if "failed" in found else "passed" if "passed" in found else "skipped"
            log = path.with_suffix(".log")
            text = log.read_text(errors="replace") if log.is_file() else ""
            name = str(path.with_suffix("").relative_to(folder))
            yield {"target": TARGET, "name": name, "outcome": outcome, "output": text}


# -- make -------------------------------------------------------------------------------------------------------------


def configure_make(folder: Path) -> str | None:
    """Nothing to do."""


def build_make(folder: Path, changed: Sequence[str]) -> Iterator[Record]:
    status, output = make(cwd=folder)
    if status:
        yield broken(output)


def test_make(folder: Path) -> Iterator[Record]:
    text = (folder / "Makefile").read_text(errors="replace") if (folder / "Makefile").is_file() else ""
    for goal in ("check", "test"):
        if re.search(rf"^{goal}\s*:", text, re.MULTILINE):
            # One after another, so that lines of tests do not mix.
            status, output = run("make", "-k", goal, cwd=folder)
            outcome = "failed" if status else "passed"
            if status and re.search(r"\berror: |undefined reference", output):
                yield broken(output)
            yield {"target": TARGET, "name": f"make {goal}", "outcome": outcome, "output": output}
            return


# -- main -------------------------------------------------------------------------------------------------------------

SYSTEMS = {
    "cmake": (configure_cmake, build_cmake, test_cmake),
    "automake": (configure_automake, build_automake, test_automake),
    "make": (configure_make, build_make, test_make),
}


def configure(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    copy_changes(source, folder)
    if SYSTEMS[build_system(folder)][0](folder) is not None:
        for path in folder.parent.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(source: Path, folder: Path, report: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    changed = copy_changes(source, folder)
    _, build, test = SYSTEMS[build_system(folder)]
    records = list(build(folder, changed))
    if records:
        remove_linked(folder.parent)
        records = list(build(folder, ()))
    print(*(record["broken"] for record in records), sep="\n")
    if report is not None:
        with report.open("w", encoding="utf-8") as file:
            for record in [*records, *test(folder)]:
                file.write(json.dumps({key: value[-MAX_OUTPUT:] for key, value in record.items()}) + "\n")


if __name__ == "__main__":
    if "--configure" in sys.argv:
        configure(Path.cwd(), Path(sys.argv[1]))
    else:
        main(Path.cwd(), Path(sys.argv[1]), None if "--build" in sys.argv else Path(os.environ["TEST_REPORT"]))
