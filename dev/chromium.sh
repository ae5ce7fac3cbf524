#!/bin/sh
# Finds a Chromium for the tests of the run page, or brings one: on the PATH, else Playwright's own, else Debian's package.
# Ends well in any case: where there is none, those tests are skipped and say so.
#
#     dev/chromium.sh PYTHON
python=${1:-python3}

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
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    timeout 600 sh -c 'apt-get install -qq -y --no-install-recommends chromium ||
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }' >/dev/null 2>&1 && exit 0
fi
echo "no Chromium on the PATH, by Playwright or by apt-get; the tests of the run page in a browser will be skipped"
exit 0
