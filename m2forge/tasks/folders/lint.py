"""Lints task folders: a path in, findings out, each with a code, a location and what to do.

The rules include all of Harbor's, under its names, so that a folder without findings here has none there. The others
are what this project asks of the folders that it writes: no network, pinned, no compose files, evidence of a solution.
Nothing is run and nothing is downloaded. `[metadata.harbor.lint] ignore = ["CODE"]` leaves rules out for one folder.

Commands of Dockerfiles and scripts are read line by line: continued lines are joined, comments and the bodies of here
documents are skipped, and what only runs through a variable or another script is not seen.
"""

import hashlib
import json
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import combinations
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from m2forge.config import TomlValue
from m2forge.config_class import models_at
from m2forge.errors import DataError, NotFoundError, suggest
from m2forge.records import JsonValue
from m2forge.tasks.folders.folder import (
    COMPOSE_NAMES,
    CONFIG_NAME,
    DOCKERFILE_NAME,
    INSTRUCTION_NAME,
    SOLVE_NAME,
    TEST_NAME,
    FileKind,
    TaskFolder,
    read_table,
    unsupported,
    walk,
)
from m2forge.tasks.folders.task_toml import (
    MAIN_SERVICE,
    PROVENANCE,
    Artifact,
    NetworkMode,
    TaskConfig,
    VerifierMode,
    current_table,
)

ARTIFACTS = "/logs/artifacts"
"""Copied for the verifier whether it is declared or not."""
LOGS = ("/logs/verifier", "/logs/agent")
MAX_SCANNED_BYTES = 1 << 20
"""Larger scripts and Dockerfiles are not read."""
MIN_LEAK_BYTES = 32
"""Shorter files are often equal by chance."""


class Rule(StrEnum):
    INVALID_CONFIG = "invalid-task-config"
    UNKNOWN_KEY = "unknown-config-field"
    INVALID_FILES = "invalid-task-files"
    ROOT_AGENT = "root-agent"
    SHARED_VERIFIER = "shared-verifier"
    OVERLAPPING_ARTIFACTS = "overlapping-artifacts"
    ARTIFACT_LOG_OVERLAP = "artifact-log-overlap"
    UNPINNED_IMAGE = "unpinned-image"
    UNPINNED_PYTHON = "unpinned-python-dependency"
    RUNTIME_INSTALL = "verifier-runtime-install"
    NETWORK_DOWNLOAD = "verifier-network-download"
    TEST_LEAK = "agent-image-test-leak"
    # Ours alone.
    COMPOSE_FILE = "compose-file"
    UNSUPPORTED = "unsupported"
    DEPRECATED_KEY = "deprecated-key"
    NETWORK = "network"
    NO_SOLUTION = "no-solution"
    NO_ARTIFACTS = "no-artifacts"
    NO_REWARD = "no-reward"
    SCRIPT = "script-cannot-run"
    UNPINNED_PACKAGE = "unpinned-package"
    NO_PROVENANCE = "no-provenance"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    path: str
    """The file."""
    line: int
    """1 or more; 0: the whole file."""
    rule: Rule
    message: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.rule}: {self.message}"

    def to_dict(self) -> dict[str, JsonValue]:
        return asdict(self)


def lint(path: Path, ignore: Collection[str] = ()) -> list[Finding]:
    """The findings of one folder, sorted. `ignore`: codes that are left out."""
    if not path.is_dir():
        raise NotFoundError(f"{path}: expected a task folder; it is not a folder")
    findings = _Findings(path)
    try:
        files = dict(walk(path))
    except DataError as error:
        findings.add(Rule.INVALID_FILES, "", str(error))
        files = {}
    for name in files:
        if name.rpartition("/")[2] in COMPOSE_NAMES:
            findings.add(Rule.COMPOSE_FILE, name, "compose files are not supported; a sandbox is one container")
    folder = _read(path, findings)
    if folder is not None:
        _lint_config(folder, findings)
        _lint_artifacts(folder.config, findings)
        _lint_layout(folder, findings)
        _lint_sources(folder, files, findings)
        ignore = {*ignore, *_ignored(folder)}
    return sorted({finding for finding in findings.found if finding.rule not in ignore})


class _Findings:
    def __init__(self, root: Path) -> None:
        self._root = root
        self.found: list[Finding] = []

    def add(self, rule: Rule, name: str, message: str, line: int = 0) -> None:
        """`name`: the file's path in the folder."""
        self.found.append(Finding(str(self._root / name), line, rule, message))


def _read(path: Path, findings: _Findings) -> TaskFolder | None:
    if not (path / CONFIG_NAME).exists():
        findings.add(Rule.INVALID_FILES, CONFIG_NAME, "missing; a task folder needs one")
        return None
    try:
        return read_table(path)
    except DataError as error:
        findings.add(Rule.INVALID_CONFIG, CONFIG_NAME, str(error).removeprefix(f"{path / CONFIG_NAME}: "))
    try:
        table = tomllib.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
        _lint_keys(current_table(table, CONFIG_NAME)[0], findings)
    except (OSError, ValueError):
        pass  # Reported above.
    return None


def _ignored(folder: TaskFolder) -> list[str]:
    level: object = folder.table
    for key in ("metadata", "harbor", "lint", "ignore"):
        level = level.get(key, {}) if isinstance(level, dict) else {}
    return [str(code) for code in level] if isinstance(level, list) else []


# -- task.toml --------------------------------------------------------------------------------------------------------


def _lint_config(folder: TaskFolder, findings: _Findings) -> None:
    config = folder.config
    table, renamed = current_table(folder.table, CONFIG_NAME)
    _lint_keys(table, findings)
    for old, new in renamed:
        findings.add(Rule.DEPRECATED_KEY, CONFIG_NAME, f"{old}: deprecated; write {new}")
    for key in unsupported(folder):
        findings.add(Rule.UNSUPPORTED, CONFIG_NAME, f"{key}: attempts here do not offer it")
    if not _has_provenance(folder.table):
        findings.add(
            Rule.NO_PROVENANCE, CONFIG_NAME, f"[{'.'.join(PROVENANCE)}] is missing; write where the task is from"
        )
    for index, step in enumerate(config.steps or (None,)):
        prefix = "" if step is None else f"steps[{index}]."
        if config.mode(step) is VerifierMode.SHARED:
            findings.add(
                Rule.SHARED_VERIFIER,
                CONFIG_NAME,
                f"{prefix}verifier.environment_mode: 'shared' lets what the agent left running and the programs it "
                "replaced decide the verdict; set 'separate'",
            )
        user = config.agent.user if step is None or step.agent.user is None else step.agent.user
        if user is None or str(user).split(":")[0] in ("0", "root"):
            findings.add(Rule.ROOT_AGENT, CONFIG_NAME, f"{prefix}agent.user: not set or root; set another user")
    for where, mode in _networks(config):
        if mode is not NetworkMode.NO_NETWORK:
            findings.add(Rule.NETWORK, CONFIG_NAME, f"{where}network_mode: {mode}; set 'no-network', or say why not")


def _has_provenance(table: Mapping[str, TomlValue]) -> bool:
    level: object = table
    for key in PROVENANCE:
        level = level.get(key) if isinstance(level, Mapping) else None
    return isinstance(level, Mapping) and bool(level)


def _networks(config: TaskConfig) -> Iterator[tuple[str, NetworkMode]]:
    yield "environment.", config.environment.network
    environments = [("verifier.environment.", config.verifier.environment)]
    phases = [("agent.", config.agent.network_mode), ("verifier.", config.verifier.network_mode)]
    for index, step in enumerate(config.steps or ()):
        environments.append((f"steps[{index}].verifier.environment.", step.verifier.environment))
        phases.append((f"steps[{index}].agent.", step.agent.network_mode))
        phases.append((f"steps[{index}].verifier.", step.verifier.network_mode))
    yield from ((where, environment.network) for where, environment in environments if environment is not None)
    yield from ((where, mode) for where, mode in phases if mode is not None)


def _lint_keys(table: Mapping[str, TomlValue], findings: _Findings) -> None:
    for path, known in _unknown(table, ()):
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        findings.add(Rule.UNKNOWN_KEY, CONFIG_NAME, f"{where}: unknown key; {suggest(str(path[-1]), known)}")


def _unknown(
    value: TomlValue | Mapping[str, TomlValue], path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], set[str]]]:
    """Keys that no table at their path has, with those that it has."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, (*path, index))
    models = models_at(TaskConfig, path)
    if not isinstance(value, Mapping) or not models:
        return
    known = {name for model in models for name in model.model_fields}
    for key, inner in value.items():
        if key not in known:
            yield (*path, key), known
        else:
            yield from _unknown(inner, (*path, key))


# -- artifacts --------------------------------------------------------------------------------------------------------


def _lint_artifacts(config: TaskConfig, findings: _Findings) -> None:
    for step in config.steps or (None,):
        declared = config.artifacts_of(step)
        is_separate = config.mode(step) is VerifierMode.SEPARATE
        if is_separate and not declared:
            findings.add(
                Rule.NO_ARTIFACTS,
                CONFIG_NAME,
                f"artifacts: none, and a separate verifier receives nothing of an attempt but these and {ARTIFACTS}",
            )
        for artifact in declared:
            if is_separate and any(_overlap(_source(artifact), PurePosixPath(log)) for log in LOGS):
                findings.add(
                    Rule.ARTIFACT_LOG_OVERLAP,
                    CONFIG_NAME,
                    f"artifacts: {artifact.source} overlaps the logs of verifier or agent; choose another path",
                )
        if not any(_source(artifact) == PurePosixPath(ARTIFACTS) and _is_main(artifact) for artifact in declared):
            declared.insert(0, Artifact(source=ARTIFACTS))
        for first, second in combinations(declared, 2):
            if not _covers(first, second) and _overlap(_output(first), _output(second)):
                findings.add(
                    Rule.OVERLAPPING_ARTIFACTS,
                    CONFIG_NAME,
                    f"artifacts: {first.source} and {second.source} are copied over each other, to {_output(first)} "
                    f"and {_output(second)}",
                )


def _is_main(artifact: Artifact) -> bool:
    return artifact.service in (None, MAIN_SERVICE)


def _source(artifact: Artifact) -> PurePosixPath:
    # Two leading slashes are one root.
    return PurePosixPath(re.sub("^/+", "/", artifact.source))


def _output(artifact: Artifact) -> PurePosixPath:
    """Where the artifact is among the artifacts on the host."""
    path = PurePosixPath(artifact.destination or artifact.source)
    return PurePosixPath(*(part for part in path.parts if part.strip("/")))


def _overlap(first: PurePosixPath, second: PurePosixPath) -> bool:
    return first.is_relative_to(second) or second.is_relative_to(first)


def _covers(first: Artifact, second: Artifact) -> bool:
    """Whether the first entry already copies the second to where it belongs."""
    if (first.service or MAIN_SERVICE) != (second.service or MAIN_SERVICE):
        return False
    outer, inner = PurePosixPath(first.source), PurePosixPath(second.source)
    if not inner.is_relative_to(outer):
        return False
    if outer == inner and _output(first) == _output(second):
        return first.exclude == second.exclude
    return not first.exclude and _output(second) == _output(first) / inner.relative_to(outer)


# -- files ------------------------------------------------------------------------------------------------------------


def _lint_layout(folder: TaskFolder, findings: _Findings) -> None:
    config = folder.config
    if not config.environment.docker_image and not folder.environment.is_dir():
        findings.add(Rule.INVALID_FILES, "environment", "missing; add it, or set environment.docker_image")
    elif not config.environment.docker_image and folder.dockerfile is None:
        findings.add(Rule.INVALID_FILES, f"environment/{DOCKERFILE_NAME}", "missing, and environment.docker_image too")
    for step in config.steps or (None,):
        prefix = "" if step is None else f"steps/{step.name}/"
        try:
            if not folder.instruction(step).strip():
                findings.add(Rule.INVALID_FILES, prefix + INSTRUCTION_NAME, "empty; write what the agent is asked")
        except DataError as error:
            findings.add(
                Rule.INVALID_FILES, prefix + INSTRUCTION_NAME, str(error).rpartition(f"{INSTRUCTION_NAME}: ")[2]
            )
        if folder.test_script(step) is None and not folder.has_bundled_tests(step):
            findings.add(
                Rule.INVALID_FILES, f"{prefix}tests/{TEST_NAME}", "missing; it decides whether the task is solved"
            )
        if folder.solution(step) is None:
            findings.add(
                Rule.NO_SOLUTION, f"{prefix}solution/{SOLVE_NAME}", "missing; nothing shows that the task can be solved"
            )


def _lint_sources(folder: TaskFolder, files: Mapping[str, FileKind], findings: _Findings) -> None:
    config = folder.config
    environments = [("environment", config.environment), ("verifier.environment", config.verifier.environment)]
    environments += [
        (f"steps[{index}].verifier.environment", step.verifier.environment) for index, step in enumerate(folder.steps)
    ]
    for where, environment in environments:
        if environment is not None and environment.docker_image:
            _lint_image(environment.docker_image, f"{where}.docker_image", CONFIG_NAME, 0, findings)
    for name in files:
        if name.rpartition("/")[2] == DOCKERFILE_NAME and name.split("/")[0] in ("environment", "tests", "steps"):
            _lint_dockerfile(folder.path, name, findings)
    for name in files:
        base = name.rpartition("/")[2]
        if base in (TEST_NAME, SOLVE_NAME) and name.split("/")[0] in ("tests", "solution", "steps"):
            _lint_script(folder, name, base == TEST_NAME, findings)
    _lint_leaks(folder.path, files, findings)


def _lint_script(folder: TaskFolder, name: str, is_test: bool, findings: _Findings) -> None:
    text = _text(folder.path / name)
    if text is None:
        return
    if not text.startswith("#!"):
        findings.add(Rule.SCRIPT, name, "no interpreter in the first line; begin with #!/bin/bash", 1)
    elif "\r" in text.split("\n", 1)[0]:
        findings.add(Rule.SCRIPT, name, "Windows line ends; the interpreter is not found", 1)
    for line, command in _lines(text):
        _lint_command(command, name, line, is_test, findings)
    if is_test and not _mentions(folder, name, "reward"):
        findings.add(Rule.NO_REWARD, name, "it writes no /logs/verifier/reward.txt or reward.json")


def _mentions(folder: TaskFolder, name: str, word: str) -> bool:
    """Whether a script, or a file beside it, contains the word."""
    inside = (folder.path / name).parent
    return any(word in (_text(path) or "") for path in sorted(inside.rglob("*")) if path.is_file())


def _lint_leaks(root: Path, files: Mapping[str, FileKind], findings: _Findings) -> None:
    """Files of the agent's environment that equal hidden ones."""
    hidden: dict[str, str] = {}
    for name, kind in files.items():
        parts = name.split("/")
        is_hidden = parts[0] in ("tests", "solution") or (
            parts[0] == "steps" and parts[2:3] in (["tests"], ["solution"])
        )
        if kind in (FileKind.FILE, FileKind.EXECUTABLE) and is_hidden and (digest := _digest(root / name)):
            hidden[digest] = name
    for name in files:
        if name.startswith("environment/") and (leaked := hidden.get(_digest(root / name) or "")):
            findings.add(Rule.TEST_LEAK, name, f"equal to {leaked}, which the agent must not see")


def _digest(path: Path) -> str | None:
    if not path.is_file() or not path.stat().st_size >= MIN_LEAK_BYTES:
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text(path: Path) -> str | None:
    try:
        # Bytes, because line ends matter.
        return path.read_bytes().decode("utf-8") if path.stat().st_size <= MAX_SCANNED_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None


# -- Dockerfiles and commands -----------------------------------------------------------------------------------------

_OPTIONS_WITH_VALUE = frozenset(
    {
        *("-r", "--requirement", "-c", "--constraint", "-i", "--index-url", "--extra-index-url", "--index"),
        *("--default-index", "-f", "--find-links", "-t", "--target", "--prefix", "--root", "--src", "--from"),
        *("--log", "--cache-dir", "-p", "--python", "--platform", "-C", "--config-settings"),
    }
)
_HEREDOC = re.compile(r"""("(?:\\.|[^"\\])*"|'[^']*')|<<-?\s*(['"]?)(\w+)\2""")
_HIDDEN = re.compile(r"(?:^|/)(?:solution(?:/solve\.sh|/)?|tests/(?:test\.sh|test_[^/]+\.py))$")
_PREFIXES = ("sudo", "env", "exec", "command", "time", "nice")


def _lint_image(image: str, where: str, name: str, line: int, findings: _Findings) -> None:
    if image != "scratch" and "$" not in image and not re.search(r"@sha256:[0-9a-fA-F]{64}$", image):
        findings.add(Rule.UNPINNED_IMAGE, name, f"{where}: {image}: pin it by its digest, IMAGE@sha256:…", line)


def _lint_dockerfile(root: Path, name: str, findings: _Findings) -> None:
    stages = set[str]()
    for line, text in _lines(_text(root / name) or ""):
        instruction, _, value = text.strip().partition(" ")
        value = re.sub(r"^(?:--\S+\s+)+", "", value.strip())
        try:
            words = json.loads(value) if value.startswith("[") else shlex.split(value)
        except ValueError:
            continue
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            continue
        match instruction.upper():
            case "FROM":
                if words[0].lower() not in stages:
                    _lint_image(words[0], "FROM", name, line, findings)
                if len(words) == 3 and words[1].upper() == "AS":
                    stages.add(words[2].lower())
            case "RUN":
                _lint_command(shlex.join(words) if value.startswith("[") else value, name, line, False, findings)
            case "COPY" | "ADD" if name.startswith("environment/"):
                for source in words[:-1]:
                    if _HIDDEN.search(source):
                        findings.add(
                            Rule.TEST_LEAK, name, f"{source}: tests and solution must not reach the agent", line
                        )


def _lint_command(text: str, name: str, line: int, is_test: bool, findings: _Findings) -> None:
    for words in _commands(text):
        program, *arguments = words
        packages = _python_packages(program, arguments)
        is_constrained = any(word.split("=", 1)[0] in ("-c", "--constraint") for word in arguments)
        for package in packages:
            if not is_constrained and _is_unpinned(package):
                findings.add(Rule.UNPINNED_PYTHON, name, f"{package}: pin it, {package}==VERSION", line)
        for package in _other_packages(program, arguments):
            findings.add(Rule.UNPINNED_PACKAGE, name, f"{package}: pin its version", line)
        if not is_test:
            continue
        is_local = bool({"--offline", "--no-index"}.intersection(arguments))
        if (packages and not is_local) or _other_installs(program, arguments):
            findings.add(Rule.RUNTIME_INSTALL, name, f"{program}: install what tests need in the image", line)
        if _downloads(program, arguments):
            findings.add(Rule.NETWORK_DOWNLOAD, name, f"{program}: store what tests need in the image", line)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Commands with the number of their first line."""
    pending, first, ends = "", 1, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if ends:
            if line.strip() == ends[0]:
                ends.pop(0)
            continue
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first if pending else number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        pending += line
        ends = [match[3] for match in _HEREDOC.finditer(pending) if match[3]]
        yield first, pending
        pending = ""
    if pending:
        yield first, pending


def _commands(text: str, depth: int = 0) -> Iterator[list[str]]:
    """The simple commands of a line, without what stands before a program; `sh -c TEXT` is read too."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    command = list[str]()
    try:
        tokens = [*lexer, ";"]
    except ValueError:
        return
    for token in tokens:
        if not token.strip(";&|()"):
            if command:
                yield command
                if command[0] in ("sh", "bash") and "-c" in command[:-1] and depth < 3:
                    yield from _commands(command[command.index("-c") + 1], depth + 1)
            command = []
        elif command or not (
            re.match(r"\w+=", token) or token in ("if", "then", "else", "do", "while", "!", "{") or token in _PREFIXES
        ):
            command.append(token.rpartition("/")[2] if not command else token)


def _python_packages(program: str, arguments: Sequence[str]) -> list[str]:
    """Packages that a command installs from an index."""
    match [re.sub(r"^(pip|python)[\d.]*$", r"\1", program), *arguments]:
        case ["pip", "install", *rest] | ["python", "-m", "pip", "install", *rest]:
            pass
        case ["uv", "pip" | "tool", "install", *rest] | ["uv", "add", *rest] | ["uvx", *rest]:
            pass
        case _:
            return []
    packages, words = list[str](), iter(rest)
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--with", "-w"):
            packages.append(value if equals else next(words, ""))
        elif option in ("-e", "--editable"):
            package = value if equals else next(words, "")
            packages += [package] if "://" in package else []
        elif option in _OPTIONS_WITH_VALUE:
            if not equals:
                next(words, None)
        elif not word.startswith("-"):
            if program == "uvx":
                break
            packages.append(word)
    is_upgrade_of_pip = packages == ["pip"] and bool({"-U", "--upgrade"}.intersection(rest))
    return [] if is_upgrade_of_pip else packages


def _is_unpinned(package: str) -> bool:
    if not package or "$" in package or package.startswith((".", "/", "file:")):
        return False
    if "://" in package:
        return not re.search(r"@[0-9a-fA-F]{40}(?:#|$)|#sha256=[0-9a-fA-F]{64}$", package)
    if package.endswith((".whl", ".tar.gz", ".zip")):
        return False
    return not re.search(r"===?\s*[^*,\s]+\s*(?:,|;|$)", package)


def _other_installs(program: str, arguments: Sequence[str]) -> list[str] | None:
    """The packages that another package manager installs; None if it installs none."""
    words = [word for word in arguments if not word.startswith("-")]
    match [program, *words]:
        case ["apt-get" | "apt" | "apk" | "dnf" | "yum", "install" | "add", *packages]:
            return packages
        case ["npm", "install" | "i" | "add", *packages] | ["cargo" | "gem" | "go", "install", *packages]:
            return packages
    return None


def _other_packages(program: str, arguments: Sequence[str]) -> list[str]:
    """Those of them without a version. The mirrors of Debian drop old versions, so apt's packages are not counted."""
    packages = _other_installs(program, arguments) or []
    match program:
        case "npm":
            return [
                package for package in packages if "@" not in package[1:] and not package.startswith((".", "/", "$"))
            ]
        case "cargo" | "gem" | "go":
            return [] if any("version" in word or "@" in word or word == "-v" for word in arguments) else packages
    return []


def _downloads(program: str, arguments: Sequence[str]) -> bool:
    if program == "git":
        return arguments[:1] in (["clone"], ["fetch"], ["pull"]) and any(_is_external(word) for word in arguments)
    return program in ("curl", "wget") and any(_is_external(word) for word in arguments)


def _is_external(word: str) -> bool:
    if re.match(r"git@[^:]+\.[^:]+:", word):
        return True
    try:
        host = urlsplit(word.removeprefix("--url=")).hostname
    except ValueError:
        return False
    return bool(host) and "." in str(host) and not str(host).startswith("127.")
