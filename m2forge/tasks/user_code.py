"""Imports users' modules: `FILE.py:NAME` or `PACKAGE.MODULE:NAME` in, the named object out; calls reward functions.

Modules of tasks are imported in worker processes alone (`tasks/worker.py`), so that one that crashes or never ends does
not take the run with it. A module that raises at import is refused with the end of its traceback.
"""

import hashlib
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from m2forge.errors import ConfigError, NotFoundError, RecordError, suggest
from m2forge.records import Submission, Task, Verdict
from m2forge.tasks.source import SourceKind, parse_reference

TRACE_LINES = 6
"""Lines from the end of a traceback that an error repeats."""


def load_object(text: str) -> object:
    """The object that a reference names; the path of a file must be absolute."""
    source = parse_reference(text)
    module = _load_file(Path(source.target)) if source.kind is SourceKind.FILE else _load_module(source.target)
    if not hasattr(module, source.attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise NotFoundError(f"{text}: it has no {source.attribute!r}; {suggest(source.attribute, names)}")
    found: object = getattr(module, source.attribute)
    return found


@cache
def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file; relative paths count from the working directory")
    # A name that no other module has: the file may be called as a library is.
    name = f"m2forge_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name; modules beside the file can be imported.
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise ConfigError(f"{path}: raised at import:\n{end_of_trace(error)}") from error
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except BaseException as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{name}.".startswith(f"{error.name}.")
        ):
            raise NotFoundError(
                f"{name}: no such module; install it, put its folder on PYTHONPATH, or name a file: FILE.py:NAME"
            ) from error
        raise ConfigError(f"{name}: raised at import:\n{end_of_trace(error)}") from error


def end_of_trace(error: BaseException) -> str:
    """The last lines of a traceback, for a message about a user's module."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-TRACE_LINES:])


def find_reward(reference: str) -> Callable[[Task, Submission, Verdict], object]:
    """The function of `reward.function`."""
    found = load_object(reference)
    if not callable(found):
        raise ConfigError(f"{reference}: expected a function of a task, a submission and a verdict, received {found!r}")
    return found


def call_reward(reference: str, task: Task, submission: Submission, verdict: Verdict) -> float | tuple[float, ...]:
    """The reward of an episode, or of each of its steps."""
    value = find_reward(reference)(task, submission, verdict)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    if not isinstance(value, list | tuple) or not all(
        isinstance(one, int | float) and math.isfinite(one) for one in value
    ):
        received = "nothing" if value is None else repr(value)[:100]
        raise RecordError(f"{reference}: expected a finite number, or one for each step, received {received}")
    if len(value) != len(submission.steps):
        raise RecordError(
            f"{reference}: expected one reward for each of {len(submission.steps)} steps, received {len(value)}"
        )
    return tuple(float(one) for one in value)
