"""The toolchains by name, and the one of a tree."""

from collections.abc import Mapping

from m2forge.pipelines.swe.toolchains.c import C
from m2forge.pipelines.swe.toolchains.go import Go
from m2forge.pipelines.swe.toolchains.node import Node
from m2forge.pipelines.swe.toolchains.python import Python
from m2forge.pipelines.swe.toolchains.rust import Rust
from m2forge.pipelines.swe.toolchains.toolchain import Toolchain
from m2forge.pipelines.swe.tree import Tree

_PYTHON = Python()
_OTHERS = (Go(), Rust(), Node(), C())
TOOLCHAINS: Mapping[str, Toolchain] = {toolchain.name: toolchain for toolchain in (_PYTHON, *_OTHERS)}
"""In the order in which a tree is looked at."""


def detect(tree: Tree) -> Toolchain:
    """The toolchain of a tree. A tree that no build file names is looked at as one of Python, whose tests need none."""
    return next((toolchain for toolchain in TOOLCHAINS.values() if toolchain.is_project(tree)), _PYTHON)
