"""A picture of the run page, for the README and the docs.

    python dev/page_picture.py runs/demo/rl docs/images/run_page.png
    python dev/page_picture.py runs docs/images/run_list.png --view "#/?runs=demo:pretrain,demo:sft"

Serves the page of a run, or of a folder of runs, on a free port of this machine, opens it in a headless Chromium (one
on the PATH, else Playwright's own; `dev/chromium.sh` installs one), waits until curves are drawn and writes a PNG.
"""

import argparse
import asyncio
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright

from m2forge.errors import M2ForgeError
from m2forge.listener import address
from m2forge.page.serve import bind, make_page, make_server

Scheme = Literal["light", "dark"]
CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAX_BYTES = 200_000
"""The repository holds these pictures: a larger one is refused."""
SETTLE_MS = 1500
"""After the first curve, the rest of the page arrives within this time."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of the folder's page, which a thread serves."""
    with bind("127.0.0.1", 0) as listener:
        server = make_server(make_page(folder))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield address(listener)
        finally:
            server.should_exit = True
            thread.join()


def take_picture(url: str, out: Path, width: int, height: int, scheme: Scheme) -> None:
    with sync_playwright() as playwright:
        found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
        # The browser's sandbox does not run as root; it opens no page but ours.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(url)
        page.locator(".curve").first.wait_for()
        page.wait_for_timeout(SETTLE_MS)
        out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=out)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the directory of a run, or a folder of runs")
    parser.add_argument("out", type=Path, metavar="PNG", help="the picture to write")
    parser.add_argument("--view", default="#/", help="the part of the address after the host (default: #/)")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=860)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    try:
        with served(args.folder) as url:
            take_picture(f"{url}/{args.view}", args.out, args.width, args.height, args.scheme)
    except M2ForgeError as error:
        sys.exit(f"error: {error}")
    size = args.out.stat().st_size
    if size > MAX_BYTES:
        args.out.unlink()
        sys.exit(f"error: the picture has {size:,} bytes, more than {MAX_BYTES:,}; make it smaller (--width, --height)")
    print(f"{args.out}: {size:,} bytes")


if __name__ == "__main__":
    main()
