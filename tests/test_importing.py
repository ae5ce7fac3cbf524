"""Later collections leave the objects of imported modules out, and all others not."""

import gc
import importlib
from pathlib import Path

import pytest

from m2forge.importing import importing


def test_nothing_is_collected_while_modules_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_once.py").write_text("objects = [[] for _ in range(1000)]")
    monkeypatch.syspath_prepend(tmp_path)
    num_frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        importlib.import_module("imported_once")
    assert gc.isenabled()
    assert gc.get_freeze_count() > num_frozen + 1000


def test_nothing_is_frozen_where_nothing_is_imported() -> None:
    num_frozen = gc.get_freeze_count()
    with pytest.raises(ValueError, match="bad"), importing():
        raise ValueError("bad")
    assert gc.isenabled()
    assert gc.get_freeze_count() <= num_frozen  # other threads may free some
