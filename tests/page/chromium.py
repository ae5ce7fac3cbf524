"""A real Chromium for the tests: one on the PATH, its headless shell first, else Playwright's own. `dev/chromium.sh`
brings one where it can."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Headless. Without its sandbox, which refuses to run as root: it opens nothing but our own pages."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    with sync_playwright() as started:
        if found is None and not Path(started.chromium.executable_path).exists():
            pytest.skip("no Chromium on the PATH and none of Playwright's; run dev/chromium.sh")
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
