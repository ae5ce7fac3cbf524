"""Rust: packages without foreign crates, or with all of them vendored; tests by `cargo test`.

A target is a file that cargo makes a test program of, and `doc` for the examples in documentation:

    src/lib.rs, src/main.rs, tests/NAME.rs, doc         of the root package
    MEMBER/src/lib.rs, …                                of a member of a workspace

A test's id is `tests/sums.rs::module::name`. Each target is compiled and run by itself: cargo runs no test at all if
one program does not compile. Tests inside of source files and examples count as P2P alone, since a patch of the source
brings them. The image holds a target folder with the test programs of the base tree, those of a candidate's targets.
Cargo goes by the time of files, and not by their content, so a run first touches those whose content is not what was
compiled last.
"""

import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from m2forge.errors import DataError
from m2forge.pipelines.swe.action import Edits
from m2forge.pipelines.swe.toolchains.toolchain import CACHE, Environment, Toolchain, dockerfile, testbed
from m2forge.pipelines.swe.tree import Release, Tree
from m2forge.tasks.folders.folder import FolderFile

MANIFEST, DOC = "Cargo.toml", "doc"
_TABLES = ("dependencies", "dev-dependencies", "build-dependencies")
_VARIABLES = {
    "CARGO_HOME": f"{CACHE}/cargo",
    "CARGO_INCREMENTAL": "0",
    "CARGO_NET_OFFLINE": "true",
    "CARGO_PROFILE_DEV_DEBUG": "0",
    "CARGO_PROFILE_TEST_DEBUG": "0",
    "CARGO_TARGET_DIR": f"{CACHE}/target",
    "RUST_BACKTRACE": "0",
}
_DYNAMIC = {"CARGO_BUILD_RUSTFLAGS": "-Cprefer-dynamic"}
"""Links the standard library dynamically, which takes a third of the time."""
_INCREMENTAL = ("CARGO_INCREMENTAL", "1")
"""An image with rustc's incremental state compiles twice as long, and a fault in it half as long."""
_TOUCH = (
    'list=${CARGO_TARGET_DIR:-target}/files; mkdir -p "${list%/*}"; '
    r"find . \( -path ./.git -o -path ./vendor -o -path ./target \) -prune -o -type f -exec sha256sum {} + "
    '| LC_ALL=C sort >"$list.new"; touch "$list"; LC_ALL=C comm -13 "$list" "$list.new" | cut -c67- '
    '| while IFS= read -r name; do touch -c "$name"; done; mv "$list.new" "$list"'
)
"""Touches files that differ from the list of the last time, and writes the list: SHA-256 and name."""
_SCRIPT = f"""{_TOUCH}
is_whole=$1; shift
while [ $# -gt 0 ]; do
    echo "@target $1"
    cargo test --offline --color=never $2 -- --test-threads=2
    status=$?; echo; echo "@status $status"
    [ $status = 0 ] || $is_whole || break
    shift 2
done >"$TEST_REPORT" 2>&1
"""
"""Arguments: whether to go on after a failure, then each target with its options. With one thread the output of tests
would stand between a test's name and its outcome."""


class Rust(Toolchain):
    name = "rust"
    version_command = ("rustc", "--version")
    report = "libtest"
    manifests = (MANIFEST,)

    def is_project(self, tree: Tree) -> bool:
        return MANIFEST in tree

    def targets(self, tree: Tree) -> tuple[str, ...]:
        return tuple(target for folder in _packages(tree) for target in sorted(_package_targets(tree, folder)))

    def environment(self, release: Release, version: str, asked: Sequence[str], edits: Edits) -> Environment:
        foreign = sorted({name for folder in _packages(release.tree) for name in _foreign(release.tree, folder)})
        configs = (release.tree.get(path) for path in (".cargo/config.toml", ".cargo/config"))
        if foreign and not any(file is not None and b"vendored-sources" in file.content for file in configs):
            raise DataError(f"{MANIFEST}: depends on {', '.join(foreign[:5])}, and .cargo/config.toml vendors nothing")
        return Environment(self.name, (), (), version, edits.variables)

    def files(
        self, package: str, release: Release, environment: Environment, targets: Sequence[str] = ()
    ) -> dict[str, FolderFile]:
        programs = [_options(target) for target in targets if not _is_doc(target)] or ["--workspace"]
        warm = "; ".join([_TOUCH, *(f"cargo test --offline --no-run {program}" for program in programs)])
        variables = _VARIABLES | ({} if _aborts(release.tree) else _DYNAMIC)
        variables |= dict([_INCREMENTAL]) if "=".join(_INCREMENTAL) in environment.variables else {}
        recipe = dockerfile(("cargo", "rustc", "cc"), environment, variables, warm)
        return {"Dockerfile": recipe, **testbed(release.tree)}

    def trial_environment(self, environment: Environment) -> Environment:
        return replace(environment, variables=(*environment.variables, "=".join(_INCREMENTAL)))

    def command(self, targets: Sequence[str], max_failures: int | None = None) -> tuple[str, ...]:
        pairs = [word for target in targets for word in (target, _options(target))]
        return ("sh", "-c", _SCRIPT, "sh", "false" if max_failures == 1 else "true", *pairs)

    def locate(self, id: str, tests: Mapping[str, str]) -> tuple[str, str] | None:
        target, _, inner = id.partition("::")
        function = inner.split("::")[-1]
        defined = re.compile(rf"\bfn {re.escape(function)}\b")
        found = [path for path, text in sorted(tests.items()) if path.endswith(".rs") and defined.search(text)]
        if target in tests:
            # A macro may have made it.
            return (found[0] if found and target not in found else target), function
        # A module of tests beside the source, of the same package.
        source = posixpath.dirname(target)
        inside = [path for path in found if not _is_doc(target) and path.startswith(f"{source}/")]
        return (inside[0], function) if inside else None


def _manifest(tree: Tree, folder: str) -> dict[str, object]:
    try:
        return tomllib.loads(tree[posixpath.join(folder, MANIFEST)].content.decode())
    except (KeyError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


def _aborts(tree: Tree) -> bool:
    """Whether programs abort at a panic, which the dynamic standard library does not."""
    profiles = _manifest(tree, "").get("profile")
    development = profiles.get("dev") if isinstance(profiles, dict) else None
    return isinstance(development, dict) and "panic" in development


def _packages(tree: Tree) -> list[str]:
    """Folders of the root package and of the workspace's members; "" is the root."""
    folders = [""]
    if "workspace" in _manifest(tree, ""):
        inner = {posixpath.dirname(path) for path in tree if posixpath.basename(path) == MANIFEST} - {""}
        folders += sorted(folder for folder in inner if not {"vendor", "target"} & set(folder.split("/")))
    return [folder for folder in folders if "package" in _manifest(tree, folder)]


def _package_targets(tree: Tree, folder: str) -> Iterator[str]:
    start = f"{folder}/" if folder else ""
    sources = {
        path: file.content.decode(errors="replace")
        for path, file in tree.items()
        if path.startswith(f"{start}src/") and path.endswith(".rs")
    }
    has_tests = any("#[test]" in text or "#[cfg(test)]" in text for text in sources.values())
    for name in ("src/lib.rs", "src/main.rs"):
        if start + name in sources and has_tests:
            yield start + name
    if f"{start}src/lib.rs" in sources and any(re.search(r"//[/!] ```", text) for text in sources.values()):
        yield start + DOC
    for path in tree:
        if re.fullmatch(rf"{re.escape(start)}tests/(?:[^/]+\.rs|[^/]+/main\.rs)", path):
            yield path


def _foreign(tree: Tree, folder: str) -> Iterator[str]:
    """Crates of a package that are not in the tree."""
    manifest = _manifest(tree, folder)
    tables = [manifest.get(name) for name in _TABLES]
    targets = manifest.get("target")
    for one in targets.values() if isinstance(targets, dict) else ():
        tables += [one.get(name) for name in _TABLES] if isinstance(one, dict) else []
    for table in tables:
        for name, value in table.items() if isinstance(table, dict) else ():
            if not isinstance(value, dict) or not (value.get("path") or value.get("workspace")):
                yield name


def _options(target: str) -> str:
    """Cargo's options for a target."""
    for name, option in {"src/lib.rs": "--lib", "src/main.rs": "--bins", DOC: "--doc"}.items():
        if f"/{target}".endswith(f"/{name}"):
            return _at(target.removesuffix(name).rstrip("/")) + option
    # The last one: a member may lie in a folder of this name too.
    folder, _, name = f"/{target}".rpartition("/tests/")
    return _at(folder.lstrip("/")) + f"--test={name.removesuffix('.rs').removesuffix('/main')}"


def _is_doc(target: str) -> bool:
    return posixpath.basename(target) == DOC


def _at(folder: str) -> str:
    return f"--manifest-path={folder}/{MANIFEST} " if folder else ""
