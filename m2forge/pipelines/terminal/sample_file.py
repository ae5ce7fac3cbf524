"""Samples in a question: its code blocks in; sample files, expected output, file names and a set-up out.

    I have a file `sales.csv`:   ──▶ the block below it is the file's content
    $ cat jan.csv                ──▶ the lines below are the file's content
    Wanted:                      ──▶ the block below it is expected output
    beach.jpeg, dog.jpg, …       ──▶ a block whose lines are names lists files
    git init demo && …           ──▶ commands that create files are the set-up

Error messages and other commands, which are attempts of the author, are left out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from m2forge.pipelines.terminal import programs
from m2forge.pipelines.terminal.posts import Block
from m2forge.pipelines.terminal.script import is_commands, without_prompts

_NAME = r"[\w@%+~-][\w.@%+~-]*"
_FILE_NAME = re.compile(rf"(?<![\w/.-])((?:{_NAME}/)*{_NAME}\.[A-Za-z]\w{{0,5}})(?![\w/-])")
_NO_FILE = re.compile(r"^(?:e\.g|i\.e|a\.k\.a|etc\.\w+|www\..*|.*\.(?:com|org|net|io)|\w\.\w)$", re.IGNORECASE)
_FIRST_EXPECTED = re.compile(
    r"\b(?:expected|wanted|something like|output|result|should (?:give|print|look|get|be)|I want)\W*(?:\w+\W*){0,4}$",
    re.IGNORECASE,
)
_LATER_EXPECTED = re.compile(
    r"\b(?:want|wanted|like|need|should|expect\w*|output|result|get|gives?|becomes?|into|i\.e|that is)\b", re.IGNORECASE
)
_LISTED = re.compile(rf"^(?:\./)?(?:{_NAME}/)*[\w@%+~-][\w .@%+~-]*\.\w{{1,5}}$|^(?:{_NAME}/)+$")
_CREATES = re.compile(r"\b(?:git init|mkdir|touch)\b|(?:echo|printf|cat)\b[^\n|]*>")
_CAT = re.compile(r"^\s*(?:[\w.-]+@[\w.-]+[:\s][^$#\n]*)?[$#%]\s+cat\s+(\S+)\s*$")


@dataclass(slots=True)
class Shown:
    files: dict[str, str] = field(default_factory=dict)
    """Content of files, by name."""
    unnamed: list[str] = field(default_factory=list)
    """Content of files that the preceding text does not name."""
    expected: list[str] = field(default_factory=list)
    """Blocks that show the expected result."""
    listing: list[str] = field(default_factory=list)
    """Names of files."""
    setup: str = ""
    """Commands that create what the question is about."""


def file_names(text: str) -> list[str]:
    """Names of files that a text mentions, in order."""
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[\w@%+~./-]+", span)]
    found = [name for name in _FILE_NAME.findall(text) if not _NO_FILE.match(name)]
    likely = [s.rstrip("/") for s in spans if "/" in s.strip("/") or re.search(r"[A-Z]|\.\w", s)]
    names = dict.fromkeys(found + [s for s in likely if not programs.is_known(s)])
    return [name for name in names if not name.startswith("/") and ".." not in name and not name.startswith(".")]


def read_shown(blocks: Sequence[Block], wanted: Sequence[str]) -> Shown:
    """`wanted`: names of files that the answer reads; of several names before a block, one of these is chosen."""
    shown, intro = Shown(), ""
    for block in blocks:
        if not block.is_code:
            intro = block.text
            continue
        _take(shown, block.text, intro, wanted)
        intro = ""
    return shown


def _take(shown: Shown, text: str, intro: str, wanted: Sequence[str]) -> None:
    if any(_CAT.match(line) for line in text.split("\n")):
        shown.files.update(_sessions(text))
        return
    commands = without_prompts(text)
    if is_commands(commands):
        if _CREATES.search(commands) and not shown.setup and "sudo" not in commands:
            shown.setup = commands
        return
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines or _is_message(lines[0]):
        return
    mentioned = file_names(intro)
    names = [name for name in mentioned if name in wanted and name not in shown.files] or [
        name for name in mentioned if name not in shown.files and name.rpartition("/")[2] in intro
    ]
    has_input = bool(shown.files or shown.unnamed)
    is_input = any(name in wanted for name in names) and not re.search(r"\bwanted\b", intro, re.IGNORECASE)
    is_expected = bool((_LATER_EXPECTED if has_input else _FIRST_EXPECTED).search(intro)) and not (
        is_input and not has_input
    )
    if is_expected and not (has_input and is_input and re.search(r"\b(?:has|have|contains?|maps|is)\b", intro)):
        shown.expected.append(text)
    elif all(_LISTED.match(line.strip()) for line in lines) and not any(name in wanted for name in names):
        shown.listing += [line.strip() for line in lines]
    elif names:
        shown.files[names[-1] if names[-1] in wanted or len(names) == 1 else names[0]] = text
    else:
        shown.unnamed.append(text)


def _sessions(text: str) -> dict[str, str]:
    """Files that a session shows by `cat`."""
    files: dict[str, list[str]] = {}
    name = ""
    for line in text.split("\n"):
        if found := _CAT.match(line):
            name = found[1]
            files[name] = []
        elif re.match(r"^\s*[$#%]\s+\S", line):
            name = ""
        elif name:
            files[name].append(line)
    return {name: "\n".join(lines) for name, lines in files.items()}


def _is_message(line: str) -> bool:
    """Whether a line is a program's error message."""
    program, colon, _ = line.strip().partition(": ")
    return bool(colon) and programs.is_known(program)
