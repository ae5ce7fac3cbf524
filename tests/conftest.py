"""Settings of every test run: how many random cases, which tests are left to `make test-long`, how many threads."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

LONG = os.environ.get("M2FORGE_LONG") == "1"

settings.register_profile("default", max_examples=25, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "long", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("long" if LONG else "default")


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules live on: no garbage is looked for while a million objects of theirs are made, nor later among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if LONG:
        return
    skip = pytest.mark.skip(reason="long; run with make test-long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)
