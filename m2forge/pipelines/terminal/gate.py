"""Gates on a question's text, and its grade: blocks in, a rejection or a grade out.

length      long enough to say what is asked, short enough to be one task
system      asks about Linux, or about no system in particular
form        asks how to do something, not for an explanation or an opinion
grade       excellent, good, fair or poor; the first two stay
"""

import re
from collections.abc import Sequence
from enum import StrEnum

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.terminal.config import TerminalConfig
from m2forge.pipelines.terminal.markup import Block, plain

_OTHER_SYSTEMS_NAMES = """
windows windows-7 windows-8 windows-10 windows-11 powershell batch-file cmd cmd.exe wsl macos osx mac os-x applescript
finder homebrew bsd freebsd openbsd solaris aix hp-ux android ios cygwin mingw
"""
OTHER_SYSTEMS = frozenset(_OTHER_SYSTEMS_NAMES.split())
_SYSTEM_TEXT = re.compile(
    r"\b(?:PowerShell|Mac ?OS(?: X)?|OS X|macOS|on (?:my|a) Mac(?:book)?\b|Windows (?:7|8|10|11|XP|Server)|cmd\.exe|"
    r"FreeBSD|OpenBSD|Solaris|AIX|HP-UX|Cygwin|Task Scheduler)\b|(?<!\w)[A-Z]:\\\w"
)
_EXPLANATION = re.compile(
    r"^\W*(?:what (?:does|do|is|are|was|were)\b|what['’]s (?:the )?(?:difference|meaning|best|point)|"
    r"what (?:kind|sort)\b|why\b|when (?:should|to)\b|difference between\b|should (?:i|we)\b|"
    r"which (?:is|one|shell|editor|language|tool|distro)\b|"
    r"is (?:it|there) (?:safe|better|good|any (?:reason|advantage|difference))\b|explain\b|understanding\b|"
    r"pros and cons\b|how does\b|how is\b|who\b|best\b)|\bvs\.?\b|\bversus\b|"
    r"\bbest (?:practice|way to learn|editor|book)",
    re.IGNORECASE,
)
_GOAL = re.compile(
    r"\b(?:how (?:do|can|to|would|should|could)|i (?:want|need|have to|wish)|i['’]d (?:like|rather|love|prefer)|"
    r"would like|is there (?:a|an|any|some)|looking for|trying to|wanted|what(?:'s| is) the|what do|what am i|"
    r"should (?:be|become|give|print|get|end|have)|"
    r"convert|create|remove|replace|find|list|count|print|extract|sort|write)\b|\?",
    re.IGNORECASE,
)


class Grade(StrEnum):
    EXCELLENT = "excellent"
    """States a goal, names the files of the answer, and shows input or result."""
    GOOD = "good"
    """States a goal, and names the files of the answer, or shows input, or needs none."""
    FAIR = "fair"
    """States a goal; what the answer works on is not in the question."""
    POOR = "poor"


KEPT = (Grade.EXCELLENT, Grade.GOOD)


def gate(title: str, tags: Sequence[str], blocks: list[Block], config: TerminalConfig) -> Rejection | None:
    """The first gate that a question does not pass."""
    text = f"{title}\n{plain(blocks)}"
    if not config.min_characters <= len(text) <= config.max_characters:
        return Rejection("length", {"characters": len(text)})
    if others := sorted(set(tags) & OTHER_SYSTEMS):
        return Rejection("another system", {"tags": list(others)})
    if found := _SYSTEM_TEXT.search(text):
        return Rejection("another system", {"text": found[0]})
    if found := _EXPLANATION.search(title):
        return Rejection("asks for an explanation or opinion", {"title": title})
    return None


def grade(title: str, blocks: list[Block], operands: Sequence[str]) -> tuple[Grade, dict[str, bool]]:
    """`operands`: files and folders that the answer works on. Returns the grade and what it rests on."""
    text = f"{title}\n{plain(blocks)}"
    named = [name for name in operands if _is_named(name, text)]
    facts = {
        "states a goal": bool(_GOAL.search(text)),
        "names the files": bool(operands) and len(named) == len(operands),
        "shows input or result": any(block.is_code for block in blocks),
        "needs no files": not operands,
    }
    if not facts["states a goal"]:
        return Grade.POOR, facts
    if facts["names the files"] and facts["shows input or result"]:
        return Grade.EXCELLENT, facts
    if facts["names the files"] or facts["shows input or result"] or facts["needs no files"]:
        return Grade.GOOD, facts
    return Grade.FAIR, facts


def _is_named(operand: str, text: str) -> bool:
    """Whether the question names a file or folder; of a glob, its longest literal part."""
    first = max(re.split(r"[*?]|\[[^\]]*\]", operand.removeprefix("./").split("/")[0]), key=len)
    return bool(first.strip(".")) and first in text
