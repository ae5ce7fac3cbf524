"""Go: modules without foreign packages, or with all of them in `vendor/`; tests by `go test -json`.

A target is a package by its import path, a test's id `example.com/sums/inner::TestTotal/empty`. The image holds Go's
build cache with what the base tree and its tests import, so that a run compiles only packages with their tests.
"""

import posixpath
import re
from collections.abc import Mapping, Sequence

from m2forge.errors import DataError
from m2forge.pipelines.swe.action import Edits
from m2forge.pipelines.swe.toolchains.toolchain import CACHE, TEST_PATH, Environment, Toolchain, dockerfile, testbed
from m2forge.pipelines.swe.tree import Release, Tree
from m2forge.tasks.folders.folder import FolderFile

MODULE, VENDORED = "go.mod", "vendor/modules.txt"
_VARIABLES = {
    "CGO_ENABLED": "0",
    "GO111MODULE": "on",
    "GOCACHE": f"{CACHE}/go-build",
    "GOPATH": f"{CACHE}/go",
    "GOPROXY": "off",
    "GOTOOLCHAIN": "local",
}
_WARM = r"go build $(go list -e -deps -test ./... | grep -v ' \|\.test$')"
"""Compiles all packages and what tests import. Each run links its test program again, and compiles a package together
with the tests inside of it, so neither is done here."""
_REQUIRED = re.compile(r"^(?:require\s+)?([\w.-]+\.[\w.-]+/\S+)\s+v\d\S*(?!.*//\s*indirect)", re.MULTILINE)


class Go(Toolchain):
    name = "go"
    version_command = ("go", "version")
    report = "go-json"
    manifests = (MODULE,)
    test_path = rf"{TEST_PATH}|(?:^|/)testdata/"

    def is_project(self, tree: Tree) -> bool:
        return MODULE in tree

    def targets(self, tree: Tree) -> tuple[str, ...]:
        found = re.search(r"^module\s+\"?([^\s\"]+)", _text(tree, MODULE), re.MULTILINE)
        modules = {posixpath.dirname(path) for path in tree if posixpath.basename(path) == MODULE} - {""}
        folders = {posixpath.dirname(path) for path in tree if path.endswith("_test.go")}
        own = [folder for folder in folders if not _is_ignored(folder) and not _is_inside(folder, modules)]
        return tuple(sorted(posixpath.join(found[1], folder).rstrip("/") for folder in own)) if found else ()

    def environment(self, release: Release, version: str, asked: Sequence[str], edits: Edits) -> Environment:
        required = _REQUIRED.findall(re.sub(r"^\s+", "", _text(release.tree, MODULE), flags=re.MULTILINE))
        if required and VENDORED not in release.tree:
            raise DataError(f"{MODULE}: requires {', '.join(required[:5])}, and the tree has no {VENDORED}")
        return Environment(self.name, (), (), version, edits.variables)

    def files(
        self, package: str, release: Release, environment: Environment, targets: Sequence[str] = ()
    ) -> dict[str, FolderFile]:
        flags = "-mod=vendor" if VENDORED in release.tree else "-mod=mod"
        recipe = dockerfile(("go",), environment, {**_VARIABLES, "GOFLAGS": flags}, _WARM)
        return {"Dockerfile": recipe, **testbed(release.tree)}

    def command(self, targets: Sequence[str], max_failures: int | None = None) -> tuple[str, ...]:
        # Without -count, results of an earlier run are reported again.
        options = ["-json", "-count=1", "-vet=off", "-timeout=0", *(["-failfast"] if max_failures == 1 else [])]
        return ("sh", "-c", 'exec go test "$@" >"$TEST_REPORT" 2>&1', "sh", *options, *targets)

    def locate(self, id: str, tests: Mapping[str, str]) -> tuple[str, str] | None:
        target, _, inner = id.partition("::")
        function = inner.partition("/")[0]
        defined = re.compile(rf"^func {re.escape(function)}\(", re.MULTILINE)
        found = [path for path, text in tests.items() if path.endswith("_test.go") and defined.search(text)]
        fitting = [path for path in found if f"/{target}/".endswith(f"/{posixpath.dirname(path)}/".replace("//", "/"))]
        return (max(sorted(fitting), key=len), function) if fitting else None


def _text(tree: Tree, path: str) -> str:
    return tree[path].content.decode(errors="replace") if path in tree else ""


def _is_ignored(folder: str) -> bool:
    """Whether `./...` leaves a folder out."""
    return any(part in ("vendor", "testdata") or part.startswith(("_", ".")) for part in folder.split("/"))


def _is_inside(folder: str, others: set[str]) -> bool:
    return any(f"{folder}/".startswith(f"{other}/") for other in others)
