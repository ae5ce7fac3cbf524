"""Verifies a code review: a repository with review.json in, 1 out if it says truly whether a change has a fault.

    review_answer.py /testbed /tests /logs/verifier

The answer is {"fault": false} or {"fault": true, "file": PATH, "line": NUMBER}, one place and no more, so that naming
everything does not pay. Of a change with a fault, the reward is 1 if the answer names its file and one of its lines; of
one without, if the answer says so. As half of all changes have none, a reviewer with one answer for all has at most
half. Nothing of the repository runs.

It imports the standard library alone, because task folders carry a copy of this file.
"""

import json
import os
import posixpath
import sys
from collections.abc import Mapping
from pathlib import Path

ANSWER = "review.json"
MAX_ANSWER_BYTES = 64 << 10


def score(answer: object, fault: Mapping[str, object] | None) -> float:
    """`fault`: file and lines, None if the change has none."""
    if not isinstance(answer, dict) or not isinstance(answer.get("fault"), bool):
        return 0.0
    if fault is None or not answer["fault"]:
        return float(answer["fault"] is (fault is not None))
    file, line, lines = answer.get("file"), answer.get("line"), fault["lines"]
    if not isinstance(file, str) or not isinstance(line, int) or isinstance(line, bool) or not isinstance(lines, list):
        return 0.0
    return float(posixpath.normpath(file) == fault["file"] and line in lines)


def run(repository: Path, tests: Path) -> float:
    try:
        with os.fdopen(os.open(repository / ANSWER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            answer = json.loads(file.read(MAX_ANSWER_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        print(f"{ANSWER}: cannot be read: {error}", file=sys.stderr)
        return 0.0
    return score(answer, json.loads((tests / "fault.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    print(f"{run(Path(sys.argv[1]), Path(sys.argv[2])):g}")
