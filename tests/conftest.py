"""Settings of every test run: how many random cases, which tests run and in which order, how many threads."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from execnet import XSpec
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from tests.cost import run_order
from tests.schedule import WaitingApart, is_fast, is_waiter, is_waiting, is_whole

MAX_S = 600
"""What a test of `make test` may take: one that waits for ever fails then, with the place where it waits."""
LONG = os.environ.get("M2FORGE_LONG") == "1"
FAST = os.environ.get("M2FORGE_FAST") == "1"

# How fast a busy machine draws cases says nothing.
ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", ANY_SPEED, max_examples=6, derandomize=True, database=None)
settings.register_profile("long", ANY_SPEED, max_examples=1000, print_blob=True)
settings.register_profile("fast", settings.get_profile("default"), max_examples=4)
settings.load_profile("long" if LONG else "fast" if FAST else "default")
FEW_CASES = settings() if LONG else settings(max_examples=3)
"""For tests of networks and engines, each case of which takes a tenth of a second or more."""


def pytest_configure() -> None:
    # A shell that runs tests in the background has them ignore SIGINT, and every process that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A client reads every certificate of the machine when it is made, 50 ms each time; ours speak plain HTTP. So let
    # it look for certificates in a folder that holds none.
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
    if "PYTEST_XDIST_WORKER" in os.environ and not FAST:
        import torch

        torch.set_num_threads(1)


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[XSpec]) -> None:
    if FAST or not is_whole(config.args):
        return  # workers that run a part of the tests import less
    # Here, as a file that takes a constant from this one starts no process for it (tests/cost.py).
    from tests import worker_server

    folder = Path(tempfile.mkdtemp(prefix="m2forge-workers-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    config.add_cleanup(worker_server.start(folder / "socket"))
    for spec in specs:
        spec.python = worker_server.client_command(folder / "socket")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WaitingApart:
    return WaitingApart(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules live on: no garbage is looked for while a million objects of theirs are made, nor ever among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)  # the default of 700 spends a tenth of a test's time on looking
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A process imports only the files whose tests it may run."""
    if not collection_path.name.startswith("test_"):
        return None
    is_left_out = FAST and not is_fast(collection_path)
    return True if is_left_out or (is_waiter(config.args) and not is_waiting(collection_path)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The order within a file stays, so that what its tests share is made once.
    places = run_order([item.path for item in items])
    items.sort(key=lambda item: places[item.path])
    if FAST:
        slow = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]
    if LONG:
        return
    skip = pytest.mark.skip(reason="long; run with make test-long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)
