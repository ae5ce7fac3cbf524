"""Extracts scripts from an accepted answer: blocks in, candidate scripts out, the most literal first.

Code blocks that are commands become steps: prompts (`$ `, `user@host:~$ `) and the output below them are removed. A
block that the text introduces as another way ("or", "alternatively", "with older versions") is an alternative, not a
step. Without such a block, the first code span that is a command serves.

    candidates    all steps, the first step, each alternative; then the same with placeholder names replaced
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from m2forge.pipelines.terminal import programs
from m2forge.pipelines.terminal.posts import Block
from m2forge.pipelines.terminal.shell import KEYWORDS, ShellError, functions, read_commands

_PROMPT = re.compile(r"^\s*(?:[\w.-]+@[\w.-]+[:\s][^$#\n]*[$#]|\$|%|❯)\s+(?=\S)")
_ALTERNATIVE = re.compile(
    r"^\W*(?:or\b|alternativ|also\b|another\b|(?:on|for|with|in) (?:an )?(?:old|newer|new|recent)|"
    r"you (?:can|could) also|if you (?:have|prefer|want|need)|otherwise\b|in a script|instead\b|using \w+ instead|"
    r"check with|to check|later\b|to undo|put them together)|"
    r"\balso works\b|\bas well:?$|\bthe same (?:with|in|using)\b",
    re.IGNORECASE,
)
_SHELL = frozenset(("", "bash", "sh", "shell", "zsh", "console", "text", "none", "awk", "sed"))


@dataclass(frozen=True, slots=True)
class Step:
    script: str
    is_alternative: bool = False


def without_prompts(text: str) -> str:
    """The commands of a session; a text without a prompt stays as it is."""
    lines = text.split("\n")
    if not any(_PROMPT.match(line) for line in lines):
        return text
    chosen, is_open = list[str](), False
    for line in lines:
        if match := _PROMPT.match(line):
            chosen.append(line[match.end() :])
        elif is_open:
            chosen[-1] += "\n" + re.sub(r"^> ?", "", line)
        else:
            continue
        is_open = not _is_complete(chosen[-1])
    return "\n".join(chosen)


def _is_complete(script: str) -> bool:
    try:
        read_commands(script)
    except ShellError:
        return False
    return not script.endswith("\\")


def is_commands(text: str) -> bool:
    """Whether a text is a script whose first command is a known program."""
    try:
        commands = read_commands(text)
    except ShellError:
        return False
    first = next((line for line in text.strip().split("\n") if not line.lstrip().startswith("#")), "")
    if not commands or "..." in first.split():
        return False
    program = next((command.program for command in commands if command.program), "")
    defined = functions(text)
    is_assignment = bool(re.match(r"\s*\w+=\S*", first)) and len(commands) > 0
    return programs.is_known(program) or program in KEYWORDS or program in defined or (is_assignment and not program)


def steps(blocks: Sequence[Block]) -> list[Step]:
    found = list[Step]()
    intro = ""
    for block in blocks:
        if not block.is_code:
            intro = block.text
            continue
        script = re.sub(r"^#!.*\n", "", without_prompts(block.text).strip("\n"))
        if block.language in _SHELL and is_commands(script):
            found.append(Step(script, bool(found) and bool(_ALTERNATIVE.search(intro))))
        intro = ""
    if found:
        return found
    spans = [without_prompts(span) for block in blocks for span in block.spans]
    return [Step(span, True) for span in spans if len(span.split()) > 1 and is_commands(span)][:2]


def shown_outputs(blocks: Sequence[Block]) -> list[str]:
    """Output that an answer shows: blocks that are no commands, and the lines below commands of a session."""
    outputs = list[str]()
    for block in blocks:
        if not block.is_code:
            continue
        lines = block.text.split("\n")
        prompted = [number for number, line in enumerate(lines) if _PROMPT.match(line)]
        if prompted:
            outputs.append("\n".join(lines[prompted[-1] + 1 :]))
        elif not is_commands(block.text):
            outputs.append(block.text)
    return [output for output in outputs if output.strip()]


def candidates(found: Sequence[Step]) -> list[str]:
    """Scripts to try, in order, without repetition."""
    main = [step.script for step in found if not step.is_alternative]
    scripts = ["\n".join(main)] if main else []
    scripts += main[:1] + [step.script for step in found if step.is_alternative] + main[1:]
    return list(dict.fromkeys(script for script in scripts if script.strip()))


_PLACEHOLDER = re.compile(
    r"^(?:/path/to/)?(?:(?:your|my|the|some|in|input|source|data|test)?[_-]?(?:file|filename|input|infile|data|text|log)"
    r"(?:\d|name)?)(?:\.\w+)?$",
    re.IGNORECASE,
)


def is_placeholder(name: str) -> bool:
    return bool(_PLACEHOLDER.match(name)) or name.startswith("/path/to/")


def with_name(script: str, old: str, new: str) -> str:
    """The script with a file's name replaced where it stands as a word."""
    return re.sub(rf"(?<![\w./-]){re.escape(old)}(?![\w./-])", new.replace("\\", r"\\"), script)
