"""What tests of task folders share: a store of images of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge.sandbox.channel import program
from m2forge.sandbox.namespace import run_folder
from tests.sandbox.places import require


@pytest.fixture(scope="module")
def own_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of a module's images, which are not the user's. Skips where namespaces are not allowed."""
    require("namespace")
    program()  # Compiled once, into the user's cache.
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        run_folder.cache_clear()
        yield cache
    run_folder.cache_clear()
