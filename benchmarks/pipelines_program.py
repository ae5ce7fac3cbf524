"""The pipeline that `pipelines.py` kills: texts in, folders and lines out, through every kind of stage.

python benchmarks/pipelines_program.py RUN_DIR URL NUM_ITEMS WORKERS
"""

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from m2forge.pipelines.config import EndpointConfig, PipelineConfig, QuestionsConfig
from m2forge.pipelines.output import WriteFolders, WriteLines
from m2forge.pipelines.run import run_stages
from m2forge.pipelines.shared_stage import Dedup, Select
from m2forge.pipelines.stage import Context, Item, Passed, Pipeline, Rejection, Rule, Source, Stage
from m2forge.tasks.folders.folder import FolderFile
from m2forge.train.run_dir import hold_run

WORDS = [f"word{number}" for number in range(500)]


class Texts(Source):
    """Random texts; one in eleven is no item."""

    name = "texts"

    def __init__(self, num: int) -> None:
        self._num = num

    def fingerprint(self) -> str:
        return str(self._num)

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        for number in range(self._num):
            rng = random.Random(f"{context.seed}/{number}")
            if number % 11 == 10:
                yield Rejection("unreadable", {"number": number}, id=f"text-{number}")
            else:
                text = " ".join(rng.choices(WORDS, k=30))
                yield Item(f"text-{number}", {"number": number, "text": text, "group": str(number % 7)})


def num_draws(text: str) -> int:
    return min(3, 1 + text.count("word12"))


class Ask(Stage):
    """A model continues the text, sometimes more than once."""

    name = "ask"
    runs_in = "threads"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        messages = [{"role": "user", "content": item.text("text")}]
        answers = [context.ask("model", messages, draw=draw).content for draw in range(num_draws(item.text("text")))]
        made = [item.adding(answer=answer) for answer in answers]
        return made[0] if len(made) == 1 else made


class Digest(Stage):
    """Computes in worker processes."""

    name = "digest"
    runs_in = "processes"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        digest = hashlib.pbkdf2_hmac("sha256", item.text("answer").encode(), b"", 20_000).hex()
        if digest[0] == "0":
            return Rejection("digest", {"digest": digest})
        return item.adding(digest=digest, blob=context.put(digest.encode()))


def is_even(item: Item) -> Passed | Rejection:
    number = item.data["number"]
    assert isinstance(number, int)
    return item if number % 5 else Rejection("fifth", {"number": number})


def folder(item: Item, context: Context) -> tuple[str, Mapping[str, FolderFile]]:
    files = {
        "task.toml": FolderFile(b'schema_version = "1.0"\n'),
        "instruction.md": FolderFile(f"{item.text('text')}\n".encode()),
        "tests/digest.txt": FolderFile(context.get(item.text("blob"))),
    }
    return item.id, files


def make_pipeline(num: int) -> Pipeline:
    stages = (
        Rule("rule", is_even),
        Ask(),
        Digest(),
        Dedup(lambda item: f"{item.text('text')} {item.text('answer')}"),
        Select(lambda item: item.text("group"), lambda item: float(len(item.text("answer"))), max(1, num // 8)),
        WriteFolders("tasks", folder),
        WriteLines("lines.jsonl", lambda item: item.data),
    )
    return Pipeline(Texts(num), stages)


def run(run_dir: Path, url: str, num: int, workers: int) -> None:
    config = PipelineConfig(
        name="run",
        workers=workers,
        models={"model": EndpointConfig(url=url, model="m", retry_s=0.05)},
        questions=QuestionsConfig(source="counters"),
    )
    with hold_run(run_dir):
        run_stages(make_pipeline(num), config, run_dir)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
