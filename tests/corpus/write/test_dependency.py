"""Files come after what they import, in every language read, and cycles end the same way each time."""

from hypothesis import given
from hypothesis import strategies as st

from m2forge.corpus.write.long_sample import dependency_order, imports


def test_python_imports_are_found() -> None:
    files = dict.fromkeys(
        ["pkg/__init__.py", "pkg/a.py", "pkg/b.py", "pkg/sub/__init__.py", "pkg/sub/c.py", "top.py"], ""
    )
    cases = {
        "import pkg.a": {"pkg/a.py"},
        "import os, pkg.b as b": {"pkg/b.py"},
        "from pkg import a, b": {"pkg/a.py", "pkg/b.py"},
        "from pkg import name": {"pkg/__init__.py"},
        "from . import b": {"pkg/b.py"},
        "from .a import x": {"pkg/a.py"},
        "from .sub.c import (": {"pkg/sub/c.py"},
        "    import top  # inside": {"top.py"},
        "import a": {"pkg/a.py"},
        "text = 'import nothing'": set(),
    }
    for line, expected in cases.items():
        assert imports("pkg/main.py", f"{line}\n", files) == expected, line
    assert imports("pkg/sub/c.py", "from ..a import x\nfrom .. import b", files) == {"pkg/a.py", "pkg/b.py"}


def test_script_and_c_imports_are_found() -> None:
    files = dict.fromkeys(["src/a.ts", "src/lib/index.js", "src/main.ts", "inc/x.h", "inc/y.h", "inc/x.c"], "")
    text = "import { a } from './a';\nconst l = require('./lib');\nimport react from 'react';\nimport './missing';"
    assert imports("src/main.ts", text, files) == {"src/a.ts", "src/lib/index.js"}
    assert imports("inc/x.c", '#include "x.h"\n#include <stdio.h>\n  # include "inc/y.h"\n', files) == {
        "inc/x.h",
        "inc/y.h",
    }


@given(st.dictionaries(st.integers(0, 11), st.sets(st.integers(0, 11)), max_size=12))
def test_without_cycles_every_import_comes_first(graph: dict[int, set[int]]) -> None:
    names = {n: f"m{n:02d}.py" for n in graph}
    files = {
        names[n]: "".join(f"import m{other:02d}\n" for other in sorted(others) if other < n)
        for n, others in graph.items()
    }
    order = dependency_order(files)
    assert sorted(order) == sorted(files)
    for n, others in graph.items():
        for other in others:
            if other < n and other in graph:
                assert order.index(names[other]) < order.index(names[n])


@given(st.permutations(["a.py", "b.py", "c.py", "d.py", "e.py"]))
def test_cycles_are_broken_alike_for_any_order_of_files(names: list[str]) -> None:
    needs = {"a.py": "bc", "b.py": "c", "c.py": "a", "d.py": "a", "e.py": ""}
    files = {name: "".join(f"import {need}\n" for need in needs[name]) for name in names}
    # Of a, b and c, which need each other in a ring, b waits for one and is named before c; then so is a.
    assert dependency_order(files) == ["e.py", "b.py", "a.py", "c.py", "d.py"]
