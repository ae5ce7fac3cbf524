"""AReaL's token trie on our calls, where it is installed:

    pip install --no-deps --target build/areal areal==1.0.4 && PYTHONPATH=build/areal python benchmarks/tree.py

Its package imports a training stack whole. Only the file that builds tries is run here, with empty modules in place of
what it imports from its own package; the functions timed use none of that.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from tree_workload import TokenCall

MODULE = "areal.models.tree_attn.tree"
STUBS = (
    "areal",
    "areal.api",
    "areal.api.cli_args",
    "areal.models",
    "areal.models.tree_attn",
    "areal.models.tree_attn.constants",
    "areal.models.tree_attn.module_fsdp",
    "areal.models.tree_attn.triton_kernel",
    "areal.utils",
    "areal.utils.data",
    "areal.utils.perf_tracer",
)


class _Anything:
    """Stands for any name: a decorator that changes nothing, a logger that says nothing."""

    def __call__(self, *args: object, **options: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> "_Anything":
        return self


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def find_trie() -> ModuleType | None:
    """The module that builds tries; None where the package, or this file in it, is not installed."""
    package = importlib.util.find_spec("areal")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "models" / "tree_attn" / "tree.py"
    spec = importlib.util.spec_from_file_location(MODULE, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {**{name: _Stub(name) for name in STUBS}, MODULE: module}):
        spec.loader.exec_module(module)
    return module


def trie_builder(trie: ModuleType, calls: Sequence[TokenCall]) -> Callable[[], int]:
    """A function that builds one trie of all calls, from the padded batch its trainer has, and returns its tokens."""
    longest = max(call.num_tokens for call in calls)
    input_ids = torch.zeros(len(calls), longest, dtype=torch.int64)
    attention_mask = torch.zeros(len(calls), longest, dtype=torch.bool)
    for index, call in enumerate(calls):
        input_ids[index, : call.prompt_ids.size] = torch.from_numpy(call.prompt_ids)
        input_ids[index, call.prompt_ids.size : call.num_tokens] = torch.from_numpy(call.response_ids)
        attention_mask[index, : call.num_tokens] = True
    data: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}

    def build() -> int:
        _, num_tokens = trie._greedy_build_tries(data, sum(call.num_tokens for call in calls))
        return int(sum(num_tokens))

    return build
