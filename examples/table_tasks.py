"""Tasks on small tables for one shell: a seed in, questions, their task folders and demonstrations out.

    Read t7. Lines with fox. Column 3, in order, first 4. Write o3.      grep fox t7|cut -f3|sort -n|head -4>o3
    Read t2. Column 1, without repeats. Write o8.                        cut -f1 t2|sort|uniq>o8

Two steps are easily forgotten: numbers are in order only after `sort -n`, and `uniq` removes repeats only where they
are neighbours, so that it needs `sort` before it. In most questions one of them matters, and every table is drawn so
that forgetting it shows. A fallible demonstrator forgets one in two of three such questions.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from m2forge.config import TomlValue
from m2forge.tasks.folders.export import BASE_IMAGE
from m2forge.tasks.folders.folder import FileKind, FolderFile, write_folder
from m2forge.tasks.task_set import Split

ANIMALS = ("ant", "bee", "cat", "elk", "fox", "hen", "owl", "yak")
COLOURS = ("blue", "gray", "pink", "red")
COLOUR_COLUMN, NUMBER_COLUMN = 2, 3
NUM_LINES = (16, 24)
FIRST = (2, 5)
"""Limits of the numbers of lines of a table, and of those that a question asks for."""
KINDS = {"order": 7, "repeats": 7, "counts": 4, "both": 2, "plain": 2}
"""Kinds of questions and their weights. All but `plain` have a step that is easily forgotten."""
WORKSPACE, USER = "/workspace", 1000

_TEST = """#!/bin/sh
mkdir -p /logs/verifier
reward=0
# A link could lead to the expected lines.
if [ -f {path} ] && [ ! -L {path} ]; then
    {show} | cmp -s - /tests/expected && reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
"""

Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    table: str
    """Name of the file that is read."""
    output: str
    """Name of the file that is written."""
    word: str
    """Only lines with this word count; empty: all."""
    column: int
    first: int
    """How many lines to write; 0: all."""

    def instruction(self) -> str:
        lines = f" Lines with {self.word}." if self.word else ""
        what = {"order": ", in order", "repeats": ", without repeats", "counts": ", counted"}.get(self.kind, "")
        what = ", in order, without repeats" if self.kind == "both" else what
        first = f", first {self.first}" if self.first else ""
        return f"Read {self.table}.{lines} Column {self.column}{what}{first}. Write {self.output}."

    def steps(self) -> tuple[str, ...]:
        """The commands after `cut` that answer the question."""
        return {
            "order": ("sort -n",),
            "repeats": ("sort", "uniq"),
            "counts": ("sort", "uniq -c"),
            "both": ("sort -n", "uniq"),
            "plain": (),
        }[self.kind]

    def mistakes(self) -> tuple[tuple[str, ...], ...]:
        """The same with a step forgotten; empty if there is none to forget."""
        return {
            "order": (("sort",),),
            "repeats": (("uniq",),),
            "counts": (("uniq -c",),),
            "both": (("sort", "uniq"), ("sort -n",)),
            "plain": (),
        }[self.kind]

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the written lines counts."""
        return self.kind in ("order", "both", "plain")

    def command(self, steps: Sequence[str]) -> str:
        if self.word:
            parts = [f"grep {self.word} {self.table}", f"cut -f{self.column}"]
        else:
            parts = [f"cut -f{self.column} {self.table}"]
        parts += steps
        if self.first:
            parts.append(f"head -{self.first}")
        return "|".join(parts) + f">{self.output}"

    def written(self, rows: Sequence[Row], steps: Sequence[str]) -> list[str]:
        """What `command(steps)` writes."""
        lines = [row[self.column - 1] for row in rows if not self.word or self.word in row]
        for step in steps:
            lines = _apply(step, lines)
        lines = lines[: self.first] if self.first else lines
        return lines if self.is_ordered else sorted(lines)


def _apply(step: str, lines: list[str]) -> list[str]:
    if step == "sort":
        return sorted(lines)
    if step == "sort -n":
        return sorted(lines, key=lambda line: (int(line), line))
    runs: list[list[str]] = []
    for line in lines:
        if runs and runs[-1][0] == line:
            runs[-1].append(line)
        else:
            runs.append([line])
    return [f"{len(run):7d} {run[0]}" if step == "uniq -c" else run[0] for run in runs]


def draw_question(rng: random.Random) -> Question:
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    column = NUMBER_COLUMN if kind in ("order", "both") else rng.randint(1, NUMBER_COLUMN - (kind != "plain"))
    word = rng.choice(COLOURS) if column != COLOUR_COLUMN and rng.random() < 0.5 else ""
    first = rng.randint(*FIRST) if kind == "plain" or (kind in ("order", "both") and rng.random() < 0.7) else 0
    return Question(kind, f"t{rng.randrange(10)}", f"o{rng.randrange(10)}", word, column, first)


def draw_rows(question: Question, rng: random.Random) -> list[Row]:
    """A table on which every mistake shows, and on which the answer is not empty."""
    while True:
        rows = [
            (rng.choice(ANIMALS), rng.choice(COLOURS), str(rng.choice((rng.randint(2, 9), rng.randint(10, 120)))))
            for _ in range(rng.randint(*NUM_LINES))
        ]
        if question.kind == "both":
            rows += [(rng.choice(ANIMALS), row[1], row[2]) for row in rng.sample(rows, 3)]
        right = question.written(rows, question.steps())
        others = [question.written(rows, steps) for steps in question.mistakes()]
        if len(right) >= max(2, question.first) and right not in others:
            return rows


def questions(seed: int, num_held_out: int) -> tuple[list[Question], Iterator[Question]]:
    """Distinct held-out questions, and an endless stream of others."""
    rng = random.Random(f"{seed}/questions")
    held_out: dict[Question, None] = {}
    while len(held_out) < num_held_out:
        held_out[draw_question(rng)] = None

    def others() -> Iterator[Question]:
        while True:
            question = draw_question(rng)
            if question not in held_out:
                yield question

    return list(held_out), others()


def write_folders(dest: Path, asked: Sequence[tuple[Question, Split]], seed: int) -> None:
    """Write one task folder per question."""
    files: dict[str, FolderFile] = {}
    for index, (question, split) in enumerate(asked):
        name = f"table-{index:03d}"
        inner = _folder(name, question, draw_rows(question, random.Random(f"{seed}/{index}/rows")), split)
        files |= {f"{name}/{path}": file for path, file in inner.items()}
    write_folder(dest, files)


def _folder(name: str, question: Question, rows: Sequence[Row], split: Split) -> dict[str, FolderFile]:
    path = f"{WORKSPACE}/{question.output}"
    show = f"cat {path}" if question.is_ordered else f"LC_ALL=C sort {path}"
    expected = "".join(f"{line}\n" for line in question.written(rows, question.steps()))
    texts = {
        "task.toml": tomli_w.dumps(_table(name, path, split)),
        "instruction.md": question.instruction() + "\n",
        "environment/Dockerfile": (
            f"FROM {BASE_IMAGE}\nCOPY --chown={USER}:{USER} files/ {WORKSPACE}/\nWORKDIR {WORKSPACE}\n"
        ),
        f"environment/files/{question.table}": "".join("\t".join(row) + "\n" for row in rows),
        "tests/expected": expected,
    }
    programs = {
        "tests/test.sh": _TEST.format(path=path, show=show),
        "solution/solve.sh": f"#!/bin/sh\n{question.command(question.steps())}\n",
    }
    files = {name: FolderFile(text.encode()) for name, text in texts.items()}
    return files | {name: FolderFile(text.encode(), FileKind.EXECUTABLE) for name, text in programs.items()}


def _table(name: str, output: str, split: Split) -> dict[str, TomlValue]:
    return {
        "schema_version": "1.4",
        "artifacts": [output],
        "task": {"name": f"m2forge/{name}", "keywords": ["shell"]},
        "metadata": {"m2forge": {"source": "table_tasks", "package": name, "domain": "agent", "split": split}},
        "agent": {"timeout_sec": 60.0, "user": USER},
        "verifier": {"environment_mode": "separate", "timeout_sec": 30.0},
        "environment": {
            "network_mode": "no-network",
            "workdir": WORKSPACE,
            "cpus": 1,
            "memory_mb": 512,
            "storage_mb": 64,
        },
    }


def demonstrated_steps(question: Question, rng: random.Random, right_share: float) -> tuple[str, ...]:
    """Steps that a fallible demonstrator takes: of questions with a step to forget it answers `right_share` right."""
    mistakes = question.mistakes()
    return question.steps() if not mistakes or rng.random() < right_share else rng.choice(mistakes)
