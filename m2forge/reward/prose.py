"""Extracts the prose of a text: removes everything that is not the writer's natural language.

It removes fenced and inline code, formulas between dollars or LaTeX brackets, quotations (in quotation marks, within a
line, or as lines that begin with `>`), and words that look like code: URLs, paths, identifiers, any ASCII word with a
digit, an inner capital or inner punctuation. Time is linear in the text.
"""

import re
import unicodedata

_NO_PROSE = re.compile(
    # An unclosed bracket stops matching at the next one, so that no text makes this quadratic.
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
"""Punctuation allowed at the edges of a plain word."""
_GAP = " | "
"""Replaces removed text: it is not a word, and no phrase continues across it."""


def prose(text: str) -> str:
    return _ASCII_WORD.sub(_plain, _NO_PROSE.sub(_GAP, unicodedata.normalize("NFC", text)))


def _plain(found: re.Match[str]) -> str:
    word = found.group()
    core = word.strip(_EDGE).replace("-", "").replace("'", "")
    is_plain = not core or (core.isalpha() and (core[1:].islower() or len(core) == 1))
    return word if is_plain else _GAP
