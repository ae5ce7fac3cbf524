"""C: CMake, automake or a Makefile, built once in the image; `c_suite` defines how its tests run.

The image configures the project before it has its sources: from its other files, with sources that are empty. Trees
that differ in sources alone, such as those of injected bugs, share that layer.

All tests of a project are one target, since its build files list them. A program that a build file outside of the tests
lists is not found by `locate` unless a test file has its name.

A build file whose changed lines all speak of tests belongs to the tests, so that the base is judged with them: a test
that only the golden patch lists would fail before it whatever the source does. Where the same file changes for the
source too, it stays in the golden patch, and the tests that it alone lists are not hidden tests.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from m2forge.pipelines.swe.toolchains import c_suite
from m2forge.pipelines.swe.toolchains.toolchain import Environment, Toolchain, commit_command, settings, testbed
from m2forge.pipelines.swe.tree import Release, Tree
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.folders.swe_bench import BASE_IMAGE, TESTBED, USER

CACHE = "/opt/cache"
PROGRAM = "/opt/suite/c_suite.py"
_BUILD_FILES = ("CMakeLists.txt", "configure.ac", "configure.in", "Makefile")
_LISTS_TESTS = re.compile(
    r"\badd_test\b|enable_testing|^\s*(?:TESTS|check_PROGRAMS)\s*\+?=|^(?:check|test)\s*:", re.MULTILINE
)
_GLOBS = re.compile(r"\bGLOB|\$\(wildcard ", re.IGNORECASE)
"""A build file that takes all files of a folder."""
_SOURCES = (".c", ".cc", ".cpp", ".cxx")
_DOCKERFILE = """FROM {base}
COPY suite /opt/suite
COPY unconfigured /opt/unconfigured
RUN mkdir -p {cache} && chown {user}:{user} {cache}
WORKDIR /opt/unconfigured
{settings}USER {user}
RUN python3 -s {program} {cache}/build --configure
COPY --chown={user}:{user} testbed {testbed}
WORKDIR {testbed}
RUN {commit}
RUN python3 -s {program} {cache}/build --build
"""


class C(Toolchain):
    name = "c"
    manifests = _BUILD_FILES
    version_command = ("gcc", "-dumpfullversion")
    report = "programs"

    def is_project(self, tree: Tree) -> bool:
        return any(name in tree for name in _BUILD_FILES) and any(path.endswith(".c") for path in tree)

    def is_source(self, path: str) -> bool:
        return path.endswith((".c", ".h")) and super().is_source(path)

    def test_build_files(self, old: Tree, new: Tree) -> frozenset[str]:
        stems = {PurePosixPath(path).stem for path in new if path.endswith(".c") and self.is_test(path)}
        named = "|".join(re.escape(stem) for stem in sorted(stems)) or r"(?!)"
        tests = re.compile(
            rf"TESTS|check_|CTest|testing|(?:^|[\W_])tests?(?:$|[\W_])|\b(?:{named})(?:_[A-Z]+)?\b", re.I
        )
        found = (path for path in new if _is_build_file(path) and not self.is_test(path) and path in old)
        return frozenset(
            path
            for path in found
            if old[path] != new[path]
            and all(tests.search(line) for line in _changed_lines(_text(old, path), _text(new, path)))
        )

    def is_built(self, path: str, tree: Tree) -> bool:
        if not path.endswith(".c"):
            return True
        named = re.compile(rf"\b{re.escape(PurePosixPath(path).stem)}(?:_[A-Z]+)?\b")
        lists = [one for one in tree if _is_build_file(one) or (self.is_test(one) and one != path)]
        return any(named.search(_text(tree, one)) for one in lists) or any(
            _GLOBS.search(_text(tree, one)) for one in lists if _is_build_file(one)
        )

    def targets(self, tree: Tree) -> tuple[str, ...]:
        lists = (path for path in tree if PurePosixPath(path).name in (*_BUILD_FILES, "Makefile.am"))
        has_tests = any(_LISTS_TESTS.search(_text(tree, path)) for path in lists)
        return (c_suite.TARGET,) if has_tests else ()

    def files(
        self, package: str, release: Release, environment: Environment, targets: Sequence[str] = ()
    ) -> dict[str, FolderFile]:
        dockerfile = _DOCKERFILE.format(
            base=BASE_IMAGE,
            cache=CACHE,
            user=USER,
            testbed=TESTBED,
            settings=settings(environment),
            commit=commit_command(),
            program=PROGRAM,
        )
        own = {
            "Dockerfile": FolderFile(dockerfile.encode()),
            f"suite/{PurePosixPath(PROGRAM).name}": FolderFile(Path(c_suite.__file__).read_bytes()),
        }
        own |= {
            f"unconfigured/{path}": replace(file, content=b"") if path.endswith(_SOURCES) else file
            for path, file in release.tree.items()
        }
        return own | testbed(release.tree)

    def command(self, targets: Sequence[str], max_failures: int | None = None) -> tuple[str, ...]:
        return ("python3", "-s", PROGRAM, f"{CACHE}/build")

    def locate(self, id: str, tests: Mapping[str, str]) -> tuple[str, str] | None:
        _, program, *inner = id.split("::")
        stem, function = PurePosixPath(program).stem, (inner or [program])[-1].split(":")[-1]
        stems = (stem, f"test_{stem}", stem.removeprefix("test_"))
        named = [path for path in tests if PurePosixPath(path).stem in stems]
        found = [path for path in tests if re.search(rf"\b{re.escape(function)}\b", tests[path])]
        return ((named or found)[0], function) if named or found else None


def _is_build_file(path: str) -> bool:
    name = PurePosixPath(path).name
    return name in (*_BUILD_FILES, "Makefile.am") or name.endswith((".cmake", ".mk"))


def _text(tree: Tree, path: str) -> str:
    return tree[path].content.decode(errors="replace")


def _changed_lines(old: str, new: str) -> list[str]:
    """Lines that only one of two texts has, without comments, closing words and a backslash at the end."""
    lines = [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line.startswith(("+ ", "- "))]
    plain = (line[2:].partition("#")[0].strip().rstrip("\\").strip() for line in lines)
    return [
        line for line in plain if re.search(r"\w", line) and not re.fullmatch(r"(?i)endif\(.*\)|endforeach\(.*\)", line)
    ]


def without_generated(tree: Tree) -> dict[str, FolderFile]:
    """The tree of a release archive without what autotools wrote into it."""
    if not any(name in tree for name in ("configure.ac", "configure.in")):
        return dict(tree)
    return {path: file for path, file in tree.items() if not _is_generated(path, file.content[:400])}


_GENERATED = re.compile(
    rb"generated (?:automatically )?by (?:automake|aclocal|GNU Autoconf)|by autoheader|generated by GNU Autoconf",
    re.IGNORECASE,
)
_INSTALLED = frozenset(
    {
        *("ar-lib", "compile", "config.guess", "config.sub", "depcomp", "install-sh", "ltmain.sh", "missing"),
        *("mkinstalldirs", "test-driver", "ylwrap", "libtool.m4", "ltoptions.m4", "ltsugar.m4", "ltversion.m4"),
        "lt~obsolete.m4",
    }
)
"""Files that `autoreconf -fi` installs."""


def _is_generated(path: str, head: bytes) -> bool:
    name = PurePosixPath(path).name
    is_output = name in ("configure", "aclocal.m4") or name.endswith(".in")
    return name in _INSTALLED or (is_output and bool(_GENERATED.search(head)))
