"""Compares answers: an answer and a check in, a score from 0 to 1 out.

    {"exact": ["7G"]}                                  any of these after `plain`
    {"literal": "a  b"}                                the same text but for white space around it and a final full stop
    {"numeric": 3.5, "tolerance": 0.01}                the last number in the answer, within the tolerance
    {"regex": "(?i)paris"}                             the pattern occurs in the answer
    {"choice": "B", "options": ["A", "B"]}             the last option that stands alone in the answer
    {"stack": "a b +", "cases": [{"a": 1, "b": 2}]}    a program of the stack machine with the same results
    {"command": ["sh", "t.sh"], "timeout_s": 60}       a command in the workspace (`command_score`)

It imports the standard library alone, because task folders carry a copy of this file (`tasks/folders/export.py`). There
it is a program: `answer.py CHECK.json ANSWER.txt` prints the score.
"""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

MAX_ANSWER_BYTES = 1 << 20
"""Limit of an answer in a file; a longer one is wrong."""
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def plain(answer: str) -> str:
    return " ".join(answer.split()).removesuffix(".").rstrip()


def literal(answer: str) -> str:
    return answer.strip().removesuffix(".").rstrip()


def last_number(answer: str) -> float | None:
    numbers = NUMBER.findall(answer)
    return float(numbers[-1].replace(",", "")) if numbers else None


def chosen_option(answer: str, options: Sequence[str]) -> str | None:
    """The option that stands alone last in the answer."""
    found: tuple[int, int, str] | None = None
    for option in options:
        for match in re.finditer(rf"(?<!\w){re.escape(option)}(?!\w)", answer):
            # Of two options that begin together, the longer one was chosen.
            span = (match.start(), len(option), option)
            found = span if found is None else max(found, span)
    return None if found is None else found[2]


def output_score(output: str) -> float:
    """The score of a command that succeeded: the number from 0 to 1 in its last line of output, else 1."""
    lines = output.strip().splitlines()
    try:
        score = float(lines[-1])
    except (ValueError, IndexError):
        return 1.0
    return score if 0 <= score <= 1 else 1.0


def score(check: Mapping[str, object], answer: str) -> float:
    match check:
        case {"exact": list(accepted)}:
            return float(plain(answer) in [plain(text) for text in accepted])
        case {"literal": str(text)}:
            return float(literal(answer) == text)
        case {"numeric": int() | float() as expected, "tolerance": int() | float() as tolerance}:
            number = last_number(answer)
            return float(number is not None and abs(number - expected) <= tolerance)
        case {"regex": str(pattern)}:
            return float(re.search(pattern, answer) is not None)
        case {"choice": str(option), "options": list(options)}:
            return float(chosen_option(answer, options) == option)
        case {"stack": str(program), "cases": list(cases)}:
            return _stack_score(program, plain(answer), cases)
    raise ValueError(f"no check of an answer: {check!r}")


def _stack_score(program: str, answer: str, cases: Sequence[Mapping[str, int]]) -> float:
    try:
        from stack_machine import ProgramError, run_program  # type: ignore[import-not-found]  # beside this file there
    except ImportError:
        from m2forge.tasks.stack_machine import ProgramError, run_program
    try:
        return float(all(run_program(answer, inputs) == run_program(program, inputs) for inputs in cases))
    except ProgramError:
        return 0.0


def command_score(command: Sequence[str], workspace: Path, timeout_s: float) -> float:
    """1 if the command succeeds in the workspace, or what it prints (`output_score`); 0 if it fails or takes longer."""
    try:
        done = subprocess.run(
            command, cwd=workspace, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 0.0
    output = done.stdout.decode(errors="replace")
    print(output, file=sys.stderr)
    return output_score(output) if done.returncode == 0 else 0.0


def clear_path(workspace: Path, name: str) -> Path:
    """The path of a file to write, with its parent folders; links and files that stand in their place are removed."""
    path = workspace
    for part in Path(name).parts[:-1]:
        path = path / part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
        path.mkdir(exist_ok=True)
    return path / Path(name).name


def read_answer(path: Path) -> str:
    """The text of a regular file; empty if there is none. A link is not followed: it may lead to the tests."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        content = b""
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            while len(content) <= MAX_ANSWER_BYTES and (read := os.read(descriptor, MAX_ANSWER_BYTES + 1)):
                content += read
    finally:
        os.close(descriptor)
    return content.decode(errors="replace") if len(content) <= MAX_ANSWER_BYTES else ""


def main(check_path: str, answer_path: str) -> None:
    check: Mapping[str, object] = json.loads(Path(check_path).read_text())
    if "command" in check:
        workspace = Path(answer_path)
        for name, content in cast("Mapping[str, str]", check["files"]).items():
            path = clear_path(workspace, name)
            path.unlink(missing_ok=True)
            path.write_text(content, encoding="utf-8")
        found = command_score(cast("list[str]", check["command"]), workspace, cast("float", check["timeout_s"]))
    else:
        found = score(check, read_answer(Path(answer_path)))
    print(f"{found:g}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
