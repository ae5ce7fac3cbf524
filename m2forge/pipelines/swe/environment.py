"""The environment of a candidate, built by rules: its metadata and what its tests print in, pinned wheels, an image and
runs of its tests out.

    metadata, test extras, tox.ini, requirements files ─▶ wheels ─▶ image ─▶ tests ─┐
         ▲                                                                        │
         └── missing module → package, unknown option or fixture → plugin ◀───────┘

Wheels are downloaded by pip outside of sandboxes and never run there; a package without a wheel is not used. The image
holds them in a virtual environment. The project's own tree stands before it on the path, since the tested package may
be one that the test runner itself imports (pluggy, iniconfig). Tests run in fresh sandboxes without a network.
"""

import configparser
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from m2forge.compiled import cache_folder
from m2forge.errors import DataError, NotFoundError
from m2forge.files import write_atomic
from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.action import NO_EDITS, Edits, read_requirement, requirement_name
from m2forge.pipelines.swe.candidate import COMMIT, GIT_ENV, Candidate, Tree, parse_metadata, read_pyproject
from m2forge.protocols import Command, Outcome, OutcomeReason, Sandbox
from m2forge.records import JsonValue
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.folders.folder import FolderFile, write_folder
from m2forge.tasks.folders.swe_bench import BASE_IMAGE, TESTBED, USER
from m2forge.tasks.folders.task_image import TaskImage, task_image

MAX_ROUNDS = 5
"""Images that are built for one candidate before it is given up."""
MAX_REPORT_BYTES = 64 << 20
LOGS = "/logs/verifier"
REPORT = "junit.xml"
METADATA_FOLDER = "/opt/metadata"
PIP_S = 300.0

_TEST_EXTRAS = ("test", "tests", "testing")
_TEST_FILES = re.compile(
    r"^(?:requirements[/_-])?(?:tests?|tests?[_-]requirements|requirements[_-]tests?)\.(?:txt|in)$"
)
_TOOLS = frozenset(
    {
        *("tox", "nox", "pre-commit", "flake8", "black", "isort", "mypy", "ruff", "pylint", "sphinx", "build", "twine"),
        *("coveralls", "codecov", "coverage", "pyright", "wheel", "setuptools-scm", "towncrier", "uv", "pip", "hatch"),
    }
)
"""Packages of test requirements that tests do not import."""
_PACKAGES = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "dateutil": "python-dateutil",
    "google.protobuf": "protobuf",
    "jwt": "PyJWT",
    "OpenSSL": "pyOpenSSL",
    "PIL": "pillow",
    "pkg_resources": "setuptools<80",
    "pytest_benchmark": "pytest-benchmark",
    "serial": "pyserial",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Modules whose package has another name."""
_OPTIONS = {
    "--asyncio": "pytest-asyncio",
    "--benchmark": "pytest-benchmark",
    "--cov": "pytest-cov",
    "--dist": "pytest-xdist",
    "--doctest-glob-plus": "pytest-doctestplus",
    "--doctest-plus": "pytest-doctestplus",
    "--hypothesis": "hypothesis",
    "--mpl": "pytest-mpl",
    "--no-cov": "pytest-cov",
    "--numprocesses": "pytest-xdist",
    "--randomly": "pytest-randomly",
    "--reruns": "pytest-rerunfailures",
    "--snapshot": "syrupy",
    "--strict-data-files": "pytest-datadir",
    "--timeout": "pytest-timeout",
    "-n": "pytest-xdist",
    "asyncio_mode": "pytest-asyncio",
    "timeout": "pytest-timeout",
}
_FIXTURES = {
    "aiohttp_client": "pytest-aiohttp",
    "benchmark": "pytest-benchmark",
    "datadir": "pytest-datadir",
    "faker": "faker",
    "freezer": "pytest-freezer",
    "httpbin": "pytest-httpbin",
    "httpserver": "pytest-httpserver",
    "mocker": "pytest-mock",
    "requests_mock": "requests-mock",
    "snapshot": "syrupy",
    "subtests": "pytest-subtests",
    "time_machine": "time-machine",
}

_INSTALL_NAME = "install"
_INSTALL = """import pathlib
import sysconfig
import zipfile

for wheel in sorted(pathlib.Path(__file__).parent.glob("*.whl")):
    zipfile.ZipFile(wheel).extractall(sysconfig.get_path("purelib"))
"""
_WARM = "PYTHONPATH= PYTHONDONTWRITEBYTECODE= /opt/venv/bin/python -m pytest --version"
"""Stores the bytecode of the test runner in the image; every run in a fresh sandbox would compile it again."""
_DOCKERFILE = """FROM {base}
COPY wheels /opt/wheels
RUN python3 -m venv --without-pip /opt/venv && /opt/venv/bin/python /opt/wheels/{install} && {warm}
COPY metadata {metadata}
COPY --chown={user}:{user} testbed {testbed}
WORKDIR {testbed}
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV PYTHONPATH={path}
ENV PYTHONDONTWRITEBYTECODE=1
{settings}USER {user}
RUN git init -q && git add -Af && {variables} {commit}
"""


@dataclass(frozen=True, slots=True)
class Environment:
    requirements: tuple[str, ...]
    """What the rules asked for."""
    wheels: tuple[str, ...]
    """File names of the pinned wheels, in the cache folder."""
    python: str
    """Version for which wheels were chosen: 3.12."""
    variables: tuple[str, ...] = ()
    """NAME=VALUE of environment variables that a model set."""

    @property
    def pins(self) -> list[str]:
        pairs = [parse_wheel_filename(name)[:2] for name in self.wheels]
        return [f"{name}=={version}" for name, version in pairs]


class Outcomes(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class TestRun:
    """What one run of tests reported."""

    __test__ = False
    tests: Mapping[str, Outcomes] = field(default_factory=dict)
    """By pytest's id. A test that a report lists twice with different outcomes has failed."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """The first line of why a test failed, and of files that could not be collected, by their path."""
    output: str = ""
    problem: str | None = None
    """Why the run decides nothing."""
    cpu_s: float = 0.0

    @property
    def passed(self) -> set[str]:
        return {id for id, outcome in self.tests.items() if outcome is Outcomes.PASSED}


# -- requirements -----------------------------------------------------------------------------------------------------


def project_requirements(tree: Tree, metadata: str) -> tuple[list[str], list[str]]:
    """What the project needs at run time, and what its test configuration names."""
    message = parse_metadata(metadata)
    runtime, wanted = list[str](), ["pytest"]
    for text in message.get_all("Requires-Dist", []):
        extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)['"]""", text)
        if extra is None:
            runtime.append(text)
        elif extra[1].lower() in _TEST_EXTRAS:
            wanted.append(text.partition(";")[0])
    table = read_pyproject(tree)
    project, groups = table.get("project", {}), table.get("dependency-groups", {})
    if isinstance(project, dict) and "Requires-Dist" not in message:
        runtime += [str(text) for text in project.get("dependencies", [])]
    extras = project.get("optional-dependencies", {}) if isinstance(project, dict) else {}
    for named in (extras, groups):
        if isinstance(named, dict):
            wanted += [text for name in _TEST_EXTRAS for text in named.get(name, []) if isinstance(text, str)]
    for path, file in tree.items():
        if _TEST_FILES.match(path) or path in ("tests/requirements.txt", "test/requirements.txt"):
            wanted += file.content.decode(errors="replace").splitlines()
    if (tox := tree.get("tox.ini")) is not None:
        wanted += _tox_requirements(tox.content.decode(errors="replace"))
    return _usable(runtime), [text for text in _usable(wanted) if requirement_name(text) not in _TOOLS]


def _tox_requirements(text: str) -> list[str]:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    try:
        parser.read_string(text)
        lines = parser.get("testenv", "deps", fallback="").splitlines()
    except configparser.Error:
        return []
    # A line with a factor (py311: pytest) belongs to some environments only.
    return [line.rpartition(": ")[2] for line in lines if "{" not in line]


def _usable(texts: Iterable[str]) -> list[str]:
    """Requirements of an index that apply here, each once."""
    found: dict[str, str] = {}
    for text in texts:
        try:
            requirement = Requirement(text.split("#")[0].strip())
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            with suppress(ValueError):
                found.setdefault(canonicalize_name(requirement.name), read_requirement(str(requirement)))
    return list(found.values())


def repairs(run: TestRun, tree: Tree) -> list[str]:
    """Packages that the output of a run asks for."""
    text = run.output + "\n".join(run.messages.values())
    own = {part.removesuffix(".py") for path in tree for part in path.split("/")[:2]}
    found = []
    for module in re.findall(r"No module named '([\w.]+)'", text):
        top = module.partition(".")[0]
        if top not in own:
            found.append(_PACKAGES.get(module) or _PACKAGES.get(top) or top.replace("_", "-"))
    for line in re.findall(r"unrecognized arguments: (.+)", text):
        for option in shlex.split(line.replace("'", "")):
            found += [plugin for prefix, plugin in _OPTIONS.items() if option.startswith(prefix)]
    found += [_OPTIONS[name] for name in re.findall(r"Unknown config option: (\w+)", text) if name in _OPTIONS]
    found += [_FIXTURES[name] for name in re.findall(r"fixture '(\w+)' not found", text) if name in _FIXTURES]
    for line in re.findall(r"Missing required plugins: (.+)", text):
        found += [name.strip() for name in line.split(",")]
    if "async def functions are not natively supported" in text:
        found.append("pytest-asyncio")
    # The project's code prints what it likes: nothing but names of the index goes to pip.
    return _usable(found)


# -- wheels -----------------------------------------------------------------------------------------------------------


def wheel_folder() -> Path:
    return cache_folder() / "swe" / "wheels"


def resolved_path(requirements: Sequence[str], python: str) -> Path:
    """The record of which wheels fulfil requirements: a JSON list of their file names."""
    key = hashlib.sha256(json.dumps([sorted(requirements), python]).encode()).hexdigest()[:24]
    return wheel_folder().with_name("resolved") / f"{key}.json"


def resolve(requirements: Sequence[str], python: str) -> tuple[str, ...]:
    """File names of the wheels that fulfil requirements, in the cache folder. The same requirements have the same
    wheels as long as the cache folder lives."""
    folder, record = wheel_folder(), resolved_path(requirements, python)
    if record.is_file():
        names = json.loads(record.read_text())
        if all((folder / name).is_file() for name in names):
            return tuple(names)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-input"]
        command += ["--only-binary", ":all:", "--python-version", python, "--dest", scratch, *sorted(requirements)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as error:
            raise NotFoundError(f"pip download: over {PIP_S:g} s for {', '.join(requirements)}") from error
        if done.returncode:
            raise NotFoundError(f"pip download {' '.join(requirements)}: {done.stderr.strip()[-500:]}")
        names = sorted(path.name for path in Path(scratch).iterdir())
        for name in names:
            (Path(scratch) / name).replace(folder / name)
    write_atomic(record, json.dumps(names))
    return tuple(names)


def resolve_all(runtime: Sequence[str], wanted: Sequence[str], python: str) -> Environment:
    """All that tests name if it can be had, else what is needed and those of the others that have wheels."""
    try:
        every = (*runtime, *wanted)
        return Environment(tuple(every), resolve(every, python), python)
    except NotFoundError:
        pass
    chosen = list(runtime)
    resolve(chosen, python) if chosen else ()
    for text in wanted:
        try:
            resolve([*chosen, text], python)
            chosen.append(text)
        except NotFoundError:
            continue
    return Environment(tuple(chosen), resolve(chosen, python), python)


# -- the image --------------------------------------------------------------------------------------------------------


def environment_files(candidate: Candidate, environment: Environment) -> dict[str, FolderFile]:
    """The files of `environment/` of the task folder."""
    message = parse_metadata(candidate.metadata)
    own = f"{message.get('Name', candidate.package).replace('-', '_')}-{message.get('Version', '0')}.dist-info"
    is_src = any(path.startswith("src/") and path.endswith(".py") for path in candidate.base)
    variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in GIT_ENV.items())
    settings = [text.partition("=") for text in environment.variables]
    dockerfile = _DOCKERFILE.format(
        base=BASE_IMAGE,
        install=_INSTALL_NAME,
        warm=_WARM,
        metadata=METADATA_FOLDER,
        user=USER,
        testbed=TESTBED,
        path=":".join([TESTBED + ("/src" if is_src else ""), METADATA_FOLDER]),
        settings="".join(f'ENV {name}="{value}"\n' for name, _, value in settings),
        variables=variables,
        commit=shlex.join(COMMIT),
    )
    files = {
        "Dockerfile": FolderFile(dockerfile.encode()),
        f"wheels/{_INSTALL_NAME}": FolderFile(_INSTALL.encode()),
        f"metadata/{own}/METADATA": FolderFile(candidate.metadata.encode(errors="replace")),
    }
    if (points := _entry_points(candidate.base)) is not None:
        files[f"metadata/{own}/entry_points.txt"] = FolderFile(points.encode())
    files |= {f"wheels/{name}": FolderFile((wheel_folder() / name).read_bytes()) for name in environment.wheels}
    return files | {f"testbed/{path}": file for path, file in candidate.base.items()}


def _entry_points(tree: Tree) -> str | None:
    """Entry points of pyproject.toml, in the form of installed packages."""
    project = read_pyproject(tree).get("project", {})
    if not isinstance(project, dict):
        return None
    groups: dict[str, object] = {"console_scripts": project.get("scripts", {})}
    own = project.get("entry-points", {})
    groups |= own if isinstance(own, dict) else {}
    lines = []
    for group, points in groups.items():
        if isinstance(points, dict) and points:
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    return "\n".join(lines) + "\n" if lines else None


@dataclass(frozen=True, slots=True)
class Runner:
    """Builds images and runs tests in them."""

    config: SandboxConfig
    """Backend and limits of sandboxes."""
    base_image: str
    """The image that stands for the Dockerfile's base: a name of the store, or `host`."""
    timeout_s: float
    """Limit of one run of a project's tests."""

    async def python(self) -> str:
        """The version of the base image's Python: 3.12."""
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        async with self.opened(TaskImage(self.base_image)) as sandbox:
            outcome = await sandbox.run(Command(("python3", "-c", program), timeout_s=30.0))
        if not outcome.is_success:
            raise NotFoundError(f"base_image: {self.base_image!r} has no python3: {outcome.stderr.text()[-300:]}")
        return outcome.stdout.text().strip()

    async def image(self, candidate: Candidate, environment: Environment) -> TaskImage:
        """The image of the files that the task folder will have, built once."""
        with tempfile.TemporaryDirectory() as scratch:
            context = Path(scratch) / "environment"
            write_folder(context, environment_files(candidate, environment))
            try:
                return await task_image(context, None, self.config, self.base_image)
            except DataError as error:
                raise DataError(str(error).replace(f"{scratch}/", "")) from error

    async def run(self, image: TaskImage, patches: Sequence[str], files: Sequence[str], *options: str) -> TestRun:
        """Run test files in a fresh sandbox of the image, after patches were applied."""
        async with self.opened(image) as sandbox:
            for patch in patches:
                done = await apply_patch(sandbox, patch)
                if not done.is_success:
                    return TestRun(problem="a patch does not apply", output=done.stdout.text()[-2000:])
            return await self.run_in(sandbox, files, *options)

    async def run_in(
        self, sandbox: Sandbox, files: Sequence[str], *options: str, timeout_s: float | None = None
    ) -> TestRun:
        """Run test files in a sandbox as it is."""
        command = Command(pytest_command(files, *options), merges_stderr=True, timeout_s=timeout_s)
        outcome = await sandbox.run(command)
        await sandbox.kill_all()
        output = outcome.stdout.text()
        if outcome.reason not in (OutcomeReason.EXITED, OutcomeReason.SIGNALLED):
            return TestRun(problem=f"unfinished: {outcome.reason}", output=output[-4000:], cpu_s=outcome.cpu_s)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                await sandbox.download(LOGS, Path(scratch), MAX_REPORT_BYTES)
                report = (Path(scratch) / REPORT).read_bytes()
            except (NotFoundError, DataError, OSError) as error:
                return TestRun(problem=f"no report: {error}", output=output[-20_000:], cpu_s=outcome.cpu_s)
        return replace(parse_report(report, output[-20_000:], files), cpu_s=outcome.cpu_s)

    @asynccontextmanager
    async def opened(self, image: TaskImage) -> AsyncIterator[Sandbox]:
        """A sandbox of the image without a network."""
        sandbox = await open_sandbox(self._sandbox_config(image), env=image.env)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def _sandbox_config(self, image: TaskImage) -> SandboxConfig:
        own = {
            "image": image.base,
            "layers": (*image.layers, *self.config.layers),
            "workspace": TESTBED,
            "user": f"{USER}:{USER}",
            "network": "none",
            "allow": (),
            "timeout_s": self.timeout_s,
        }
        return SandboxConfig.model_validate(self.config.model_dump() | own)


async def apply_patch(sandbox: Sandbox, patch: str) -> Outcome:
    """Apply a patch to the sandbox's repository."""
    command = ("git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn", "--allow-empty", "-")
    return await sandbox.run(Command(command, stdin=patch.encode(), merges_stderr=True))


def pytest_command(files: Sequence[str], *options: str) -> tuple[str, ...]:
    """Without the option for collection errors, one file that cannot be imported keeps all others from running."""
    return (
        *("python3", "-s", "-m", "pytest", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", "-q"),
        *("--continue-on-collection-errors", f"--junitxml={LOGS}/{REPORT}", *options, *files),
    )


def parse_report(report: bytes, output: str, files: Sequence[str]) -> TestRun:
    """The outcome of every test of the files that were run, by JUnit's report."""
    modules = {
        re.sub(r"\.py$", "", file.partition("::")[0]).replace("/", "."): file.partition("::")[0] for file in files
    }
    tests: dict[str, Outcomes] = {}
    messages: dict[str, str] = {}
    try:
        if b"<!DOCTYPE" in report or b"<!ENTITY" in report:
            raise ElementTree.ParseError("entities expand without bound")
        cases = list(ElementTree.fromstring(report).iter("testcase"))
    except ElementTree.ParseError as error:
        return TestRun(problem=f"no report: {error}", output=output)
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        id = _test_id(case, modules)
        if problem is not None:
            messages[id or str(case.get("name"))] = (problem.get("message") or problem.text or "")[:500]
        if id is None:
            continue
        is_skipped = case.find("skipped") is not None
        found = Outcomes.FAILED if problem is not None else Outcomes.SKIPPED if is_skipped else Outcomes.PASSED
        tests[id] = found if tests.get(id, found) is found else Outcomes.FAILED
    problem_text = None if tests else "no test was reported"
    return TestRun(tests, messages, output, problem_text)


def _test_id(case: ElementTree.Element, modules: Mapping[str, str]) -> str | None:
    """Pytest's id of a test case; None for a file that could not be collected. `modules`: files that were run, by the
    name of their module. A case's own attribute `file` is where the function is defined, perhaps in a base class."""
    owner, name = case.get("classname", ""), case.get("name", "")
    parts = owner.split(".")
    for num in range(len(parts), 0, -1):
        if (file := modules.get(".".join(parts[:num]))) is not None:
            return "::".join([file, *parts[num:], name])
    return None


@dataclass(frozen=True, slots=True)
class Built:
    environment: Environment
    image: TaskImage
    run: TestRun
    """Tests of the new tree, with the golden patch."""


async def build(candidate: Candidate, runner: Runner, edits: Edits = NO_EDITS) -> Built | Rejection:
    """The environment in which the new tree's tests run, repaired by rules until they ask for nothing more. `edits`:
    what a model changed about their requirements."""
    python = await runner.python()
    runtime, wanted = map(edits.apply, project_requirements(candidate.base, candidate.metadata))
    runtime = [*runtime, *edits.requirements]
    asked: list[JsonValue] = []
    for number in range(MAX_ROUNDS):
        try:
            environment = replace(resolve_all(runtime, wanted, python), variables=edits.variables)
            image = await runner.image(candidate, environment)
        except (NotFoundError, DataError) as error:
            return Rejection("environment", {"problem": str(error), "requirements": [*runtime, *wanted]})
        run = await runner.run(image, (candidate.patch, candidate.test_patch), candidate.test_files)
        known = {*map(requirement_name, environment.requirements), *edits.removed}
        more = [text for text in repairs(run, candidate.base) if requirement_name(text) not in known]
        if not more or number == MAX_ROUNDS - 1:
            break
        asked += more
        wanted = [*wanted, *more]
    if run.problem is not None:
        evidence: dict[str, JsonValue] = {"problem": run.problem, "output": run.output[-3000:], "asked": asked}
        evidence["requirements"] = list[JsonValue](environment.requirements)
        return Rejection("unfinished" if run.problem.startswith("unfinished") else "no test parsed", evidence)
    return Built(environment, image, run)
