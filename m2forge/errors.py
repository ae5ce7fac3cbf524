"""The exceptions a user can cause. Each says what was wrong, the value received and what to do.

Every one is an `M2ForgeError`, which the command line prints without a traceback, and also the standard-library
exception of its kind, so that a caller need not know this module.
"""

import difflib
from collections.abc import Iterable


class M2ForgeError(Exception):
    """Bad input, refused at the door. Anything else that escapes is a bug."""


class ConfigError(M2ForgeError, ValueError):
    """A configuration file, override or environment variable that cannot be used."""


class CheckpointError(M2ForgeError, ValueError):
    """A checkpoint that is missing a tensor, holds a wrong one, or cannot be read."""


class RecordError(M2ForgeError, ValueError):
    """A record with a field that cannot be true."""


class RequestError(M2ForgeError, ValueError):
    """A prompt that an engine can never serve."""


class FormatError(M2ForgeError, ValueError):
    """Messages that a chat format cannot express, or a chat template that fails on them."""


class DataError(M2ForgeError, ValueError):
    """A document, line or archive that cannot be read; the text names file and line."""


class TrainingError(M2ForgeError, ArithmeticError):
    """A run that cannot go on: its numbers are no longer finite, or nothing of a batch can be trained."""


class EngineError(M2ForgeError, RuntimeError):
    """An engine that cannot serve: it has failed, is closed, or its server does not answer as it should."""


class NotFoundError(M2ForgeError, LookupError):
    """A name that stands for nothing: a preset, a command, a file."""


class ExistsError(M2ForgeError, FileExistsError):
    """A destination that already holds something and would be overwritten."""


def suggest(name: str, known: Iterable[str]) -> str:
    """The next step for an unknown name: the near one if there is any, else all that are known."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names)}" if names else "none is known here"
