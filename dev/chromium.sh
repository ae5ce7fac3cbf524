#!/bin/sh
# Finds a Chromium for the tests of the run page, or brings one. The headless shell, Debian's package or Playwright's own,
# takes half the processor time of a whole Chromium, which also draws windows and their toolbars; so root on Debian gets it
# even beside another Chromium.
# Ends well in any case: where there is none, those tests are skipped and say so.
#
#     dev/chromium.sh PYTHON
python=${1:-python3}

command -v chromium-headless-shell >/dev/null 2>&1 && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    install="apt-get install -qq -y --no-install-recommends"
    timeout 600 sh -c "$install chromium-headless-shell || { apt-get update -qq && $install chromium-headless-shell; }" \
        >/dev/null 2>&1 && exit 0
fi
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
"$python" -c 'import sys
from playwright.sync_api import sync_playwright
from pathlib import Path
with sync_playwright() as playwright:
    sys.exit(not Path(playwright.chromium.executable_path).exists())' 2>/dev/null && exit 0

echo "looking for a Chromium to test the run page with"
timeout 300 "$python" -m playwright install chromium >/dev/null 2>&1 && exit 0
echo "no Chromium on the PATH, by Playwright or by apt-get; the tests of the run page in a browser will be skipped"
exit 0
