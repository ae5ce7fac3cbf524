"""Readers of candidates: sdists of an index, a local git clone, a dump of pull requests, Debian sources.

    sdists       consecutive releases of a package, downloaded once into the cache folder, checked by their digest
    history      commits of a clone that change source and tests, with their message
    pull requests  records of GitHub's API or of a dump, over a local clone that has the commits
    debian       two source packages (.dsc with its archives, or the upstream archives alone, local)

Nothing of a project runs here, and archives are unpacked in memory (`package_archive`). Paths that lead outside or into
`.git` are left out, and an archive whose names no file system can hold is refused with one message.
"""

import hashlib
import html
import json
import os
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from m2forge.compiled import cache_folder
from m2forge.errors import DataError, NotFoundError
from m2forge.files import write_atomic
from m2forge.pipelines.package_archive import members
from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.candidate import Candidate, Text, make_candidate
from m2forge.pipelines.swe.toolchains.c import without_generated
from m2forge.pipelines.swe.tree import METADATA, Release, parse_metadata
from m2forge.records import JsonValue
from m2forge.tasks.folders.folder import FileKind, FolderFile

INDEX = "https://pypi.org/simple"
MAX_ARCHIVE_BYTES = 64 << 20
DOWNLOAD_S = 120.0
MAX_TREE_BYTES = 128 << 20
MAX_TREE_FILES = 20_000
MAX_NAME, MAX_PATH = 255, 2000
"""Bytes of a part of a path, and of a path."""
_FOREIGN = frozenset({"site-packages", "node_modules", "__pycache__"})
"""Folders that a maintainer's machine left in an archive."""


# -- archives ---------------------------------------------------------------------------------------------------------


def read_archive(path: Path) -> Release:
    """The tree of an sdist or another source archive, without its one top folder."""
    files = _read_files(path)
    metadata = files.get(METADATA, FolderFile(b"")).content.decode(errors="replace")
    tree = {name: file for name, file in files.items() if not _is_generated(name)}
    return Release(tree, metadata, parse_metadata(metadata).get("Version", ""))


def read_release(path: Path) -> Release:
    """The tree of a source archive or a folder."""
    if not path.is_dir():
        return read_archive(path)
    files: dict[str, FolderFile] = {}
    num_bytes = 0
    for found in release_files(path):
        num_bytes += found.stat().st_size
        if len(files) >= MAX_TREE_FILES or num_bytes > MAX_TREE_BYTES:
            raise DataError(f"{path}: holds over {MAX_TREE_FILES} files or {MAX_TREE_BYTES} bytes")
        kind = FileKind.EXECUTABLE if found.stat().st_mode & 0o100 else FileKind.FILE
        files[found.relative_to(path).as_posix()] = FolderFile(found.read_bytes(), kind)
    metadata = files.get(METADATA, FolderFile(b"")).content.decode(errors="replace")
    return Release({name: file for name, file in files.items() if not _is_generated(name)}, metadata)


def release_files(path: Path) -> Iterator[Path]:
    """The archive itself, or the regular files of a folder without its repository, in a fixed order."""
    if not path.is_dir():
        yield path
    for top, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name != ".git")
        for found in (Path(top) / name for name in sorted(names)):
            if found.is_file() and not found.is_symlink():
                yield found


def named_release(path: Path) -> tuple[str, str]:
    """Package and version by the name of a folder or archive: PACKAGE-VERSION.tar.gz, PACKAGE_VERSION.orig.tar.gz."""
    stem = re.sub(r"(?:\.orig)?(?:\.tar)?\.(?:gz|xz|bz2|tgz|zip)$", "", path.name)
    package, _, version = stem.partition("_") if "_" in stem else stem.rpartition("-")
    return normal_name(package or stem), re.sub(r"[^\w.-]", "-", version) if package else "0"


def _is_generated(path: str) -> bool:
    parts = path.split("/")
    is_foreign = any(part.endswith(".egg-info") or part in _FOREIGN for part in parts)
    return is_foreign or path == METADATA or bool(re.match(r"docs?/_?build/", path))


# -- sdists -----------------------------------------------------------------------------------------------------------


def sdist_path(package: str, version: str, index: str = INDEX) -> Path:
    """The sdist of a release in the cache folder; downloaded on first use, and checked by the index's digest."""
    folder = cache_folder() / "swe" / "sdists"
    wanted = {f"{normal_name(package)}-{version}{ending}" for ending in (".tar.gz", ".zip", ".tar.bz2")}
    for name in sorted(wanted):
        if (folder / name).is_file():
            return folder / name
    url = f"{index.rstrip('/')}/{normal_name(package)}/"
    page = _download(url).decode(errors="replace")
    for link in re.findall(r'<a [^>]*href="([^"]+)"', page):
        target, _, fragment = html.unescape(link).partition("#")
        name = urllib.parse.unquote(target.rpartition("/")[2])
        stem, dash, rest = name.rpartition("-")
        if dash and f"{normal_name(stem)}-{rest}" in wanted:
            content = _download(urllib.parse.urljoin(url, target))
            digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
            if digest is not None and hashlib.sha256(content).hexdigest() != digest:
                raise DataError(f"{target}: the digest is not the index's; download it again")
            write_atomic(folder / f"{normal_name(stem)}-{rest}", content)
            return folder / f"{normal_name(stem)}-{rest}"
    raise NotFoundError(f"{package} {version}: {url} lists no sdist of it")


def normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _download(url: str) -> bytes:
    try:
        # urllib follows redirects, which package indexes send and `http_client` does not follow.
        with urllib.request.urlopen(url, timeout=DOWNLOAD_S) as response:
            content: bytes = response.read(MAX_ARCHIVE_BYTES + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise NotFoundError(f"{url}: cannot be downloaded: {error}") from error
    if len(content) > MAX_ARCHIVE_BYTES:
        raise DataError(f"{url}: over {MAX_ARCHIVE_BYTES} bytes")
    return content


def sdist_candidate(package: str, old: str, new: str, index: str = INDEX) -> Candidate | Rejection:
    """The change between two releases."""
    paths = [sdist_path(package, version, index) for version in (old, new)]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    origin = {"kind": "sdist", "old": old, "new": new, "old_sha256": digests[0], "new_sha256": digests[1]}
    name = normal_name(package)
    return make_candidate(f"{name}-{new}", name, read_archive(paths[0]), read_archive(paths[1]), origin)


# -- git --------------------------------------------------------------------------------------------------------------


class Clone:
    """A local clone, read through git alone."""

    def __init__(self, path: Path, package: str) -> None:
        self.path, self.package = path, package
        if not (path / ".git").exists() and not (path / "HEAD").is_file():
            raise NotFoundError(f"{path}: expected a git clone")

    def commits(self, num: int) -> list[str]:
        """The newest commits with one parent on the checked-out branch, the newest first."""
        return self._git("rev-list", "--no-merges", "--first-parent", f"--max-count={num}", "HEAD").decode().split()

    def merged(self, commits: Sequence[str], num: int) -> Iterator[tuple[str, str]]:
        """Each commit with the parent of the `num`-th commit from it back, itself included."""
        for index in range(len(commits) - num + 1):
            yield commits[index], f"{commits[index + num - 1]}^"

    def candidate(self, commit: str, base: str | None = None, texts: tuple[Text, ...] = ()) -> Candidate | Rejection:
        """The change from `base` (its parent) to a commit."""
        try:
            parent = self._git("rev-parse", "--verify", "-q", base or f"{commit}^").decode().strip()
            message = self._git("log", "--format=%B", f"{parent}..{commit}").decode(errors="replace").strip()
        except DataError:
            return Rejection("no parent", {"commit": commit})
        old, new = (Release(self._tree(name), name=self._version(name)) for name in (parent, commit))
        origin = {"kind": "git", "old": parent, "new": commit}
        found = (*texts, Text("commit", message)) if message else texts
        return make_candidate(f"{self.package}-{commit[:12]}", self.package, old, new, origin, found)

    def _version(self, commit: str) -> str:
        try:
            tag = self._git("describe", "--tags", "--abbrev=0", commit).decode().strip()
        except DataError:
            return "0"
        found = re.search(r"\d+(?:\.\d+)*", tag)
        return found[0] if found else "0"

    def _tree(self, commit: str) -> dict[str, FolderFile]:
        """Regular files by path. Not by `git archive`, from which attributes leave files out, often the tests."""
        listed = [line.partition(b"\t") for line in self._git("ls-tree", "-rlz", commit).split(b"\0") if line]
        entries = [(head.decode().split(), os.fsdecode(path)) for head, _, path in listed]
        found = [(fields, path) for fields, path in entries if fields[1] == "blob" and fields[0] != "120000"]
        if len(found) > MAX_TREE_FILES or sum(int(fields[3]) for fields, _ in found) > MAX_TREE_BYTES:
            raise DataError(f"{self.path}: {commit[:12]} has over {MAX_TREE_FILES} files or {MAX_TREE_BYTES} bytes")
        _check_paths(self.path, (path for _, path in found))
        files = [(mode, blob, path) for (mode, _, blob, _), path in found]
        asked = "".join(f"{blob}\n" for _, blob, _ in files)
        data, start, tree = self._git("cat-file", "--batch", stdin=asked.encode()), 0, {}
        for mode, _, path in files:
            end = data.index(b"\n", start)
            size = int(data[start:end].rpartition(b" ")[2])
            kind = FileKind.EXECUTABLE if mode == "100755" else FileKind.FILE
            tree[path] = FolderFile(data[end + 1 : end + 1 + size], kind)
            start = end + size + 2
        return tree

    def _git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=", "-C", str(self.path), *arguments]
        done = subprocess.run(command, capture_output=True, input=stdin)
        if done.returncode:
            problem = " ".join(done.stderr.decode(errors="replace").split())
            raise DataError(f"{self.path}: git {arguments[0]}: {problem[:300]}")
        return done.stdout


# -- pull requests ----------------------------------------------------------------------------------------------------

_COMMIT_HASH = re.compile(r"[0-9a-f]{7,64}")
_CLOSES = re.compile(
    r"\b(?:close[sd]?|fix(?:e[sd])?|resolve[sd]?)\b:?\s+"
    r"(?:https?://github\.com/(?P<url>[\w.-]+/[\w.-]+)/issues/|(?P<repository>[\w.-]+/[\w.-]+)?#)(?P<number>\d+)\b",
    re.IGNORECASE,
)


def read_pull_requests(
    path: Path, issues: Path | None = None
) -> Iterator[tuple[int, Mapping[str, JsonValue] | Rejection]]:
    """The pull requests of a file, numbered as they stand there, each with `merge_commit`, `base_commit` (None: its
    first parent), `title`, `body` and `issues`, which have `title` and `body`. A record has these keys, or is one of
    GitHub's REST API: merged, with the issues of the file `issues` that its text closes. Anything else is a
    rejection."""
    known = {} if issues is None else _read_issues(issues)
    for number, record in _read_records(path):
        yield number, record if isinstance(record, Rejection) else _pull_request(record, known)


def _read_records(path: Path) -> Iterator[tuple[int, dict[str, JsonValue] | Rejection]]:
    """Objects of JSON Lines, or of arrays, several of which may follow each other (`gh api --paginate`)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"{path}: cannot be read ({error.strerror})") from error
    if data.lstrip().startswith(b"["):
        yield from enumerate(_array_records(data.decode("utf-8-sig", errors="replace")), 1)
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, _record(json.loads(line))
            except (ValueError, RecursionError) as error:
                yield number, _invalid(str(error), line.decode(errors="replace"))


def _array_records(text: str) -> Iterator[dict[str, JsonValue] | Rejection]:
    """Records after a syntax error cannot be located, so the error is the last record."""
    decoder, at, wanted = json.JSONDecoder(), 0, "["
    while (at := _after_space(text, at)) < len(text):
        if text[at] not in wanted:
            yield _invalid(f"expected one of {wanted!r}", text[at:])
            return
        mark, at = text[at], _after_space(text, at + 1)
        if mark == "]" or (mark == "[" and text[at : at + 1] == "]"):
            wanted = "[" if mark == "]" else "]"
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield _invalid(str(error), text[at:])
            return
        yield _record(value)
        wanted = ",]"
    if wanted != "[":
        yield _invalid("the array has no end", "")


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _record(value: object) -> dict[str, JsonValue] | Rejection:
    return value if isinstance(value, dict) else _invalid("not an object", str(value))


def _invalid(problem: str, text: str) -> Rejection:
    return Rejection("invalid record", {"problem": problem, "text": text[:200]})


def _read_issues(path: Path) -> dict[int, Mapping[str, JsonValue]]:
    """Title and body of issues by their number. GitHub lists pull requests among them, which are left out."""
    found: dict[int, Mapping[str, JsonValue]] = {}
    for position, record in _read_records(path):
        number = None if isinstance(record, Rejection) else record.get("number")
        if isinstance(record, Rejection) or not isinstance(number, int):
            problem = record.evidence["problem"] if isinstance(record, Rejection) else "no number"
            raise DataError(f"{path}: record {position} is no issue of GitHub: {problem}")
        if "pull_request" not in record:
            found[number] = {key: record.get(key) for key in ("title", "body")}
    return found


def _pull_request(
    record: Mapping[str, JsonValue], issues: Mapping[int, Mapping[str, JsonValue]]
) -> Mapping[str, JsonValue] | Rejection:
    is_github = "merge_commit_sha" in record
    if is_github and not record.get("merged_at"):
        return Rejection("not merged", {"number": record.get("number"), "state": record.get("state")})
    commits = (
        {"merge_commit": record.get("merge_commit_sha")}
        if is_github
        else {key: record.get(key) for key in ("merge_commit", "base_commit")}
    )
    for key, commit in commits.items():
        if not _COMMIT_HASH.fullmatch(str(commit)):
            where = "merge_commit_sha" if is_github else key
            return _invalid(f"{where}: expected a commit's hash", str(commit))
    closed: JsonValue = [dict(issue) for issue in _closed(record, issues)] if is_github else record.get("issues")
    return {"base_commit": None, **commits, "title": record.get("title"), "body": record.get("body"), "issues": closed}


def _closed(
    record: Mapping[str, JsonValue], issues: Mapping[int, Mapping[str, JsonValue]]
) -> Iterator[Mapping[str, JsonValue]]:
    """The issues of the same repository that the text of a pull request closes."""
    base = record.get("base")
    repository = base.get("repo") if isinstance(base, dict) else None
    name = repository.get("full_name") if isinstance(repository, dict) else None
    found = dict.fromkeys(
        int(match["number"])
        for match in _CLOSES.finditer(_titled(record))
        if (match["url"] or match["repository"] or name) == name
    )
    yield from (issues[number] for number in found if number in issues)


def pull_request_candidate(clone: Clone, record: Mapping[str, JsonValue]) -> Candidate | Rejection:
    """The change of a pull request that `read_pull_requests` has read."""
    issues, base = record["issues"], record["base_commit"]
    listed = issues if isinstance(issues, list) else []
    texts = [Text("issue", _titled(issue)) for issue in listed if isinstance(issue, dict)]
    texts.append(Text("pull request", _titled(record)))
    found = tuple(text for text in texts if text.text)
    try:
        return clone.candidate(str(record["merge_commit"]), None if base is None else str(base), found)
    except DataError as error:
        return Rejection("commit missing", {"problem": str(error)})


def _titled(record: Mapping[str, JsonValue]) -> str:
    parts = (record.get("title"), record.get("body"))
    return "\n\n".join(part.strip() for part in parts if isinstance(part, str) and part.strip())


# -- Debian -----------------------------------------------------------------------------------------------------------


def package_version(path: Path) -> tuple[str, str]:
    """Package and version by the name of a .dsc file or an upstream archive."""
    package, _, rest = path.name.partition("_")
    return package, re.sub(r"\.dsc$|\.orig\.tar\.\w+$", "", rest)


def debian_candidate(old: Path, new: Path) -> Candidate | Rejection:
    """The change between two source packages, each by its .dsc or its upstream archive. The packaging's patches are not
    used, since the upstream tests belong to the archive; its changelog describes the change if upstream does not."""
    (package, before), (_, after) = package_version(old), package_version(new)
    origin = {"kind": "debian", "old": before, "new": after}
    id = f"{package}-{after}".replace("~", "-")
    found = make_candidate(id, package, _debian_release(old), _debian_release(new), origin)
    entries = _debian_changelog(new, before) if new.suffix == ".dsc" else ""
    if isinstance(found, Rejection) or not entries:
        return found
    return replace(found, texts=(*found.texts, Text("changelog", entries)))


def _debian_release(path: Path) -> Release:
    if not path.is_file():
        raise NotFoundError(f"{path}: expected a .dsc file or an upstream archive")
    archive = path
    if path.suffix == ".dsc":
        names = [name for name in _listed(path) if re.search(r"\.orig\.tar\.\w+$", name)]
        if not names:
            raise DataError(f"{path}: names no upstream archive (.orig.tar)")
        archive = _checked(path, names[0])
    release = read_archive(archive)
    return Release(without_generated(release.tree), release.metadata, package_version(path)[1].partition("-")[0])


def _listed(dsc: Path) -> dict[str, str]:
    """Files that a .dsc names, with their SHA-256 where it has one."""
    found = re.findall(r"^ ([0-9a-f]{32,64}) \d+ (\S+)$", dsc.read_text(errors="replace"), re.MULTILINE)
    return {name: "" for _, name in found} | {name: digest for digest, name in found if len(digest) == 64}


def _checked(dsc: Path, name: str) -> Path:
    path, digest = dsc.parent / name, _listed(dsc)[name]
    if not path.is_file():
        raise NotFoundError(f"{path}: missing; {dsc.name} names it")
    if digest and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise DataError(f"{path}: the digest is not that of {dsc.name}; download it again")
    return path


_PACKAGING = re.compile(
    r"debian/|\bd/|debhelper|standards-version|lintian|upload|\[|vcs-|uscan|watch|copyright|maintainer|uploaders"
    r"|new upstream|build-depend|patch|autopkgtest|multi-arch|symbols|dh[_-]|closes:|rules-requires-root",
    re.IGNORECASE,
)


def _debian_changelog(dsc: Path, old: str) -> str:
    """Entries of debian/changelog about the program since the old version, without those about packaging."""
    names = [name for name in _listed(dsc) if re.search(r"\.debian\.tar\.\w+$", name)]
    if not names or not (dsc.parent / names[0]).is_file():
        return ""
    files = _read_files(_checked(dsc, names[0]))
    text = files.get("changelog", FolderFile(b"")).content.decode(errors="replace")
    newer = re.split(rf"^\S+ \((?:\d+:)?{re.escape(old)}\)", text, maxsplit=1, flags=re.MULTILINE)[0]
    items = re.findall(r"^ +[*+-] (.+(?:\n {4,}[^*+\s-].*)*)", newer, re.MULTILINE)
    kept = [" ".join(item.split()) for item in items if not _PACKAGING.search(item)]
    return "\n".join(f"- {item}" for item in kept)


# -- unpacking --------------------------------------------------------------------------------------------------------


def _read_files(path: Path) -> dict[str, FolderFile]:
    """The files of an archive, without its one top folder."""
    files: dict[str, FolderFile] = {}
    for name, content, is_executable in members(path, MAX_TREE_BYTES, MAX_TREE_FILES):
        parts = [part for part in name.split("/") if part not in ("", ".")][1:]
        if parts and ".." not in parts and ".git" not in parts:
            kind = FileKind.EXECUTABLE if is_executable else FileKind.FILE
            files["/".join(parts)] = FolderFile(content, kind)
    if not files:
        raise DataError(f"{path}: holds no file in a top folder; expected a source archive")
    _check_paths(path, files)
    return files


def _check_paths(origin: Path, paths: Iterable[str]) -> None:
    """Raises unless a folder can hold files of these paths, and all of them lie inside of it."""
    known = set(paths)
    for path in known:
        try:
            encoded = path.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{origin}: the name {path!r} is not UTF-8") from error
        if len(encoded) > MAX_PATH or any(len(part) > MAX_NAME for part in encoded.split(b"/")):
            raise DataError(f"{origin}: the name {path[:100]!r}… is too long")
        if not path.isprintable() or '"' in path:
            raise DataError(f"{origin}: the name {path!r} holds a quote or a control character")
        parts = path.split("/")
        if any(part in ("", ".", "..", ".git") for part in parts):
            raise DataError(f"{origin}: the name {path!r} leads outside of the tree, or into a repository")
        for num in range(1, len(parts)):
            if (folder := "/".join(parts[:num])) in known:
                raise DataError(f"{origin}: {folder!r} is a file and a folder")
