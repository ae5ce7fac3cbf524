"""Runs test files of a Node project, one after another: files in, the report of each out.

    node_suite.py FILE...

A file's text says what runs it: mocha (describe, it), ava, or node itself, for node:test, tape and plain scripts. All
print TAP. The report is written to the path in TEST_REPORT, JSON Lines: {target, outcome, output}. It ends where the
files together have taken the CPU time that the limit of a process allows.

It imports the standard library alone, because images carry a copy of this file.
"""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MODULES = "/node_modules"
"""Beside the repository and not in it, where `git clean` would delete it; Node looks for modules in every parent."""
MAX_OUTPUT = 200_000
FILE_S = 120
IMPORTS = r"""(?:require\s*\(\s*|\bfrom\s+|\bimport\s+)['"]{}['"]"""


def runner(text: str) -> str:
    """mocha, ava, tape, node or script."""
    for name, modules in (("node", "(?:node:)?test"), ("ava", "ava"), ("tape", "(?:tape|tap)")):
        if re.search(IMPORTS.format(modules), text):
            return name
    return "mocha" if re.search(r"^\s*(?:describe|it|test|suite)(?:\.\w+)?\s*\(", text, re.MULTILINE) else "script"


def command(file: str, text: str) -> Sequence[str]:
    found = runner(text)
    if found == "mocha":
        return ("node", f"{MODULES}/mocha/bin/_mocha", "--reporter", "tap", "--exit", file)
    if found == "ava":
        return ("node", f"{MODULES}/ava/entrypoints/cli.mjs", "--tap", file)
    return ("node", *(("--test-reporter=tap",) if found == "node" else ()), file)


def run(file: str) -> "dict[str, str | bool]":
    text = Path(file).read_text(errors="replace") if Path(file).is_file() else ""
    if not text:
        return {"target": file, "broken": "the file is missing or empty"}
    try:
        done = subprocess.run(
            command(file, text),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=FILE_S,
        )
        status, output = done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        status, output = 1, (error.stdout or b"").decode(errors="replace") + f"\nover {FILE_S} s"
    outcome = "failed" if status else "passed"
    return {"target": file, "outcome": outcome, "output": output[-MAX_OUTPUT:], "is_grouped": runner(text) == "tape"}


def is_over() -> bool:
    limit, used = resource.getrlimit(resource.RLIMIT_CPU)[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    return limit != resource.RLIM_INFINITY and used.ru_utime + used.ru_stime >= limit


if __name__ == "__main__":
    with Path(os.environ["TEST_REPORT"]).open("w", encoding="utf-8") as report:
        for name in sys.argv[1:]:
            found = run(name)
            report.write(json.dumps(found) + "\n")
            if is_over():
                break
            if found.get("outcome") != "passed":
                print(name, str(found.get("output"))[-2000:], sep="\n")
