"""Toolchains: what the pipeline must know of a language, one class each.

    tree ─▶ is_project ─▶ is_test, is_source, targets ─▶ environment ─▶ files ─▶ command ─▶ report ─▶ ids of tests

A test's id is `TARGET::NAME`. A target is what the command can be given: a file of pytest, a package of Go. The command
runs in the repository, in a sandbox without a network, and writes its report, in a format that `suite_tests.FORMATS`
reads, to the path in the variable TEST_REPORT. A target that cannot be compiled or imported is a message under the
target's name, and its tests are missing from the report, which counts as failed.
"""

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import ClassVar, TypeAlias

from m2forge.pipelines.swe.action import Edits, Index
from m2forge.pipelines.swe.tree import COMMIT, GIT_ENV, Release, Tree
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.folders.suite_tests import FAILED, PASSED, REPORT, SKIPPED
from m2forge.tasks.folders.swe_bench import BASE_IMAGE, TESTBED, USER

LOGS, REPORT_PATH = "/logs/verifier", f"/logs/verifier/{REPORT}"
SOURCE_ENDINGS = frozenset({".py", ".pyx", ".js", ".mjs", ".cjs", ".ts", ".c", ".h", ".cc", ".cpp", ".go", ".rs"})
_TEST_FILE = re.compile(r"(?:^|/)(?:tests?|test_[^/]*|[^/]*_test|[^/]*\.(?:test|spec)|conftest)\.\w+$")
_TEST_FOLDER = re.compile(r"^testing/|(?:^|/)(?:tests?|__tests__)/")
TEST_PATH = f"(?:{_TEST_FILE.pattern})|(?:{_TEST_FOLDER.pattern})"
"""Searched in a path."""


@dataclass(frozen=True, slots=True)
class Environment:
    toolchain: str
    """Its name."""
    requirements: tuple[str, ...]
    """What the rules asked for."""
    archives: tuple[str, ...]
    """File names of the packages that fulfil them, in the toolchain's cache folder."""
    version: str
    """Version of the language in the base image: 3.12."""
    variables: tuple[str, ...] = ()
    """NAME=VALUE of environment variables that a model set."""


class Outcomes(StrEnum):
    PASSED = PASSED
    FAILED = FAILED
    SKIPPED = SKIPPED


@dataclass(frozen=True, slots=True)
class TestRun:
    """What one run of tests reported."""

    __test__ = False
    tests: Mapping[str, Outcomes] = field(default_factory=dict)
    """By id. A test that a report lists twice with different outcomes has failed."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """The first line of why a test failed, and of targets that could not be compiled or imported."""
    output: str = ""
    problem: str | None = None
    """Why the run decides nothing."""
    cpu_s: float = 0.0

    @property
    def passed(self) -> set[str]:
        return {id for id, outcome in self.tests.items() if outcome is Outcomes.PASSED}


Ranges: TypeAlias = Sequence[tuple[int, int, int]]
"""Start, end and count of parts of a text, in units of UTF-16."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the processes of a run have executed."""

    files: Mapping[str, Sequence[Ranges]]
    """By path, for each process that has loaded the file. Of the ranges that hold a character the smallest counts."""
    cpu_s: float

    def reaches(self, path: str, source: str, start: int, end: int) -> bool:
        """Whether the run may have executed these bytes of a file. `source`: its text."""
        data = source.encode()
        first, last, whole = (len(data[:at].decode().encode("utf-16-le")) // 2 for at in (start, end, len(data)))
        return any(
            # A loader has changed a text of another length.
            max(stop for _, stop, _ in ranges) != whole or _count(ranges, first) or _count(ranges, last - 1)
            for ranges in self.files.get(path, ())
        )


def _count(ranges: Ranges, at: int) -> int:
    holding = ((stop - start, -count) for start, stop, count in ranges if start <= at < stop)
    return -min(holding, default=(0, 0))[1]


class Toolchain(ABC):
    """How projects of one language are recognised, built and tested."""

    name: ClassVar[str]
    version_command: ClassVar[tuple[str, ...]]
    """Prints the version of the language in the base image."""
    is_compiled: ClassVar[bool] = True
    """Whether a compiler sees some faults before any test does."""
    report: ClassVar[str]
    """A key of `suite_tests.FORMATS`."""
    index: ClassVar[Index | None] = None
    """Where packages come from that a build model may add, pin and remove; None: it may set variables alone."""
    coverage_variable: ClassVar[str] = ""
    """Names a folder to which a run writes what it reaches; "": there is none."""
    test_path: ClassVar[str] = TEST_PATH
    """Searched in a path: what `is_test` accepts."""
    manifests: ClassVar[tuple[str, ...]] = ()
    """Files by which a build model knows a project, the first that a tree has; none: its metadata."""

    @abstractmethod
    def is_project(self, tree: Tree) -> bool:
        """Whether a tree is a project of this language."""

    def is_test(self, path: str) -> bool:
        """Whether a file belongs to the tests, which are hidden from agents."""
        return bool(re.search(self.test_path, path))

    def is_source(self, path: str) -> bool:
        is_document = path.startswith(("docs/", "doc/"))
        return PurePosixPath(path).suffix in SOURCE_ENDINGS and not self.is_test(path) and not is_document

    def test_build_files(self, old: Tree, new: Tree) -> frozenset[str]:
        """Build files that change for tests alone, and so belong to the tests."""
        return frozenset()

    def is_built(self, path: str, tree: Tree) -> bool:
        """Whether the build files of a tree know a test file."""
        return True

    @abstractmethod
    def targets(self, tree: Tree) -> tuple[str, ...]:
        """All that the command can be given; empty for a tree without tests."""

    def requirements(self, release: Release, edits: Edits) -> list[str]:
        """Packages that the project's own files name, as a model edited them."""
        return []

    def environment(self, release: Release, version: str, asked: Sequence[str], edits: Edits) -> Environment:
        """The environment of a project, downloaded as far as it needs to be; raises DataError or NotFoundError.
        `asked`: requirements that the output of runs asked for."""
        return Environment(self.name, (), (), version, edits.variables)

    def asks(self, run: TestRun, release: Release, environment: Environment) -> list[str]:
        """Requirements that the output of a run asks for and the environment lacks."""
        return []

    def pins(self, environment: Environment) -> list[str]:
        """The exact packages of an environment: NAME==VERSION."""
        return []

    @abstractmethod
    def files(
        self, package: str, release: Release, environment: Environment, targets: Sequence[str] = ()
    ) -> dict[str, FolderFile]:
        """The files of `environment/` of a task folder: the Dockerfile and what it copies. `targets`: those that a run
        will be given, which the image may hold compiled; none: all."""

    def trial_environment(self, environment: Environment) -> Environment:
        """The environment of an image in which many faults are tried, one after another: one that costs more to build
        and less to change."""
        return environment

    @abstractmethod
    def command(self, targets: Sequence[str], max_failures: int | None = None) -> tuple[str, ...]:
        """Runs the tests of targets. `max_failures`: it may stop after as many."""

    def read_coverage(self, folder: Path) -> Mapping[str, Sequence[Ranges]] | None:
        """The files of `Coverage` that a run has written to a folder; None if they cannot be read."""
        return None

    def workload(self, targets: Sequence[str]) -> tuple[str, ...]:
        """The command whose CPU time counts in a task of speed; empty where such tasks are not made."""
        return ()

    def locate(self, id: str, tests: Mapping[str, str]) -> tuple[str, str] | None:
        """The test file that has a test, and the function in it; None for a test that no test file has. `tests`: all
        test files as texts."""
        path, _, inner = id.partition("::")
        return path, inner.partition("[")[0].split("::")[-1]


def testbed(tree: Tree) -> dict[str, FolderFile]:
    """The files of a tree where the Dockerfile copies them from."""
    return {f"testbed/{path}": file for path, file in tree.items()}


def settings(environment: Environment) -> str:
    """Lines of a Dockerfile with the variables that a model set."""
    pairs = [text.partition("=") for text in environment.variables]
    return "".join(f'ENV {name}="{value}"\n' for name, _, value in pairs)


def commit_command() -> str:
    """Makes the repository of the tree, the same commit everywhere."""
    variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in GIT_ENV.items())
    return f"git init -q && git add -Af && {variables} {shlex.join(COMMIT)}"


_DOCKERFILE = """FROM {base}
RUN {guards}
RUN mkdir -p {cache} && chown {user}:{user} {cache}
COPY --chown={user}:{user} testbed {testbed}
WORKDIR {testbed}
{variables}USER {user}
RUN {commit}
RUN {warm}
"""
CACHE = "/opt/cache"
"""Folder of the image that tests may write, for what compilers keep."""


def dockerfile(
    programs: Sequence[str], environment: Environment, variables: Mapping[str, str], warm: str
) -> FolderFile:
    """A Dockerfile over a base image that has the programs. `warm`: a command that fills the compiler's cache in
    `CACHE`, after the base is committed; it may fail, and what it leaves in the repository is removed."""
    needed = (*programs, "git", "python3")
    guards = [f"(command -v {name} >/dev/null || (echo 'the base image has no {name}'; exit 1))" for name in needed]
    text = _DOCKERFILE.format(
        base=BASE_IMAGE,
        guards=" && ".join(guards),
        cache=CACHE,
        user=USER,
        testbed=TESTBED,
        variables=settings(environment)
        + "".join(f"ENV {key}={shlex.quote(value)}\n" for key, value in variables.items()),
        commit=commit_command(),
        warm=f"({warm}) >/dev/null 2>&1; git clean -fdxq && git checkout -q .",
    )
    return FolderFile(text.encode())
