"""Which files a script works on: its commands in, operands out, in the order of their first use.

An operand is identified by its position in a command: `grep PATTERN FILE…`, `find FOLDER… TESTS`, `cp SOURCE… TARGET`,
`< FILE`, `> FILE`. Files that an earlier command writes are no inputs. Words with variables are not followed.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from m2forge.pipelines.terminal.shell import SimpleCommand, Word

_VALUES = {
    "awk": "Fvf",
    "mawk": "Fvf",
    "sed": "efls",
    "grep": "efmABCD",
    "egrep": "efmABCD",
    "fgrep": "efmABCD",
    "zgrep": "efmABC",
    "perl": "eEI",
    "sort": "ktoST",
    "cut": "dfcb",
    "join": "t12oaevj",
    "paste": "d",
    "head": "nc",
    "tail": "nc",
    "uniq": "wfs",
    "split": "lbnaC",
    "fold": "w",
    "fmt": "w",
    "expand": "t",
    "unexpand": "t",
    "nl": "bnswv",
    "tr": "",
    "touch": "dtr",
    "chmod": "",
    "cp": "tS",
    "mv": "tS",
    "ln": "tS",
    "install": "mogtS",
    "mkdir": "m",
    "truncate": "sr",
    "od": "ANtjw",
    "stat": "cf",
    "date": "dr",
    "column": "scot",
    "diff": "xIUCW",
    "patch": "piodF",
    "tee": "",
    "tar": "CTXf",
    "seq": "fs",
    "csplit": "fnb",
    "base64": "w",
    "pr": "ltwohs",
    "hexdump": "nse",
    "du": "dt",
    "git": "Cc",
    "python3": "cWXm",
    "python": "cWXm",
}
"""Short options that take a value, by program."""
_PATTERN_FIRST = frozenset(("awk", "mawk", "sed", "grep", "egrep", "fgrep", "zgrep"))
"""Programs whose first operand is a pattern or program, unless an option gives it."""
_NO_FILES_NAMES = """
echo printf read test [ [[ true false : set shopt export local declare tr seq expr let exit return sleep yes basename
dirname env umask eval command date id source . unset shift trap wait pwd break continue type done
"""
_NO_FILES = frozenset(_NO_FILES_NAMES.split())
_LITERAL_OPEN = re.compile(r"""open\(\s*["']([^"'{}$]+)["']""")


class Role(StrEnum):
    FILE = "file"
    FOLDER = "folder"
    ANY = "any"
    """A file or a folder, which its name decides."""
    ARCHIVE = "archive"
    """A tar that is read; `members` are extracted."""
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Operand:
    path: str
    """Relative to the workspace; a glob if `is_glob`."""
    role: Role
    is_glob: bool = False
    members: tuple[str, ...] = ()


def operands(commands: Sequence[SimpleCommand], script: str) -> list[Operand]:
    """Inputs and outputs of a script."""
    found: dict[str, Operand] = {}
    written: list[str] = []
    cwd = ""
    for command in commands:
        if command.program in ("cd", "pushd") and command.arguments and command.arguments[0].is_literal:
            cwd = posixpath.normpath(posixpath.join(cwd, command.texts[-1]))
            _add(found, Operand(cwd, Role.FOLDER), written)
            continue
        for operand in _of_command(command):
            path = posixpath.normpath(posixpath.join(cwd, operand.path))
            if path.startswith("..") or (path == "." and operand.role is not Role.FOLDER):
                continue
            placed = Operand(path, operand.role, operand.is_glob, operand.members)
            if operand.role is Role.OUTPUT:
                written.append(path)
            _add(found, placed, written)
    for path in _LITERAL_OPEN.findall(script):
        _add(found, Operand(posixpath.normpath(path), Role.FILE), written)
    return list(found.values())


def _add(found: dict[str, Operand], operand: Operand, written: Sequence[str]) -> None:
    path = operand.path
    is_written = any(path == name or path.startswith(f"{name}/") for name in written)
    if operand.role is not Role.OUTPUT and is_written and path not in found:
        return
    before = found.get(path)
    if before is None or (before.role is Role.ANY and operand.role is not Role.OUTPUT):
        found[path] = operand


def _of_command(command: SimpleCommand) -> Iterator[Operand]:
    for redirect in command.redirects:
        target = redirect.target
        if target.is_literal and target.text not in ("-", "/dev/null") and not target.text.startswith("/dev/"):
            if redirect.operator == "<":
                yield Operand(target.text, Role.FILE)
            elif redirect.operator in (">", ">>", ">|", "&>", "&>>"):
                yield Operand(target.text, Role.OUTPUT)
    program = command.program
    if program == "for":
        yield from (Operand(word.text, Role.FILE, word.is_glob) for word in command.arguments if _is_path(word, True))
    elif program == "find":
        yield from _of_find(command)
    elif program == "tar":
        yield from _of_tar(command)
    elif program not in _NO_FILES and program:
        yield from _of_plain(command)


def _of_find(command: SimpleCommand) -> Iterator[Operand]:
    num = 0
    for word in command.arguments:
        if word.text.startswith("-") or word.text in ("!", "(", ")"):
            break
        if word.is_literal:
            yield Operand(word.text, Role.FOLDER)
        num += 1
    if num == 0:
        yield Operand(".", Role.FOLDER)


def _of_tar(command: SimpleCommand) -> Iterator[Operand]:
    words = [word.text for word in command.arguments]
    mode = "".join(word.lstrip("-") for word in words[:1]) + "".join(w for w in words if re.fullmatch(r"-\w+", w))
    archive = ""
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        is_bundle = bool(re.fullmatch(r"-\w+", word)) or (position == 0 and re.fullmatch(r"[a-zA-Z]+", word))
        if is_bundle:
            if word.endswith("f") and position + 1 < len(words):
                archive, position = words[position + 1], position + 1
            elif word[-1] in "CTX":
                position += 1
        elif word.startswith("--"):
            archive = word.partition("=")[2] if word.startswith("--file=") else archive
        else:
            rest.append(word)
        position += 1
    if "c" in mode or "--create" in words:
        yield from (Operand(name, Role.ANY, "*" in name) for name in rest)
        if archive and "$" not in archive:
            yield Operand(archive, Role.OUTPUT)
    elif archive and "$" not in archive:
        yield Operand(archive, Role.ARCHIVE, members=tuple(rest))


def _split(command: SimpleCommand) -> tuple[list[Word], list[str]]:
    """Operands, and the options with their values joined."""
    values = _VALUES.get(command.program, "")
    plain, options = list[Word](), list[str]()
    words = list(command.arguments)
    is_over = False
    while words:
        word = words.pop(0)
        if is_over or not word.text.startswith("-") or word.text == "-":
            plain.append(word)
        elif word.text == "--":
            is_over = True
        else:
            options.append(word.text)
            is_short = not word.text.startswith("--")
            if is_short and word.text[-1] in values and _takes_next(word.text, values) and words:
                options.append(words.pop(0).text)
    return plain, options


def _takes_next(option: str, values: str) -> bool:
    """Whether the value is the next word: the first letter that takes one is the last."""
    first = next(position for position, letter in enumerate(option) if position and letter in values)
    return first == len(option) - 1


def _of_plain(command: SimpleCommand) -> Iterator[Operand]:
    plain, options = _split(command)
    program = command.program
    if program in _PATTERN_FIRST:
        has_own = any(re.match(r"-\w*[ef]$|--(expression|file|regexp)|-[ef].", option) for option in options)
        if program in ("awk", "mawk"):
            has_own = "-f" in options
        if program.endswith("grep") and "-f" in options:
            yield Operand(options[options.index("-f") + 1], Role.FILE)
        elif program.endswith("grep") and (bundle := next((o for o in options if re.match(r"-\w+f$", o)), None)):
            yield Operand(options[options.index(bundle) + 1], Role.FILE)
        plain = plain if has_own else plain[1:]
    if program in ("perl", "python3", "python") and any(re.match(r"-\w*[ceE]$|-0\w*", o) for o in options):
        pass
    elif program in ("bash", "sh", "dash") and "-c" in options:
        return
    role = _role(program, options)
    if program == "chmod":
        plain = plain[1:]
    if program == "git":
        plain = [word for word in plain[1:] if "." in word.text and not re.search(r"\s|^HEAD", word.text)]
        if not {"rm", "add", "mv", "checkout", "restore", "blame", "show"} & set(command.texts):
            plain = []
    target = _target(program, plain, options)
    for word in plain:
        if word is target or not _is_path(word, program in ("rm", "cat", "unlink")):
            continue
        if program in ("mkdir", "touch", "tee", "truncate"):
            yield Operand(word.text, Role.OUTPUT)
        elif program == "ln" and not word.text.startswith("/"):
            yield Operand(word.text, Role.ANY)
        else:
            yield Operand(word.text, role, word.is_glob)
    if target is not None and target.is_literal:
        yield Operand(target.text, Role.OUTPUT)
    if program in ("sort",) and "-o" in options:
        yield Operand(options[options.index("-o") + 1], Role.OUTPUT)


def _role(program: str, options: Sequence[str]) -> Role:
    is_recursive = any(re.match(r"-\w*[rR]|--recursive", option) for option in options)
    if program in ("ls", "du", "rmdir"):
        return Role.FOLDER
    if program in ("grep", "egrep", "fgrep", "cp", "rm", "chmod", "diff") and is_recursive:
        return Role.FOLDER
    if program in ("chmod", "mv", "rm", "cp", "stat"):
        return Role.ANY
    return Role.FILE


def _target(program: str, plain: Sequence[Word], options: Sequence[str]) -> Word | None:
    """The operand that is written."""
    if program in ("cp", "mv", "ln", "install") and len(plain) > 1 and "-t" not in options:
        return plain[-1]
    if program == "split" and len(plain) > 1:
        return plain[1]
    return None


def _is_path(word: Word, may_be_odd: bool = False) -> bool:
    text = word.text
    if not text or "$" in text or "`" in text or "{}" in text or text in ("-", "+", ";") or "\n" in text:
        return False
    if text.startswith(("<(", ">(")) or (text.startswith("-") and not may_be_odd):
        return False
    return "{" not in word.raw or word.is_quoted
