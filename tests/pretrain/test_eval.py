"""Held-out loss during pre-training: what is evaluated, what is kept and exported, and death at any moment."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from m2forge import cli
from m2forge.config import TomlValue, write_resolved
from m2forge.corpus.reader import CorpusReader
from m2forge.corpus.token_set import CorpusWriter
from m2forge.errors import ConfigError
from m2forge.model.checkpoint import load_model
from m2forge.model.plan import Documents
from m2forge.observe.metrics import read_metrics
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.stage import CorpusSource, HeldOutDocuments, run_pretrain
from m2forge.records import NO_TARGET, Pack
from m2forge.train.checkpoint import CheckpointStore
from m2forge.train.config import CheckpointConfig
from m2forge.train.loop import TrainLoop
from m2forge.train.position import read_position
from tests.pretrain.small import make_config

NUM_DOCUMENTS = 48
HALF = 128
"""Held-out tokens are this or above, the others below."""


def write_split(folder: Path, *, seed: int = 0) -> Path:
    """Every fourth document is held out. It has tokens that the others lack: its loss rises while they are learnt."""
    rng = np.random.default_rng(seed)
    with CorpusWriter(folder, vocab_size=256) as writer:
        for index in range(NUM_DOCUMENTS):
            tokens, is_held_out = rng.integers(0, HALF, int(rng.integers(5, 40))), index % 4 == 0
            writer.add(
                ("code", "web")[index % 2],
                tokens + HALF * is_held_out,
                split="held_out" if is_held_out else "train",
            )
        writer.finish()
    return folder


def configure(path: Path, **evaluation: TomlValue) -> PretrainConfig:
    """Two phases; the second evaluates at an odd step and at its end, so also where no checkpoint is due."""
    phase: dict[str, TomlValue] = {"context": 16, "pack_tokens": 32, "lr": {"start": 1e-2}}
    phases: list[TomlValue] = [phase | {"name": "a", "steps": 3}, phase | {"name": "b", "context": 32, "steps": 6}]
    return make_config(path, phases=phases, eval={"every": 5} | evaluation)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_split(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the finished run, started by the command."""
    folder = tmp_path_factory.mktemp("runs")
    write_resolved(configure(corpus, export="best"), folder / "small.toml")
    assert cli.main(["pretrain", str(folder / "small.toml"), "--runs", str(folder)]) == 0
    return folder


def eval_losses(run_dir: Path) -> dict[int, float]:
    steps = read_metrics(run_dir / "metrics.jsonl")
    return {step.step: step.values["eval/loss"] for step in steps if "eval/loss" in step.values}


def plain_loss(model_folder: Path, packs: Sequence[Pack]) -> float:
    model, total, num_targets = load_model(model_folder).double(), 0.0, 0
    with torch.no_grad():
        for pack in packs:
            tokens = torch.tensor(pack.tokens, dtype=torch.int64)
            output = model(tokens, Documents(pack.lengths.tolist(), tokens.device))
            targets = torch.tensor(pack.targets, dtype=torch.int64)
            logits = model.logits(output.hidden_ND)
            total += float(F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum"))
            num_targets += int((targets != NO_TARGET).sum())
    return total / num_targets


def test_the_best_checkpoint_is_stored_and_exported(corpus: Path, runs: Path) -> None:
    run_dir = runs / "small"
    losses = eval_losses(run_dir)
    assert list(losses) == [3, 5, 9]
    # The first evaluation of phase b is its best.
    assert losses[5] < losses[9]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (5, 8, 9)
    ]
    best = read_position(run_dir / "checkpoints" / "step-00000009").best
    assert best is not None
    assert (best.step, best.loss) == (5, losses[5])
    exported, stored = (load_model(path) for path in (run_dir / "model", run_dir / "checkpoints/step-00000005/model"))
    assert all(torch.equal(weight, stored.state_dict()[name]) for name, weight in exported.state_dict().items())
    reader = CorpusReader(corpus, context=16, pack_tokens=32, seed=0, split="held_out")
    packs = list(reader.packs(reader.num_tokens, reader.num_tokens))
    # Float32 against float64.
    assert plain_loss(run_dir / "model", packs) == pytest.approx(losses[5], rel=1e-5)


def test_metrics_name_domains_modules_and_tokens(corpus: Path, runs: Path) -> None:
    values = read_metrics(runs / "small" / "metrics.jsonl")[4].values
    num_held_out = CorpusReader(corpus, context=16, pack_tokens=32, seed=0, split="held_out").num_tokens
    assert {"loss", "eval/loss/code", "eval/mtp_loss/1", "tokens_per_s"} <= values.keys()
    assert num_held_out - 16 <= values["eval/num_tokens"] <= num_held_out
    events = b"".join(path.read_bytes() for path in (runs / "small" / "tensorboard").iterdir())
    assert b"eval/loss" in events


def test_evaluation_changes_no_bit_of_training(corpus: Path, runs: Path, tmp_path: Path) -> None:
    without = configure(corpus).model_copy(update={"eval": None})
    plain = load_model(run_pretrain(without, tmp_path)).state_dict()
    last = load_model(runs / "small" / "checkpoints" / "step-00000009" / "model").state_dict()
    assert all(torch.equal(weight, last[name]) for name, weight in plain.items())
    position = tmp_path / "small" / "checkpoints" / "step-00000009" / "position.json"
    assert "best" not in json.loads(position.read_text())["position"]


def test_no_held_out_token_is_trained_on(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: set[int] = set()
    evaluated: set[int] = set()
    next_pack, packs = CorpusSource.next_pack, HeldOutDocuments.packs

    def note_trained(self: CorpusSource) -> Pack:
        pack = next_pack(self)
        trained.update(pack.tokens.tolist())
        return pack

    def note_evaluated(self: HeldOutDocuments) -> Iterator[Pack]:
        for pack in packs(self):
            evaluated.update(pack.tokens.tolist())
            yield pack

    monkeypatch.setattr(CorpusSource, "next_pack", note_trained)
    monkeypatch.setattr(HeldOutDocuments, "packs", note_evaluated)
    config = configure(corpus)
    phase = config.phases[0].model_copy(update={"steps": 6, "pack_tokens": 512})
    run_pretrain(config.model_copy(update={"phases": (phase,)}), tmp_path)
    assert len(trained) > HALF // 2
    assert len(evaluated) > HALF // 2
    assert max(trained) < HALF <= min(evaluated)


def test_a_run_that_dies_anywhere_ends_the_same(
    corpus: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before steps and after each evaluation, before the checkpoint."""
    deaths = {("_step", 6), ("save", 5), ("save", 9)}
    original, begin = TrainLoop.step, CheckpointStore.begin

    def die(place: tuple[str, int]) -> None:
        if place in deaths:
            deaths.remove(place)
            raise KeyboardInterrupt

    def step(self: TrainLoop, *args: object) -> object:
        die(("_step", self.position.step))
        return original(self, *args)  # type: ignore[arg-type]  # passed on as they came

    def dying_save(self: CheckpointStore, *args: object) -> None:
        die(("save", args[1].step))  # type: ignore[attr-defined]  # a Position
        begin(self, *args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(TrainLoop, "step", step)
    monkeypatch.setattr(CheckpointStore, "begin", dying_save)
    config = configure(corpus, export="best")
    # So that each start comes further than the one before.
    checkpoint = CheckpointConfig(every_steps=2, keep=2)
    config = config.model_copy(update={"train": config.train.model_copy(update={"checkpoint": checkpoint})})
    while deaths:
        with pytest.raises(KeyboardInterrupt):
            run_pretrain(config, tmp_path)
    run_pretrain(config, tmp_path)
    whole, parts = (load_model(path / "small" / "model").state_dict() for path in (runs, tmp_path))
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    assert eval_losses(tmp_path / "small") == eval_losses(runs / "small")


def test_what_is_exported_may_change_when_a_run_is_started_again(corpus: Path, runs: Path, tmp_path: Path) -> None:
    config = configure(corpus, export="last")
    last = load_model(run_pretrain(config, tmp_path)).state_dict()
    best = load_model(run_pretrain(configure(corpus, export="best"), tmp_path)).state_dict()
    expected = load_model(runs / "small" / "model").state_dict()
    assert all(torch.equal(weight, best[name]) for name, weight in expected.items())
    assert not all(torch.equal(weight, best[name]) for name, weight in last.items())
    with pytest.raises(ConfigError, match=r"was started with eval\.num_tokens"):
        run_pretrain(configure(corpus, num_tokens=64), tmp_path)


def test_another_corpus_may_be_evaluated(corpus: Path, tmp_path: Path) -> None:
    other = write_split(tmp_path / "other", seed=1)
    config = configure(corpus, corpus=str(other), context=8, num_tokens=64)
    run_pretrain(config, tmp_path)
    packs = list(CorpusReader(other, context=8, pack_tokens=32, seed=0).packs(64, 64))
    expected = plain_loss(tmp_path / "small" / "model", packs)
    assert eval_losses(tmp_path / "small")[9] == pytest.approx(expected, rel=1e-5)


def test_unsuitable_held_out_data_is_refused(corpus: Path, tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "bare", vocab_size=256) as writer:
        writer.add("code", np.arange(99), split="train")
        writer.finish()
    with CorpusWriter(tmp_path / "bytes", vocab_size=257) as writer:
        writer.add("code", np.arange(99), split="train")
        writer.finish()
    refused = {
        "no documents in its split 'held_out'": configure(tmp_path / "bare"),
        "shares 2 shards with the training split": configure(corpus, corpus=str(corpus)),
        "was built with another tokenizer": configure(corpus, corpus=str(tmp_path / "bytes")),
    }
    config = configure(corpus, export="best")
    no_checkpoints = config.train.model_copy(update={"checkpoint": CheckpointConfig(keep=0)})
    refused["train.checkpoint.keep is 0"] = config.model_copy(update={"train": no_checkpoints})
    for message, unsuitable in refused.items():
        with pytest.raises(ConfigError, match=message):
            run_pretrain(unsuitable, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
