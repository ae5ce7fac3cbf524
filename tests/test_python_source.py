"""Python source: threads that parse it."""

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from m2forge import python_source
from m2forge.python_source import parse_python


@pytest.fixture
def switching() -> Iterator[None]:
    """Garbage collection, which runs while trees are made, lets another thread run."""

    def switch(phase: str, info: object) -> None:
        time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(switch)
    gc.set_threshold(50)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(switch)


def test_threads_parse_sound_source_at_once(switching: None) -> None:
    source = Path(python_source.__file__).read_text() + "value = ((((1 + 2) * 3) + 4) * 5)\n" * 20
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(parse_python, [source] * 60))
    assert {len(tree.body) for tree in trees} == {len(parse_python(source).body)}
