"""Node: modules of npm beside the repository; `node_suite` defines how test files run.

npm downloads modules outside of sandboxes and runs none of their scripts. They are those that package.json lists as
dependencies, and of those for development the ones that tests import, with what runs the tests. The same requirements
have the same modules as long as the cache folder lives.
"""

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from m2forge.compiled import cache_folder
from m2forge.errors import NotFoundError
from m2forge.files import write_atomic
from m2forge.pipelines.swe.action import NPM, Edits, module_name
from m2forge.pipelines.swe.toolchains import node_suite
from m2forge.pipelines.swe.toolchains.toolchain import (
    Environment,
    Ranges,
    TestRun,
    Toolchain,
    commit_command,
    settings,
    testbed,
)
from m2forge.pipelines.swe.tree import Release, Tree
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.folders.swe_bench import BASE_IMAGE, TESTBED, USER

NPM_S = 300.0
PROGRAM = "/opt/suite/node_suite.py"
_ENDINGS = (".js", ".mjs", ".cjs")
_LOCK = "node_modules/.package-lock.json"
_MISSING = re.compile(r"Cannot find (?:module|package) '((?:@[\w.-]+/)?[a-z][\w.-]*)")
_DOCKERFILE = """FROM {base}
COPY suite /opt/suite
COPY modules /opt/modules
RUN mkdir -p {modules} && for file in /opt/modules/*.tar; do tar -xf "$file" -C /; done
COPY --chown={user}:{user} testbed {testbed}
WORKDIR {testbed}
{settings}USER {user}
RUN {commit}
"""


class Node(Toolchain):
    name = "node"
    version_command = ("node", "--version")
    is_compiled = False
    report = "programs"
    index = NPM
    coverage_variable = "NODE_V8_COVERAGE"
    manifests = ("package.json",)

    def is_project(self, tree: Tree) -> bool:
        return "package.json" in tree

    def is_source(self, path: str) -> bool:
        return path.endswith(_ENDINGS) and super().is_source(path)

    def targets(self, tree: Tree) -> tuple[str, ...]:
        return tuple(sorted(path for path, file in tree.items() if self._is_runnable(path, file.content)))

    def _is_runnable(self, path: str, content: bytes) -> bool:
        if not (path.endswith(_ENDINGS) and self.is_test(path)) or "fixtures" in path.split("/"):
            return False
        return node_suite.runner(content.decode(errors="replace")) != "script" or bool(
            re.match(r"tests?[._-]|.*[._-]test\.", PurePosixPath(path).name)
        )

    def requirements(self, release: Release, edits: Edits) -> list[str]:
        package = _package(release.tree)
        texts = [release.tree[path].content.decode(errors="replace") for path in release.tree if self._is_script(path)]
        imported = {name for text in texts for name in _imports(text)}
        runners = {node_suite.runner(text) for text in texts} & {"mocha", "ava"}
        development = _table(package, "devDependencies")
        wanted = {name: development[name] for name in sorted(imported | runners) if name in development}
        missing = {name: "*" for name in runners if name not in development}
        every = _table(package, "dependencies") | wanted | missing
        named = [f"{name}@{version}" for name, version in every.items() if ":" not in version]
        return [*edits.apply(named, module_name), *edits.requirements]

    def _is_script(self, path: str) -> bool:
        return path.endswith(_ENDINGS) and self.is_test(path)

    def environment(self, release: Release, version: str, asked: Sequence[str], edits: Edits) -> Environment:
        wanted = [*self.requirements(release, edits), *asked]
        return Environment(self.name, tuple(wanted), (download(wanted),) if wanted else (), version, edits.variables)

    def asks(self, run: TestRun, release: Release, environment: Environment) -> list[str]:
        known = {module_name(text) for text in environment.requirements}
        development = _table(_package(release.tree), "devDependencies")
        text = run.output + "\n".join(run.messages.values())
        found = [name for name in dict.fromkeys(_MISSING.findall(text)) if name not in known]
        return [f"{name}@{development.get(name, '*')}" for name in found]

    def pins(self, environment: Environment) -> list[str]:
        found = []
        for name in environment.archives:
            with tarfile.open(module_folder() / name) as tar:
                opened = tar.extractfile(_LOCK)
                packages = json.loads(opened.read())["packages"] if opened is not None else {}
            found += [f"{path.rpartition('node_modules/')[2]}=={one.get('version')}" for path, one in packages.items()]
        return sorted(set(found))

    def files(
        self, package: str, release: Release, environment: Environment, targets: Sequence[str] = ()
    ) -> dict[str, FolderFile]:
        dockerfile = _DOCKERFILE.format(
            base=BASE_IMAGE,
            modules=node_suite.MODULES,
            user=USER,
            testbed=TESTBED,
            settings=settings(environment),
            commit=commit_command(),
        )
        own = {
            "Dockerfile": FolderFile(dockerfile.encode()),
            f"suite/{PurePosixPath(PROGRAM).name}": FolderFile(Path(node_suite.__file__).read_bytes()),
            "modules/empty.tar": FolderFile(_tar({})),
        }
        own |= {f"modules/{name}": FolderFile((module_folder() / name).read_bytes()) for name in environment.archives}
        return own | testbed(release.tree)

    def command(self, targets: Sequence[str], max_failures: int | None = None) -> tuple[str, ...]:
        return ("python3", "-s", PROGRAM, *targets)

    def read_coverage(self, folder: Path) -> dict[str, list[Ranges]] | None:
        found, processes = dict[str, list[Ranges]](), sorted(folder.glob("coverage-*.json"))
        try:
            for process in processes:
                for script in json.loads(process.read_bytes())["result"]:
                    path = unquote(script["url"]).removeprefix(f"file://{TESTBED}/")
                    parts = [part for function in script["functions"] for part in function["ranges"]]
                    ranges = [(part["startOffset"], part["endOffset"], part["count"]) for part in parts]
                    found.setdefault(path, []).append(ranges)
        except (ValueError, KeyError, TypeError):
            return None
        return found if processes else None

    def locate(self, id: str, tests: Mapping[str, str]) -> tuple[str, str] | None:
        path, _, inner = id.partition("::")
        return path, inner.rpartition(" > ")[2]


def _package(tree: Tree) -> Mapping[str, object]:
    try:
        package = json.loads(tree["package.json"].content)
    except (ValueError, KeyError):
        return {}
    return package if isinstance(package, dict) else {}


def _table(package: Mapping[str, object], key: str) -> dict[str, str]:
    table = package.get(key)
    return {str(name): str(version) for name, version in table.items()} if isinstance(table, dict) else {}


def _imports(text: str) -> set[str]:
    """Packages that a script imports."""
    return set(re.findall(node_suite.IMPORTS.format(r"((?:@[\w.-]+/)?[\w.-]+)(?:/[^'\"]*)?"), text))


def module_folder() -> Path:
    return cache_folder() / "swe" / "modules"


def download(requirements: Sequence[str]) -> str:
    """The name of the tar with the modules that fulfil requirements, in the cache folder."""
    name = hashlib.sha256(json.dumps(sorted(requirements)).encode()).hexdigest()[:24] + ".tar"
    if (module_folder() / name).is_file():
        return name
    if shutil.which("npm") is None:
        raise NotFoundError("npm: not found; install Node with npm, which downloads modules")
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "install", "--prefix", scratch, "--ignore-scripts", "--no-audit", "--no-fund"]
        command += ["--no-bin-links", "--omit=optional", "--legacy-peer-deps", "--loglevel=error", "--", *requirements]
        try:
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=NPM_S)
        except subprocess.TimeoutExpired as error:
            raise NotFoundError(f"npm install: over {NPM_S:g} s for {', '.join(requirements)}") from error
        if done.returncode:
            raise NotFoundError(f"npm install {' '.join(requirements)}: {done.stderr.strip()[-500:]}")
        files = {
            str(path.relative_to(scratch)): path.read_bytes()
            for path in sorted((Path(scratch) / "node_modules").rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
    write_atomic(module_folder() / name, _tar(files))
    return name


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
