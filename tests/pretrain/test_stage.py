"""Pre-training end to end on a few thousand bytes: phases, metrics, and death at any moment."""

import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from m2forge.config import TomlValue, write_resolved
from m2forge.corpus.token_set import CorpusWriter
from m2forge.errors import ConfigError, DataError
from m2forge.model.checkpoint import load_model
from m2forge.model.transformer import Transformer
from m2forge.observe.metrics import read_metrics
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.stage import run_pretrain
from m2forge.records import Pack
from m2forge.text.tokenizer import END_OF_TEXT, train_tokenizer
from m2forge.train.config import PhaseConfig
from m2forge.train.loop import Prefetch, Prefetched
from tests.forked import start_command
from tests.pretrain.small import NETWORK, make_config, write_corpus, write_numbered
from tests.train.walk_step import walks_counted

NUM_KILLS = 12 if os.environ.get("M2FORGE_LONG") == "1" else 3


def assert_same_weights(ours: Transformer, theirs: Transformer) -> None:
    ours_state, theirs_state = ours.state_dict(), theirs.state_dict()
    assert ours_state.keys() == theirs_state.keys()
    different = [name for name in ours_state if not torch.equal(ours_state[name], theirs_state[name])]
    assert different == []


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the finished run of `make_config`, which no test changes."""
    folder = tmp_path_factory.mktemp("runs")
    assert run_pretrain(make_config(corpus), folder) == folder / "small" / "model"
    return folder


def test_all_phases_run_and_report(runs: Path) -> None:
    model = load_model(runs / "small" / "model")
    assert len(model.mtp) == 3
    assert model.config.max_context == 64
    assert (runs / "small").stat().st_mode & 0o777 == 0o700
    steps = read_metrics(runs / "small" / "metrics.jsonl")
    assert [step.step for step in steps] == list(range(1, 23))
    first, last = steps[0].values, steps[-1].values
    assert {"loss/code", "loss/web", "mtp_loss/1", "grad_norm", "grad_norm/layer_1", "max_vio", "mfu"} <= first.keys()
    assert {"draft_agreement/1", "tokens_per_s", "data_share", "lr", "expert_load_max/0", "max_vio/2"} <= first.keys()
    assert {"mtp_loss/3", "grad_norm/mtp_2"} <= last.keys()
    assert first["lr"] == pytest.approx(1e-3)
    assert last["mtp_weight"] == pytest.approx(0.1)
    assert last["loss"] < first["loss"]


def test_pre_training_moves_router_biases_unless_frozen(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus)
    config = config.model_copy(update={"phases": config.phases[:1]})
    frozen = config.model_copy(update={"train": config.train.model_copy(update={"router_bias": "frozen"})})
    for kind, run, is_moved in (("balanced", config, True), ("frozen", frozen, False)):
        state = load_model(run_pretrain(run, tmp_path / kind)).state_dict()
        biases = [value for name, value in state.items() if name.endswith("router.bias")]
        assert [bool(bias.any()) for bias in biases] == [is_moved] * 3


def test_frozen_phase_trains_the_modules_alone(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus)
    before = load_model(run_pretrain(config.model_copy(update={"phases": config.phases[:2]}), tmp_path / "a"))
    after = load_model(run_pretrain(config.model_copy(update={"phases": config.phases[:3]}), tmp_path / "b"))
    state = after.state_dict()
    main = {name: weight for name, weight in before.state_dict().items() if not name.startswith("mtp.")}
    assert all(torch.equal(weight, state[name]) for name, weight in main.items())
    assert not torch.equal(state["mtp.0.projection.weight"], state["mtp.1.projection.weight"])


def test_a_walk_trains_as_whole_packs_do(corpus: Path, runs: Path, tmp_path: Path) -> None:
    machine: dict[str, TomlValue] = {"device": "cpu", "num_threads": 1}
    walk: dict[str, TomlValue] = {"recompute": "walk", "walk": {"segment_tokens": 20, "stack": "host"}}
    config = make_config(corpus, train={"machine": machine | walk})
    with walks_counted() as counted:
        run_pretrain(config.model_copy(update={"phases": config.phases[:1]}), tmp_path)
    expected = read_metrics(runs / "small" / "metrics.jsonl")[:6]
    found = read_metrics(tmp_path / "small" / "metrics.jsonl")
    # Packs of 64 tokens in documents of 32 make four segments or more.
    assert counted.num_segments > 3 * counted.num_walks == 3 * 12
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "mtp_loss/1", "grad_norm"):
            # Float32, in other sums; the weights of six steps carry it on.
            assert ours.values[name] == pytest.approx(theirs.values[name], rel=2e-3)


def test_checkpoints_are_kept_to_the_number_asked(runs: Path) -> None:
    names = sorted(path.name for path in (runs / "small" / "checkpoints").iterdir())
    assert names == ["step-00000020", "step-00000022"]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_stopping_after_any_step_changes_no_bit(
    corpus: Path, runs: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_config(corpus).model_dump(mode="json", exclude_none=True)["train"]
    config = make_config(corpus, train=data | {"optimizer": {"kind": kind}})
    is_finished = config.train == make_config(corpus).train
    whole = load_model(runs / "small" / "model" if is_finished else run_pretrain(config, tmp_path / "whole"))
    from m2forge.train.loop import TrainLoop

    original, left = TrainLoop.step, [0]

    def step(self: TrainLoop, *args: object) -> object:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainLoop, "step", step)
    generator = random.Random(0)
    for _ in range(40):
        left[0] = generator.randrange(4, 9)
        try:
            folder = run_pretrain(config, tmp_path / "parts")
            break
        except KeyboardInterrupt:
            continue
    assert_same_weights(load_model(folder), whole)


def watch_steps(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, list[Pack]], list[int]]:
    """What each step trained on, the last time that it was taken, and at which steps to die next."""
    from m2forge.train.loop import TrainLoop

    original = TrainLoop.step
    trained: dict[int, list[Pack]] = {}
    deaths: list[int] = []

    def step(self: TrainLoop, phase: PhaseConfig, ahead: Prefetch, *args: object) -> object:
        if deaths and self.position.step == deaths[0]:
            deaths.pop(0)
            raise KeyboardInterrupt
        take, number = ahead.take, self.position.step

        def taking() -> Prefetched:
            taken = take()
            trained[number] = taken.packs
            return taken

        monkeypatch.setattr(ahead, "take", taking)
        try:
            return original(self, phase, ahead, *args)  # type: ignore[arg-type]
        finally:
            monkeypatch.setattr(ahead, "take", take)

    monkeypatch.setattr(TrainLoop, "step", step)
    return trained, deaths


@pytest.mark.parametrize(
    "second",
    [{}, {"context": 64, "pack_tokens": 128}, {"context": 16, "mixture": {"web": 0.65, "code": 0.35}}],
)
def test_two_phases_of_half_a_corpus_read_every_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: dict[str, TomlValue]
) -> None:
    """Whatever context and mixture the second has, and however often the run dies and goes on."""
    tokens = write_numbered(tmp_path / "corpus", 40)
    total = sum(map(len, tokens.values()))
    num_steps = total // 2 // 64
    phase: dict[str, TomlValue] = {"context": 32, "pack_tokens": 64, "lr": {"start": 1e-3}, "steps": num_steps}
    # The second phase reads more than its half, so that domains end one after the other.
    phases: list[TomlValue] = [phase | {"name": "a"}, phase | {"name": "b", "steps": 2 * num_steps} | second]
    config = make_config(tmp_path / "corpus", phases=phases)
    trained, deaths = watch_steps(monkeypatch)
    deaths += [6, num_steps - 1, num_steps + 6]
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_pretrain(config, tmp_path / "runs")
    run_pretrain(config, tmp_path / "runs")
    read: dict[int, list[int]] = {0: [], 1: []}
    for step in sorted(trained):
        for pack in trained[step]:
            for tag, token in zip(np.repeat(pack.tags, pack.lengths).tolist(), pack.tokens.tolist(), strict=True):
                read[tag].append(token)
    for tag, expected in tokens.items():
        assert len(read[tag]) >= len(expected)
        assert sorted(read[tag][: len(expected)]) == expected


def test_padding_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Documents of 20 tokens leave 4 of each 64 empty."""
    with CorpusWriter(tmp_path / "corpus", vocab_size=64) as writer:
        for number in range(40):
            writer.add(("code", "web")[number % 2], np.full(20, number), split="train")
        writer.finish()
    config = make_config(tmp_path / "corpus")
    with caplog.at_level("INFO", "m2forge"):
        run_pretrain(config.model_copy(update={"phases": config.phases[:2]}), tmp_path)
    steps = read_metrics(tmp_path / "small" / "metrics.jsonl")
    counts = [step.values["num_tokens"] for step in steps]
    for number, before, step in zip(range(12), [0.0, *counts], steps, strict=False):
        room = 128 if number < 6 else 64
        assert step.values["num_tokens"] - before == room // 64 * 60
        assert step.values["padding_share"] == pytest.approx(4 / 64)
    assert "phase decay: 6.25% of its packs of 64 tokens was padding" in caplog.text


def set_source(run_dir: Path, source: object) -> None:
    path = max((run_dir / "checkpoints").glob("*/position.json"))
    content = json.loads(path.read_text())
    content["position"]["source"] = source
    path.write_text(json.dumps(content))


def test_a_position_of_an_earlier_version_is_refused_or_named(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(corpus)
    first = config.model_copy(update={"phases": config.phases[:1]})
    both = config.model_copy(update={"phases": config.phases[:2]})
    run_pretrain(first, tmp_path)
    set_source(tmp_path / "small", {"corpus": "x", "context": 32, "pieces": {}, "tokens": {}, "cut": None})
    with pytest.raises(DataError, match="start a run of another name from the checkpoint's model folder"):
        run_pretrain(both, tmp_path)
    set_source(tmp_path / "small", None)
    run_pretrain(both, tmp_path)
    assert "phase decay reads the corpus from its start" in caplog.text


def kill_at_random(command: Sequence[str], generator: random.Random, longest_s: float) -> bool:
    """Start the run and kill it at a random moment; whether it had finished before."""
    process = start_command(*command)
    process.join(generator.uniform(0.1, longest_s))
    process.kill()
    process.join()
    return process.exitcode == 0


def test_killed_runs_end_in_the_same_weights(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus)
    path = tmp_path / "small.toml"
    write_resolved(config, path)
    command = ("pretrain", str(path), "--runs")
    # The first process that is started this way waits for imports.
    start_command("params", "m2-nano").join()
    started_s = time.monotonic()
    whole_run = start_command(*command, str(tmp_path / "whole"))
    whole_run.join()
    assert whole_run.exitcode == 0
    longest_s = time.monotonic() - started_s
    generator = random.Random(1)
    for _ in range(NUM_KILLS):
        if kill_at_random((*command, str(tmp_path / "killed")), generator, longest_s):
            break
    last_run = start_command(*command, str(tmp_path / "killed"))
    last_run.join()
    assert last_run.exitcode == 0
    whole, killed = (load_model(tmp_path / name / "small" / "model") for name in ("whole", "killed"))
    assert_same_weights(killed, whole)
    lines = (tmp_path / "killed" / "small" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == 22


def test_a_changed_configuration_is_refused_on_resume(corpus: Path, runs: Path, tmp_path: Path) -> None:
    config = make_config(corpus)
    shutil.copytree(runs / "small", tmp_path / "small")
    with pytest.raises(ConfigError, match="was started with seed = 0, now it is 1"):
        run_pretrain(config.model_copy(update={"seed": 1}), tmp_path)


def test_a_finished_run_goes_on_with_phases_that_are_added(corpus: Path, runs: Path, tmp_path: Path) -> None:
    config = make_config(corpus)
    whole = load_model(runs / "small" / "model")
    run_pretrain(config.model_copy(update={"phases": config.phases[:2]}), tmp_path / "parts")
    assert_same_weights(load_model(run_pretrain(config, tmp_path / "parts")), whole)


def test_a_folder_does_not_stand_in_for_a_preset(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(corpus)
    short = config.model_copy(update={"phases": config.phases[:1]})
    whole = load_model(run_pretrain(short, tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    Path("m2-nano").mkdir()
    assert_same_weights(load_model(run_pretrain(short, tmp_path / "again")), whole)


def test_a_model_of_another_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus)
    texts = ["It isn't late; nobody slept, and nobody isn't awake."] * 4
    shutil.copytree(corpus, tmp_path / "corpus")
    train_tokenizer(texts, 257, [END_OF_TEXT]).save(tmp_path / "corpus" / "tokenizer")
    config = config.model_copy(update={"corpus": str(tmp_path / "corpus"), "phases": config.phases[:1]})
    base = run_pretrain(config, tmp_path / "runs")
    further = config.model_copy(update={"name": "further", "model": str(base), "model_set": ()})
    run_pretrain(further, tmp_path / "runs")
    shutil.rmtree(tmp_path / "corpus" / "tokenizer")
    train_tokenizer(texts, 270, [END_OF_TEXT]).save(tmp_path / "corpus" / "tokenizer")
    with pytest.raises(ConfigError, match="encode the same text differently"):
        run_pretrain(further.model_copy(update={"name": "other"}), tmp_path / "runs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phases": [{"mixture": {"cod": 1.0}}]}, "did you mean 'code'"),
        ({"phases": [{"num_mtp": 3}, {"num_mtp": 2}]}, "phase decay: num_mtp 2 is less than the 3 modules"),
        ({"model_set": [*NETWORK, "num_mtp=0"]}, "phase modules: num_mtp 3, .* build it with num_mtp = 1"),
        ({"phases": [{"context": 128}]}, "pack_tokens .64. must hold one document of context .128."),
        ({"model": "m2-nan"}, "did you mean 'm2-nano'"),
        ({"corpus": "nowhere"}, "nowhere"),
    ],
)
def test_bad_configurations_are_refused_before_any_write(
    corpus: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    data = make_config(corpus).model_dump(mode="json", exclude_none=True)
    phases = change.pop("phases", None)
    if isinstance(phases, list):
        for phase, update in zip(data["phases"], phases, strict=False):
            phase.update(update)
    with pytest.raises((ConfigError, LookupError), match=message):
        run_pretrain(build_pretrain(data | change), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def build_pretrain(data: dict[str, object]) -> PretrainConfig:
    from m2forge.config import build

    return build(PretrainConfig, data)  # type: ignore[arg-type]
