"""The exceptions a user can cause. Each states the problem, the value received and what to do.

Every one is an `M2ForgeError`, which the command line prints without a traceback, and also the standard-library
exception of its kind, so that callers need not import this module.
"""

import difflib
from collections.abc import Iterable


class M2ForgeError(Exception):
    """Invalid input, rejected on entry. Any other exception that escapes is a bug."""


class ConfigError(M2ForgeError, ValueError):
    """A configuration file, override or environment variable that cannot be used."""


class CheckpointError(M2ForgeError, ValueError):
    """A checkpoint that is missing a tensor, holds a wrong one, or cannot be read."""


class RecordError(M2ForgeError, ValueError):
    """A record with an invalid field."""


class RequestError(M2ForgeError, ValueError):
    """A prompt that an engine can never serve."""


class FormatError(M2ForgeError, ValueError):
    """Messages that a chat format cannot express, or a chat template that fails on them."""


class PrefixError(FormatError):
    """Messages that cannot be appended, because the chat format then renders earlier ones differently."""


class DataError(M2ForgeError, ValueError):
    """A document, line or archive that cannot be read; the text names file and line."""


class TrainingError(M2ForgeError, ArithmeticError):
    """A run that cannot continue: its numbers are no longer finite, or nothing of a batch is trainable."""


class EngineError(M2ForgeError, RuntimeError):
    """An engine that cannot serve: it has failed, is closed, or its server responds incorrectly."""


class RunError(EngineError):
    """A failure that every retry would repeat: it ends the run."""


class NotFoundError(M2ForgeError, LookupError):
    """An unknown name: a preset, a command, a file."""


class ExistsError(M2ForgeError, FileExistsError):
    """A destination that is not empty and would be overwritten."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one if any, else all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names)}" if names else "none is known here"
