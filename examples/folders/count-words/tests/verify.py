"""Builds the program with flags of its own and compares its output for many inputs."""

import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"]
WORKSPACE = Path("/workspace")
LIMITS = ["sh", "-c", 'ulimit -v 65536; ulimit -t 20; exec "$0"']


def expected(text: bytes) -> bytes:
    words = text.translate(bytes.maketrans(b"\t\n\v\f\r", b"     ")).split(b" ")
    return b"%d %d %d\n" % (text.count(b"\n"), sum(word != b"" for word in words), len(text))


def inputs() -> list[bytes]:
    generator = random.Random(1)
    texts = [b"", b"\n", b"a", b"a b\n", b"\0a\0 \n\0", b"one\ttwo\rthree\vfour\ffive", b"\xff\xfe \n", b" " * 9]
    texts += [b"x" * 500 + b" " + b"y" * 79 + b"\n", b"word " * 40 + b"\n" + b"end"]
    texts += [bytes(generator.choices(b"ab \n\t\r\v\f\0", k=generator.randrange(400))) for _ in range(60)]
    texts.append(b"a line of words, again\n" * 400_000)
    return texts


def main() -> int:
    for name in ("count.c", "Makefile"):
        if (WORKSPACE / name).is_symlink() or not (WORKSPACE / name).is_file():
            return 0
    makefile = (WORKSPACE / "Makefile").read_text(errors="replace")
    if not all(flag in makefile for flag in FLAGS):
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "count"
        shutil.copyfile(WORKSPACE / "count.c", Path(scratch) / "count.c")
        command = ["gcc", *FLAGS, "-o", str(program), str(Path(scratch) / "count.c")]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            return 0
        for text in inputs():
            done = subprocess.run([*LIMITS, str(program)], input=text, capture_output=True, timeout=30)
            if done.returncode or done.stdout != expected(text):
                print(f"wrong for {text[:60]!r}: {done.stdout[:60]!r}", file=sys.stderr)
                return 0
    return 1


print(main())
