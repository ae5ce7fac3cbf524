"""An agent program that is another one, and writes down what that is told.

python noting_agent.py NOTES PROGRAM
"""

import runpy
import sys
from pathlib import Path
from typing import TextIO


class Noted:
    """Standard input, of which every line is added to a file before it is read."""

    def __init__(self, told: TextIO, notes: Path) -> None:
        self._told, self._notes = told, notes

    def readline(self) -> str:
        line = self._told.readline()
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(line)
        return line


if __name__ == "__main__":
    sys.stdin = Noted(sys.stdin, Path(sys.argv[1]))  # as much of it as the program uses
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
