"""The root of the package: public names that load what they need when they are used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import m2forge

ROOT = Path(__file__).parent.parent
MAX_IMPORT_S = 0.05
PROGRAM = """
import sys, time
started_s = time.process_time()
import m2forge
print(time.process_time() - started_s)
dir(m2forge)
assert not {"torch", "numpy", "pydantic", "asyncio"} & sys.modules.keys()
"""


def test_the_package_is_imported_in_50_ms_without_libraries() -> None:
    def import_s() -> float:
        run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True, capture_output=True, text=True)
        return float(run.stdout)

    # CPU time and the best of five, because the machine may be busy with something else.
    assert min(import_s() for _ in range(5)) < MAX_IMPORT_S


def test_a_worker_of_tasks_starts_without_libraries() -> None:
    program = "import sys, m2forge.tasks.worker; assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_public_names_are_those_of_their_modules() -> None:
    from m2forge import LLM, Family, SamplingParams, Submission, Verdict, train_rl
    from m2forge.tasks import family

    assert (Family, Submission, Verdict) == (family.Family, family.Submission, family.Verdict)
    assert LLM.__name__ in dir(m2forge)
    assert {value.__name__ for value in (LLM, Family, SamplingParams, Submission, Verdict, train_rl)} | {
        "__version__"
    } == {*m2forge.__all__}


def test_type_checkers_and_programs_see_the_same_names() -> None:
    """What is imported for type checkers is what an access gives."""
    tree = ast.parse(Path(m2forge.__file__).read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    declared = {alias.name: str(node.module) for node in imports for alias in node.names}
    assert declared.keys() | {"__version__"} == {*m2forge.__all__}
    for name, module in declared.items():
        assert getattr(m2forge, name) is getattr(importlib.import_module(module), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LMM'; it has LLM"):
        _ = m2forge.LMM
