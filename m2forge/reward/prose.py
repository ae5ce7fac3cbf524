"""The prose of a text: what is left when everything that is no language of its writer's is taken out.

Taken out are fenced and inline code, formulas between dollars or LaTeX brackets, quotations (in quotation marks, within
a line, or as lines that begin with `>`), and words that look like code: addresses, paths, identifiers, anything of
ASCII signs with a digit, an inner capital or an inner sign. Work is linear in the text.
"""

import re
import unicodedata

_NO_PROSE = re.compile(
    # A bracket left open ends the attempt at the next one, so that no text makes this quadratic.
    r"```.*?(?:```|\Z)"
    r"|~~~.*?(?:~~~|\Z)"
    r"|`[^`\n]*`"
    r"|\$\$[^$]*\$\$|\$[^$\n]*\$"
    r"|\\\((?:[^\\\n]|\\(?![()]))*+\\\)|\\\[(?:[^\\]|\\(?![\[\]]))*+\\\]"
    r"|^[ \t]*>[^\n]*$"
    r"|\"[^\"\n]*\"|“[^“”\n]*”|„[^„“”\n]*[“”]|«[^«»\n]*»|「[^「」\n]*」|『[^『』\n]*』",
    re.DOTALL | re.MULTILINE,
)
_ASCII_WORD = re.compile(r"[!-~]+")
_EDGE = ".,;:!?()[]{}<>\"'*-|"
"""Signs that may stand at the edge of a plain word."""
_GAP = " | "
"""Stands for what was taken out: no word, and no phrase goes on across it."""


def prose(text: str) -> str:
    return _ASCII_WORD.sub(_plain, _NO_PROSE.sub(_GAP, unicodedata.normalize("NFC", text)))


def _plain(found: re.Match[str]) -> str:
    word = found.group()
    core = word.strip(_EDGE).replace("-", "").replace("'", "")
    is_plain = not core or (core.isalpha() and (core[1:].islower() or len(core) == 1))
    return word if is_plain else _GAP
