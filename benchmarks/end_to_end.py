"""From the standard library's text to an agent that calls tools: time and share of well-formed calls.

Runs examples/agent.py in a process of its own, from nothing: corpus, all phases of pre-training, fine-tuning, and
evaluation on held-out requests. The limit is the time asked for; there is no peer that does all of it. With --quick
the training is a fiftieth, which shows that every stage runs and nothing about quality.

    python benchmarks/end_to_end.py [--json] [--quick]
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Bar, arguments, finish, print_table

ROOT = Path(__file__).parent.parent
MAX_SECONDS, QUICK_SECONDS = 600.0, 60.0
MIN_VALID = 0.95


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, str(ROOT / "examples" / "agent.py"), "--runs", name]
        command += ["--scale", "0.02"] if options.quick else []
        start_s = time.monotonic()
        subprocess.run(command, check=True, cwd=ROOT)
        passed_s = time.monotonic() - start_s
        summary = json.loads((Path(name) / "summary.json").read_text())
    print_table(
        "From text to agent",
        ("stage", "seconds"),
        [(stage, f"{seconds:.0f}") for stage, seconds in summary["seconds"].items()],
    )
    bars = [Bar.at_most("seconds from text to agent", passed_s, QUICK_SECONDS if options.quick else MAX_SECONDS)]
    if not options.quick:
        bars.append(Bar.at_least("held-out requests with a well-formed call", summary["valid_calls"], MIN_VALID))
    finish(bars, options.json)


if __name__ == "__main__":
    main()
