"""Fine-tuning end to end on a few made-up trajectories: what is written, and going on after a stop."""

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from m2forge import cli
from m2forge.config import build, write_resolved
from m2forge.errors import ConfigError, FormatError, NotFoundError
from m2forge.model.build import build as build_model
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.config import AttentionConfig, LoRAConfig, ModelConfig, MoEConfig
from m2forge.model.config_file import read_config
from m2forge.model.convert import export_model
from m2forge.model.lora import is_adapter_folder
from m2forge.observe.metrics import read_metrics
from m2forge.records import Pack
from m2forge.sft import stage
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import run_sft
from m2forge.sft.synthetic import write_jsonl
from m2forge.text.template import TemplateFormat
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train import loop
from m2forge.train.config import CheckpointConfig, Curve, MachineConfig, WalkConfig
from m2forge.train.engine import PendingMetrics, TrainEngine
from m2forge.train.loop import TokenCost, TrainLoop
from m2forge.train.parallel import SINGLE_RANK
from tests.sft.sample import chat_format
from tests.sft.start import write_start
from tests.text.own_template import QWEN, tokenizer_of
from tests.train.walk_step import walks_counted


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    folder = tmp_path_factory.mktemp("start")
    tokenizer = chat_format().tokenizer
    network = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_layers=2,
        attention=AttentionConfig(
            num_heads=2, num_kv_heads=1, head_dim=16, rotary_dim=8, rope_theta=1e4, qk_norm="flat"
        ),
        moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=16),
        max_context=512,
        num_mtp=1,
    )
    save_model(build_model(network), folder / "model")
    tokenizer.save(folder / "model")
    sources = [folder / "a.jsonl", folder / "b.jsonl"]
    for seed, path in enumerate(sources):
        write_jsonl(path, 5, seed, "train")
    return build(
        SFTConfig,
        {
            "name": "small",
            "model": str(folder / "model"),
            "num_epochs": 2,
            "pack_tokens": 700,
            "lr": {"start": 3e-3, "end": 1e-3},
            "data": {"context": 512, "sources": [{"path": str(path)} for path in sources]},
            "train": {"checkpoint": {"every_steps": 2, "keep": 2}, "machine": {"device": "cpu", "num_threads": 1}},
        },
    )


@pytest.fixture(scope="module")
def runs(config: SFTConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the finished run."""
    folder = tmp_path_factory.mktemp("runs")
    run_sft(config, folder)
    return folder


def test_a_run_trains_on_every_source_and_keeps_the_tokenizer(config: SFTConfig, runs: Path) -> None:
    assert (runs / "small").stat().st_mode & 0o777 == 0o700
    steps = read_metrics(runs / "small" / "metrics.jsonl")
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert {name for step in steps for name in step.values if name.startswith("loss/")} == {"loss/a", "loss/b"}
    assert steps[-1].values["loss"] < steps[0].values["loss"]
    tokenizer = load_tokenizer(runs / "small" / "model")
    assert tokenizer.fingerprint == load_tokenizer(Path(config.model)).fingerprint


def test_stops_and_former_keys_change_no_bit(
    config: SFTConfig, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that the first stop leaves is one of an earlier release, whose keys had other names."""
    whole = load_model(runs / "small" / "model").state_dict()
    original, generator, left, num_stops = TrainLoop.step, random.Random(0), [0], 0
    path = tmp_path / "parts" / "small" / "config.toml"

    def step(self: TrainLoop, *args: object) -> object:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return original(self, *args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(TrainLoop, "step", step)
    while True:
        left[0] = generator.randrange(2, 5)
        try:
            parts = load_model(run_sft(config, tmp_path / "parts")).state_dict()
            break
        except KeyboardInterrupt:
            num_stops += 1
            assert num_stops < 20
            if num_stops == 1:
                current = path.read_text(encoding="utf-8")
                path.write_text(current.replace("[lr]", "[rate]"), encoding="utf-8")
                assert "[rate]" in path.read_text(encoding="utf-8")
    assert num_stops > 1
    assert path.read_text(encoding="utf-8") == current
    assert [name for name, weight in whole.items() if not torch.equal(weight, parts[name])] == []


def test_padding_on_cuda_counts_no_token_and_changes_no_figure(
    config: SFTConfig, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read_metrics(runs / "small" / "metrics.jsonl")
    monkeypatch.setattr(TrainEngine, "pads", True)
    run_sft(config, tmp_path)
    padded = read_metrics(tmp_path / "small" / "metrics.jsonl")
    counts = [[step.values["num_tokens"] for step in steps] for steps in (plain, padded)]
    assert counts[0] == counts[1]
    assert counts[0][-1] < len(plain) * config.pack_tokens
    loads = [
        {k: v for k, v in steps[0].values.items() if k.startswith(("expert_load", "max_vio"))}
        for steps in (plain, padded)
    ]
    assert len(loads[0]) > 0
    assert loads[0] == loads[1]
    # Float32: sums over more rows round otherwise, by a few units in the last of seven places.
    for name in ("loss", "loss/a", "mtp_loss/1", "grad_norm"):
        assert padded[0].values[name] == pytest.approx(plain[0].values[name], rel=1e-5)


def test_tokens_per_second_and_mfu_count_no_padding(
    config: SFTConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_rows, throughput = TrainEngine.step_rows, loop.throughput
    packs: list[list[Pack]] = []

    def note(self: TrainEngine, given: list[Pack], **options: Any) -> PendingMetrics:
        packs.append(list(given))
        return step_rows(self, given, **options)

    monkeypatch.setattr(TrainEngine, "pads", True)
    monkeypatch.setattr(TrainEngine, "step_rows", note)
    # Every step takes 2 s on a machine of 1e9 FLOP/s.
    monkeypatch.setattr(
        loop,
        "throughput",
        lambda num_tokens, num_flops, passed_s, waited_s, peak: throughput(num_tokens, num_flops, 2.0, waited_s, 1e9),
    )
    network = read_config(run_sft(config, tmp_path))
    steps = read_metrics(tmp_path / "small" / "metrics.jsonl")
    cost = TokenCost(network, config.data.context)
    for step, given in zip(steps, packs, strict=True):
        num_tokens = sum(int(pack.lengths.sum()) for pack in given)
        assert num_tokens < len(given) * config.pack_tokens
        assert step.values["tokens_per_s"] == pytest.approx(num_tokens / 2)
        assert step.values["mfu"] == pytest.approx(cost.training_flops(given) / 2e9)


def test_a_walk_trains_as_whole_packs_do(config: SFTConfig, runs: Path, tmp_path: Path) -> None:
    machine = MachineConfig(device="cpu", num_threads=1, recompute="walk", walk=WalkConfig(segment_tokens=250))
    train = config.train.model_copy(update={"machine": machine})
    with walks_counted() as counted:
        run_sft(config.model_copy(update={"train": train}), tmp_path)
    assert counted.num_segments > counted.num_walks > 0
    found, expected = (read_metrics(folder / "small" / "metrics.jsonl") for folder in (tmp_path, runs))
    for ours, theirs in zip(found, expected, strict=True):
        # Float32, in other sums.
        assert ours.values["loss"] == pytest.approx(theirs.values["loss"], rel=2e-3)


def test_a_hundred_steps_at_learning_rate_0_change_no_weight(config: SFTConfig, tmp_path: Path) -> None:
    train = config.train.model_copy(update={"checkpoint": CheckpointConfig(keep=0)})
    changes = {"lr": Curve(start=0.0), "num_epochs": 10, "pack_tokens": 512, "train": train}
    still = config.model_copy(update=changes)
    folder = run_sft(still, tmp_path)
    assert len(read_metrics(tmp_path / "small" / "metrics.jsonl")) >= 100
    before, after = (load_model(path).state_dict() for path in (Path(config.model), folder))
    assert sum(name.endswith("router.bias") for name in before) == 3
    assert [name for name, weight in before.items() if not torch.equal(weight, after[name])] == []


def test_adapters_are_trained_resumed_and_exported(config: SFTConfig, tmp_path: Path) -> None:
    lora = LoRAConfig(rank=4, targets=("v_proj", r"experts\.\d+\.w2"))
    train = config.train.model_copy(update={"lora": lora})
    config = config.model_copy(update={"train": train})
    whole = run_sft(config, tmp_path / "whole")
    assert is_adapter_folder(whole)
    parts = tmp_path / "parts"
    shutil.copytree(tmp_path / "whole", parts)
    shutil.rmtree(parts / "small" / "model")
    newest = max((parts / "small" / "checkpoints").iterdir())
    shutil.rmtree(newest)
    assert (newest.parent / sorted(path.name for path in newest.parent.iterdir())[-1] / "model").is_dir()
    again = run_sft(config, parts)
    before, after = (load_model(folder).state_dict() for folder in (whole, again))
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    base, export = load_model(Path(config.model)).state_dict(), tmp_path / "export"
    changed = {name.rpartition("blocks.")[2][2:] for name in base if not torch.equal(base[name], before[name])}
    assert {name.removeprefix("block.") for name in changed} >= {"attention.qkv.weight", "ffn.w2"}
    assert {"attention.out.weight", "ffn.w13", "ffn.router.weight"}.isdisjoint(changed)
    export_model(again, export)
    exported = load_model(export).state_dict()
    assert [name for name in exported if not torch.equal(exported[name], after[name])] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"machine": {"device": "cuda"}}, 'train.machine.device is "cuda", but torch sees no GPU'),
        ({"machine": {"device": "cuda"}}, "phase sft: a rank needs"),
        ({"lora": {"rank": 2, "targets": ["conv"]}}, "no layer ends with 'conv'"),
    ],
)
def test_what_does_not_fit_is_refused_before_data_is_encoded(
    config: SFTConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: message.startswith("phase"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**4, 10**4))
    monkeypatch.setattr(stage, "machine_ranks", lambda *_: contextlib.nullcontext(SINGLE_RANK))
    values = config.model_dump(mode="json", exclude_unset=True) | {"train": fields}
    write_resolved(build(SFTConfig, values), tmp_path / "config.toml")
    assert cli.main(["sft", str(tmp_path / "config.toml"), "--runs", str(tmp_path / "runs")]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_missing_model_and_a_changed_configuration_are_refused(config: SFTConfig, runs: Path) -> None:
    with pytest.raises(NotFoundError, match="model 'none' is not a folder"):
        run_sft(config.model_copy(update={"model": "none"}), runs)
    with pytest.raises(ConfigError, match="was started with"):
        run_sft(config.model_copy(update={"lr": config.lr.model_copy(update={"start": 1e-3})}), runs)


def test_a_models_own_template_is_trained_and_goes_with_it(
    config: SFTConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_tools = QWEN.replace("\\n<tools>", "\\nTools:\\n<tools>")
    tokenizer = tokenizer_of(QWEN, tool_use=with_tools)
    start = write_start(tmp_path / "start", tokenizer)
    changed = {"model": str(start), "name": "own", "num_epochs": 1, "chat_format": "template"}
    own = config.model_copy(update=changed)
    with pytest.raises(FormatError, match="only the answers after the last rewritten one have loss"):
        run_sft(own.model_copy(update={"prefix_rewrites": "refuse"}), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    model = run_sft(own, tmp_path / "runs")
    assert any("follows an answer" in record.getMessage() for record in caplog.records)
    report = json.loads((tmp_path / "runs/own/data/meta.json").read_text())["report"]
    assert report["num_trained_tokens"] > 100
    trained = load_tokenizer(model)
    assert trained.fingerprint == tokenizer.fingerprint
    assert trained.tool_use_template == with_tools != trained.chat_template
    format = TemplateFormat(trained)
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == list(format.stop_ids)
