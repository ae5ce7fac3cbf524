"""Candidates: an old and a new tree of one project in, a base with its golden patch and its test patch out.

    old tree ──▶ base (one git commit, always the same hash)
    new tree ──▶ patch        changes of all files but tests: the golden patch
             └─▶ test_patch   changes of test files and of build files for tests alone: hidden from agents

Generated metadata (PKG-INFO, *.egg-info) is no part of a tree. A candidate needs a permissive licence by every source
that names one. It changes both source and tests, or in Python tests alone, or source alone if its commit or pull
request says that it is a refactoring; anything else is refused with a reason and evidence.
"""

import json
import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from m2forge.errors import DataError
from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.grammar import failing_tests
from m2forge.pipelines.swe.toolchains.python import Python
from m2forge.pipelines.swe.toolchains.table import TOOLCHAINS, detect
from m2forge.pipelines.swe.toolchains.toolchain import SOURCE_ENDINGS, Toolchain
from m2forge.pipelines.swe.tree import COMMIT, GIT_ENV, Release, Tree, parse_metadata, read_pyproject
from m2forge.records import JsonValue
from m2forge.tasks.folders.folder import FileKind, FolderFile, read_files, write_files
from m2forge.tasks.folders.swe_tests import patched_files


@dataclass(frozen=True, slots=True)
class Text:
    """A text about a change that is not part of its patch."""

    kind: str
    """issue, pull request, commit, changelog, readme."""
    text: str


@dataclass(frozen=True, slots=True)
class Candidate:
    id: str
    package: str
    language: str
    """Name of the toolchain."""
    origin: Mapping[str, JsonValue]
    """Where both trees come from: kind, versions or commits, digests."""
    base: Tree
    metadata: str
    """The old PKG-INFO, or one with name and version alone."""
    licence: str
    patch: str
    test_patch: str
    base_commit: str
    texts: tuple[Text, ...]
    targets: tuple[str, ...]
    """Arguments of the toolchain's command that run tests of the new tree."""
    tests: Mapping[str, str]
    """Text of the test files that the test patch changes, as they are after it."""

    @property
    def toolchain(self) -> Toolchain:
        return TOOLCHAINS[self.language]

    @property
    def release(self) -> Release:
        """The base."""
        return Release(self.base, self.metadata)

    def to_dict(self) -> dict[str, JsonValue]:
        """All fields but the base."""
        texts: list[JsonValue] = [{"kind": text.kind, "text": text.text} for text in self.texts]
        plain = {key: getattr(self, key) for key in _PLAIN}
        return {
            **plain,
            "origin": dict(self.origin),
            "texts": texts,
            "targets": list(self.targets),
            "tests": dict(self.tests),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, JsonValue], base: Tree) -> "Candidate":
        """The reverse of `to_dict`."""
        raw = cast("Mapping[str, Any]", data)
        texts = tuple(Text(**text) for text in raw["texts"])
        plain = {key: raw[key] for key in (*_PLAIN, "origin", "tests")}
        return cls(**plain, base=base, texts=texts, targets=tuple(raw["targets"]))


_PLAIN = ("id", "package", "language", "metadata", "licence", "patch", "test_patch", "base_commit")


def make_candidate(
    id: str, package: str, old: Release, new: Release, origin: Mapping[str, JsonValue], texts: Sequence[Text] = ()
) -> Candidate | Rejection:
    """The candidate of two trees. `texts`: texts that the reader found besides the trees, the best first."""
    licence = permissive(new)
    if isinstance(licence, Rejection):
        return licence
    changed = sorted({*old.tree, *new.tree} - {path for path in old.tree if old.tree.get(path) == new.tree.get(path)})
    toolchain = detect(new.tree)
    touched = [path for path in changed if toolchain.is_source(path)]
    tests = [path for path in changed if toolchain.is_test(path)]
    has_tests = any(path in new.tree and PurePosixPath(path).suffix in SOURCE_ENDINGS for path in tests)
    is_enough = has_tests if touched else has_tests and toolchain.name == Python.name
    if not is_enough and not (touched and names_refactoring(texts)):
        missing = "source" if not touched else "tests"
        return Rejection(
            f"{missing} unchanged", {"changed": list[JsonValue](changed[:20]), "num_changed": len(changed)}
        )
    build_files = toolchain.test_build_files(old.tree, new.tree)
    commit, patch, test_patch = _patches(
        old.tree, new.tree, lambda path: toolchain.is_test(path) or path in build_files
    )
    targets = toolchain.targets(new.tree)
    if not targets:
        return Rejection("no test file", {"changed_tests": list[JsonValue](tests[:20])})
    metadata = old.metadata or f"Metadata-Version: 2.1\nName: {package}\nVersion: {old.name or '0'}\n"
    found = (*texts, *_changelog(old.tree, new.tree, new.name))
    hidden = {path: new.tree[path].content.decode(errors="replace") for path in tests if path in new.tree}
    return Candidate(
        id=id,
        package=package,
        language=toolchain.name,
        origin=origin,
        base=old.tree,
        metadata=metadata,
        licence=licence,
        patch=patch,
        test_patch=test_patch,
        base_commit=commit,
        texts=found,
        targets=targets,
        tests=hidden,
    )


_REFACTORING = re.compile(
    r"\b(?:refactor|restructur|reorgani[sz]|simplif|deduplicat|consolidat)\w*|\brenam(?:e[sd]?|ing)\b"
    r"|\bclean(?:s|ed|ing)?[ -]?ups?\b|\b(?:extract|inline|mov|split|tid(?:y|ie))(?:e?[sd]|ing)?\b"
    r"|\b(?:unused|dead|duplicated?) (?:code|functions?|methods?|class(?:es)?|names?)\b",
    re.IGNORECASE,
)


def names_refactoring(texts: Sequence[Text]) -> bool:
    """Whether a commit or a pull request says that it changes the structure of the code. A changelog covers many
    changes, so it does not describe one."""
    return any(text.kind in ("commit", "pull request") and _REFACTORING.search(text.text) for text in texts)


_BINARY = re.compile(r"^diff --git a/(.+) b/\1$", re.MULTILINE)
"""A binary file has no lines with --- and +++."""


def apply_to_tree(tree: Tree, patch: str) -> dict[str, FolderFile]:
    """The files of a tree after a patch."""
    names = {*patched_files(patch), *_BINARY.findall(patch)}
    with tempfile.TemporaryDirectory() as scratch:
        root, file = Path(scratch) / "tree", Path(scratch) / "patch"
        write_files(root, {path: tree[path] for path in names if path in tree})
        file.write_text(patch, encoding="utf-8")
        _git(root, "apply", "--whitespace=nowarn", "--allow-empty", str(file))
        changed = {path: file for path, file in read_files(root).items() if file.kind is not FileKind.FOLDER}
    return {path: file for path, file in tree.items() if path not in names} | changed


def twin_patch(candidate: Candidate) -> str | None:
    """The test patch with changed tests that all fail, by which verification finds a result that is forged; None if no
    test can be made to."""
    texts = {path: failing_tests(path, text) for path, text in candidate.tests.items()}
    turned = {path: FolderFile(text.encode()) for path, text in texts.items() if text is not None}
    if not turned:
        return None
    names = {*patched_files(candidate.test_patch), *_BINARY.findall(candidate.test_patch)}
    old = {path: file for path, file in candidate.base.items() if path in names}
    new = apply_to_tree(old, candidate.test_patch)
    turned = {path: replace(new[path], content=file.content) for path, file in turned.items()}
    return _patches(old, new | turned, lambda path: True)[2]


def _patches(old: Tree, new: Tree, is_test: Callable[[str], bool]) -> tuple[str, str, str]:
    """The commit of the old tree, the golden patch and the test patch."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "tree"
        write_files(root, old)
        _git(root, "init", "-q")
        (root / ".git" / "info" / "attributes").write_text(_binary_attributes(old, new), encoding="utf-8")
        commit = commit_all(root)
        patches = []
        for wants_tests in (False, True):
            for path in old:
                if is_test(path) is wants_tests:
                    (root / path).unlink()
            _write_over(root, {path: file for path, file in new.items() if is_test(path) is wants_tests})
            _git(root, "add", "-Af")
            shown = _git(root, "diff", "--cached", "--binary", "--no-renames", "--no-color", "--no-ext-diff", "HEAD")
            patches.append(shown)
            commit_all(root)
        return commit, patches[0], patches[1]


def commit_all(root: Path) -> str:
    """Commit everything in a repository; returns the commit."""
    _git(root, "add", "-Af")
    _git(root, *COMMIT[1:])
    return _git(root, "rev-parse", "HEAD").strip()


def _git(root: Path, *arguments: str) -> str:
    env = {**os.environ, **GIT_ENV}
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, env=env)
    if done.returncode:
        raise DataError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return done.stdout.decode()


def _binary_attributes(*trees: Tree) -> str:
    """Files that are not UTF-8 are binary in patches, which are texts."""
    lines = set[str]()
    for path, file in (pair for tree in trees for pair in tree.items()):
        try:
            file.content.decode()
        except UnicodeDecodeError:
            lines.add(f'"{path}" -diff\n')
    return "".join(sorted(lines))


def _write_over(root: Path, files: Tree) -> None:
    for path, file in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        target.chmod(0o755 if file.kind is FileKind.EXECUTABLE else 0o644)


# -- licences ---------------------------------------------------------------------------------------------------------

_COPYLEFT = re.compile(
    r"\b(?:A|L)?GPL|general public licen[cs]e|lesser general public|\bMPL\b|mozilla public|\bEPL\b"
    r"|eclipse public|\bEUPL"
    r"|\bCDDL|\bSSPL|\bBUSL|business source|creative commons (?:attribution-)?(?:noncommercial|sharealike)"
    r"|\bCC-BY-(?:SA|NC)"
    r"|proprietary|commercial|\bOSL\b|\bCeCILL\b|\bQPL\b",
    re.IGNORECASE,
)
_PERMISSIVE = re.compile(
    r"\bMIT\b|\bBSD\b|\bBSD-|apache|\bISC\b|\bISCL\b|python software foundation|\bPSF|\bunlicense\b|\b0BSD\b|\bzlib\b"
    r"|\bCC0|public domain|\bHPND\b|\bPostgreSQL\b|boost software|\bBSL-1\.0|\bNCSA\b|\bWTFPL\b",
    re.IGNORECASE,
)
_TEXTS = {
    "MIT": r"permission is hereby granted, free of charge",
    "BSD": r"redistribution and use in source and binary forms",
    "Apache-2.0": r"apache license\s+version 2\.0",
    "ISC": r"permission to use, copy, modify, and(?:/or)? distribute this software for any purpose",
    "Unlicense": r"this is free and unencumbered software released into the public domain",
    "PSF-2.0": r"python software foundation license version 2",
    "Zlib": r"this software is provided 'as-is', without any express or implied",
}
_COPYLEFT_TEXTS = (
    r"gnu (?:lesser |affero |library )?general public license|mozilla public license|eclipse public license"
)
_LICENCE_FILE = re.compile(r"^(?:licen[cs]es?/)?(?:licen[cs]e|copying|unlicense)[^/]*$", re.IGNORECASE)


@dataclass(slots=True)
class _Claims:
    permissive: list[str] = field(default_factory=list)
    copyleft: list[str] = field(default_factory=list)

    def add(self, origin: str, text: str) -> None:
        # A choice between licences is as free as the freest of them.
        parts = [part for part in re.split(r"\bOR\b", text) if part.strip()]
        is_free = any(_PERMISSIVE.search(part) and not _COPYLEFT.search(part) for part in parts)
        if is_free:
            self.permissive.append(f"{origin}: {text.strip()[:100]}")
        elif _COPYLEFT.search(text):
            self.copyleft.append(f"{origin}: {text.strip()[:100]}")


def permissive(release: Release) -> str | Rejection:
    """The licence, by the first source that names one; a rejection if one names a licence that is not permissive, or
    none names any."""
    claims = _Claims()
    for origin, text in _licence_fields(release):
        claims.add(origin, text)
    for path, file in sorted(release.tree.items()):
        if _LICENCE_FILE.match(path):
            head = " ".join(file.content[:4000].decode(errors="replace").lower().split())
            if re.search(_COPYLEFT_TEXTS, head[:1500]) and not any(re.search(text, head) for text in _TEXTS.values()):
                claims.copyleft.append(f"{path}: {head[:100]}")
            claims.permissive += [f"{path}: {name}" for name, text in _TEXTS.items() if re.search(text, head)][:1]
    if claims.copyleft:
        return Rejection("licence", {"not_permissive": list[JsonValue](claims.copyleft)})
    if not claims.permissive:
        return Rejection("licence", {"not_permissive": [], "problem": "no metadata or file names a known licence"})
    return claims.permissive[0].partition(": ")[2]


def _licence_fields(release: Release) -> Iterator[tuple[str, str]]:
    message = parse_metadata(release.metadata)
    for key in ("License-Expression", "License"):
        if (value := message.get(key)) and len(value) < 200:
            yield key, value
    for value in message.get_all("Classifier", []):
        if value.startswith("License ::") and value.count("::") > 1:
            yield "Classifier", value
    for path in ("Cargo.toml", "package.json"):
        if named := _manifest_licence(release.tree, path):
            yield path, named
    project = read_pyproject(release.tree).get("project", {})
    if isinstance(project, dict):
        licence = project.get("license")
        text = licence.get("text") if isinstance(licence, dict) else licence
        if isinstance(text, str) and len(text) < 200:
            yield "pyproject.toml", text
        for value in project.get("classifiers", []):
            if str(value).startswith("License ::"):
                yield "pyproject.toml", str(value)


def _manifest_licence(tree: Tree, path: str) -> str:
    """The licence that the manifest of a Rust or Node package names."""
    try:
        text = tree[path].content.decode()
        table = json.loads(text) if path.endswith(".json") else tomllib.loads(text).get("package", {})
        licence = table.get("license")
    except (KeyError, ValueError, AttributeError, RecursionError):
        return ""
    # Older manifests of Rust separate a choice of licences by a slash.
    return licence.replace("/", " OR ") if isinstance(licence, str) and len(licence) < 200 else ""


# -- what was written about a change ----------------------------------------------------------------------------------

_CHANGELOG = re.compile(
    r"(?:^|/)(?:changelog|changes|history|news|releases?|release[_-]notes)(?:\.(?:md|rst|txt))?$", re.I
)
_README = re.compile(r"^readme(?:\.(?:md|rst|txt))?$", re.IGNORECASE)
MAX_STATEMENT = 6000
"""Characters of a text that become a statement."""


def _changelog(old: Tree, new: Tree, version: str) -> list[Text]:
    """The lines of changelogs that only the new tree has; of the README, if they name the new version."""
    found = []
    for kind, pattern in (("changelog", _CHANGELOG), ("readme", _README)):
        for path in sorted(new, key=lambda path: (path.count("/"), path)):
            text = _added(old.get(path), new[path]) if pattern.search(path) else ""
            if text and (kind == "changelog" or (version and version in text)):
                found.append(Text(kind, text))
    return found


def _added(old: FolderFile | None, new: FolderFile) -> str:
    before = set() if old is None else {line.strip() for line in old.content.decode(errors="replace").splitlines()}
    if old is None:
        return ""  # A whole file does not describe one change.
    lines = new.content.decode(errors="replace").splitlines()
    added = [line for line in lines if not line.strip() or line.strip() not in before]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(added)).strip()
    return text[:MAX_STATEMENT]
