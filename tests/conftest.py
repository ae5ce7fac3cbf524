"""Settings of every test run: how many random cases, which tests are left to `make test-long`, how many threads."""

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

MAX_S = 240
"""What a test of `make test` may take: one that waits for ever fails then, with the place where it waits."""
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    def fail(number: int, frame: object) -> None:
        pytest.fail(f"{item.nodeid} took longer than {MAX_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(0 if LONG else MAX_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if LONG:
        return
    skip = pytest.mark.skip(reason="long; run with make test-long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)
