"""Train M2-style mixture-of-experts models, from pre-training to reinforcement learning of agents.

    from m2forge import LLM                              sample from a model folder: docs/inference.md
    from m2forge import train_rl                         run what `m2forge rl` runs
    from m2forge import Family, Submission, Verdict      write your own tasks: docs/tasks.md

A name's module is imported when the name is first used, so that `import m2forge` loads neither torch nor pydantic.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m2forge.inference.config import SamplingParams
    from m2forge.inference.llm import LLM
    from m2forge.records import Submission, Verdict
    from m2forge.rl.loop import train_rl
    from m2forge.tasks.family import Family

__version__ = "0.1.0"

__all__ = ["LLM", "Family", "SamplingParams", "Submission", "Verdict", "__version__", "train_rl"]

_MODULES = {
    "LLM": "m2forge.inference.llm",
    "SamplingParams": "m2forge.inference.config",
    "train_rl": "m2forge.rl.loop",
    "Family": "m2forge.tasks.family",
    "Submission": "m2forge.records",
    "Verdict": "m2forge.records",
}
"""The module of each public name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'm2forge' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
