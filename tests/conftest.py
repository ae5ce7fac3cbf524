"""Settings of every test run: how many random cases, which tests are left to `make test-long`, how many threads."""

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if LONG:
        return
    skip = pytest.mark.skip(reason="long; run with make test-long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)
