"""Python: wheels in a virtual environment, tests by pytest.

    metadata, test extras, tox.ini, requirements files ─▶ wheels ─▶ image ─▶ tests ─┐
         ▲                                                                        │
         └── missing module → package, unknown option or fixture → plugin ◀───────┘

Wheels are downloaded by pip outside of sandboxes and never run there; a package without a wheel is not used. The image
holds them in a virtual environment. The project's own tree stands before it on the path, since the tested package may
be one that the test runner itself imports (pluggy, iniconfig).
"""

import configparser
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from m2forge.compiled import cache_folder
from m2forge.errors import NotFoundError
from m2forge.files import write_atomic
from m2forge.pipelines.swe.action import PYPI, Edits, read_requirement, requirement_name
from m2forge.pipelines.swe.toolchains.toolchain import (
    REPORT_PATH,
    Environment,
    TestRun,
    Toolchain,
    commit_command,
    settings,
    testbed,
)
from m2forge.pipelines.swe.tree import Release, Tree, parse_metadata, read_pyproject
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.folders.suite_tests import VARIABLE
from m2forge.tasks.folders.swe_bench import BASE_IMAGE, TESTBED, USER

METADATA_FOLDER = "/opt/metadata"
PIP_S = 300.0
RUNNABLE_NAME = r"(?:tests?\.|test_|.*_test\.).*py$"
"""Names of test files that pytest can be given."""
_BUILD_FILE = re.compile(r"pyproject\.toml|setup\.(?:py|cfg)")
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
RUN {commit}
"""


class Python(Toolchain):
    name = "python"
    version_command = ("python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    is_compiled = False
    report = "pytest-junit"
    index = PYPI

    def is_project(self, tree: Tree) -> bool:
        return any(_BUILD_FILE.fullmatch(path) for path in tree)

    def targets(self, tree: Tree) -> tuple[str, ...]:
        return tuple(sorted(path for path in tree if self._is_runnable(path)))

    def _is_runnable(self, path: str) -> bool:
        name = PurePosixPath(path).name
        return path.endswith(".py") and self.is_test(path) and bool(re.match(RUNNABLE_NAME, name))

    def requirements(self, release: Release, edits: Edits) -> list[str]:
        runtime, wanted = _edited(release, edits)
        return [*runtime, *wanted]

    def environment(self, release: Release, version: str, asked: Sequence[str], edits: Edits) -> Environment:
        runtime, wanted = _edited(release, edits)
        return replace(resolve_all(runtime, [*wanted, *asked], version), variables=edits.variables)

    def asks(self, run: TestRun, release: Release, environment: Environment) -> list[str]:
        known = set(map(requirement_name, environment.requirements))
        return [text for text in repairs(run, release.tree) if requirement_name(text) not in known]

    def pins(self, environment: Environment) -> list[str]:
        pairs = [parse_wheel_filename(name)[:2] for name in environment.archives]
        return [f"{name}=={version}" for name, version in pairs]

    def files(
        self, package: str, release: Release, environment: Environment, targets: Sequence[str] = ()
    ) -> dict[str, FolderFile]:
        message = parse_metadata(release.metadata)
        own = f"{message.get('Name', package).replace('-', '_')}-{message.get('Version', '0')}.dist-info"
        is_src = any(path.startswith("src/") and path.endswith(".py") for path in release.tree)
        dockerfile = _DOCKERFILE.format(
            base=BASE_IMAGE,
            install=_INSTALL_NAME,
            warm=_WARM,
            metadata=METADATA_FOLDER,
            user=USER,
            testbed=TESTBED,
            path=":".join([TESTBED + ("/src" if is_src else ""), METADATA_FOLDER]),
            settings=settings(environment),
            commit=commit_command(),
        )
        files = {
            "Dockerfile": FolderFile(dockerfile.encode()),
            f"wheels/{_INSTALL_NAME}": FolderFile(_INSTALL.encode()),
            f"metadata/{own}/METADATA": FolderFile(release.metadata.encode(errors="replace")),
        }
        if (points := _entry_points(release.tree)) is not None:
            files[f"metadata/{own}/entry_points.txt"] = FolderFile(points.encode())
        files |= {f"wheels/{name}": FolderFile((wheel_folder() / name).read_bytes()) for name in environment.archives}
        return files | testbed(release.tree)

    def command(self, targets: Sequence[str], max_failures: int | None = None) -> tuple[str, ...]:
        # Without the option for collection errors, one file that cannot be imported keeps all others from running.
        options = ["--continue-on-collection-errors", f"--junitxml={REPORT_PATH}", "-o", "junit_family=xunit1"]
        options += [] if max_failures is None else [f"--maxfail={max_failures}"]
        return (*_PYTEST, *options, *targets)

    def workload(self, targets: Sequence[str]) -> tuple[str, ...]:
        # Pytest replaces the variable.
        return (*_PYTEST, f"--junitxml=${VARIABLE}", "-o", "junit_family=xunit1", *targets)


_PYTEST = ("python3", "-s", "-m", "pytest", "-p", "no:cacheprovider", "-q")


# -- requirements -----------------------------------------------------------------------------------------------------


def _edited(release: Release, edits: Edits) -> tuple[list[str], list[str]]:
    """The project's requirements as a model edited them."""
    found = project_requirements(release.tree, release.metadata)
    runtime, wanted = (edits.apply(requirements, requirement_name) for requirements in found)
    return [*runtime, *edits.requirements], wanted


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
        return Environment("python", tuple(every), resolve(every, python), python)
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
    return Environment("python", tuple(chosen), resolve(chosen, python), python)


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
