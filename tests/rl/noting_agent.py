"""An agent program that runs another one and records the lines that it receives.

python noting_agent.py NOTES PROGRAM
"""

import runpy
import sys
from pathlib import Path
from typing import TextIO


class Noted:
    """Standard input that appends every line to a file before the program reads it."""

    def __init__(self, stdin: TextIO, notes: Path) -> None:
        self._stdin, self._notes = stdin, notes

    def readline(self) -> str:
        line = self._stdin.readline()
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(line)
        return line


if __name__ == "__main__":
    sys.stdin = Noted(sys.stdin, Path(sys.argv[1]))  # as much of it as the program uses
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
