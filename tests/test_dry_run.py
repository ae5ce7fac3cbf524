"""`--dry-run` validates, prints the resolved config and what would run, and starts and writes nothing."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge import cli
from m2forge.config import build, load, write_resolved
from m2forge.model.build import build as build_model
from m2forge.model.checkpoint import save_model
from m2forge.model.count import count, short
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.model_config import network_config
from m2forge.rl.config import RLConfig
from m2forge.train.config import MachineConfig
from m2forge.train.memory import policy_step, rank_memory, training_memory
from tests.model.draw import SMALL
from tests.pretrain.small import make_config, write_corpus

ROOT = Path(__file__).parent.parent
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from m2forge import cli; sys.exit(cli.main())"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry") / "model"
    save_model(build_model(SMALL), folder)
    return folder


@pytest.fixture
def unchanged(tmp_path: Path) -> Iterator[Path]:
    """A folder in which a test must create nothing."""
    folder = tmp_path / "empty"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


def dry_run(*words: str, cwd: Path = ROOT) -> str:
    command = [sys.executable, "-c", WITHOUT_TORCH, *words, "--dry-run"]
    done = subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    return done.stdout


def facts(out: str) -> str:
    return out.partition("# what would run\n")[2]


def test_rl_reports_sizes_tasks_steps_and_the_run(model: Path, unchanged: Path) -> None:
    overrides = [f"model={model}", "num_steps=5", "engine.rollout.num_blocks=16", "engine.dtype=float32"]
    overrides += ["cluster.gateways=2", "cluster.agent_hosts=1"]
    words = [word for override in overrides for word in ("--set", override)]
    config_file = ROOT / "configs/rl/demo.toml"
    out = dry_run("rl", str(config_file), *words, "--runs", str(unchanged / "runs"), cwd=unchanged)
    config = load(RLConfig, config_file, overrides)
    assert build(RLConfig, tomllib.loads(out)) == config
    assert "\nnum_steps = 5  # required\n" in out
    assert "\nnum_blocks = 16  # default: 2048\n" in out
    report = facts(out)
    sizes = training_memory(SMALL, config.train.optimizer, 4)
    assert f"weights {sizes.weights / 1e6:.2f}MB, gradients {sizes.gradients / 1e6:.2f}MB" in report
    # 2 · kv_width 64 · 4 layers · 4 bytes · (16 + 1) blocks · 16 tokens
    assert f"KV cache {2 * 64 * 4 * 4 * 17 * 16 / 1e3:.2f}KB (16 blocks × 16 tokens = 256 tokens)" in report
    per_step = config.curriculum.batch_groups * config.group_size
    assert f"5 × {config.curriculum.batch_groups} groups × {config.group_size} attempts = {5 * per_step:,}" in report
    assert all(name in report for name in config.curriculum.family_keys)
    assert "trainer, sampler, gateway-0, gateway-1, host-0" in " ".join(report.split())
    assert f"{unchanged}/runs/{config.name}: new" in report


def test_the_peak_of_a_rank_is_predicted_on_a_mesh_and_in_rl(model: Path, unchanged: Path) -> None:
    config_file = ROOT / "configs/rl/demo.toml"
    overrides = [f"model={model}", "train.machine.device=cuda", "train.machine.mesh.shard=2"]
    overrides += ["train.machine.mesh.context=2", "policy.bucket_tokens=512"]
    words = [word for override in overrides for word in ("--set", override)]
    report = facts(dry_run("rl", str(config_file), *words, "--runs", str(unchanged)))
    config = load(RLConfig, config_file, overrides)
    total = rank_memory(policy_step(config.train, SMALL, config.policy, 4)).total
    # A pack of 512 tokens, of which the two ranks of `context` have a half each.
    assert f"on CUDA a rank needs at least {short(total, 'KMGT')}B at once, of 256 tokens in a pack, in the " in report
    assert (
        total
        < rank_memory(
            policy_step(config.train.model_copy(update={"machine": MachineConfig()}), SMALL, config.policy)
        ).total
    )
    data = unchanged.parent / "train.jsonl"
    data.write_text("{}\n")
    overrides = [f"model={model}", f"data.sources.0.path={data}", "train.machine.device=cuda"]
    words = [word for override in overrides for word in ("--set", override)]
    mesh = ("--set", "train.machine.mesh.replicate=2")
    report = facts(dry_run("sft", "configs/sft/nano.toml", *words, *mesh, "--runs", str(unchanged)))
    assert "on CUDA a rank needs at most " in report
    auto = ("--set", "train.machine.mesh.replicate=auto")
    report = facts(dry_run("sft", "configs/sft/nano.toml", *words, *auto, "--runs", str(unchanged)))
    assert "on CUDA a rank needs" not in report
    assert "activations, logits and one micro-batch's gradients come on top" in report


def test_other_commands_describe_themselves(model: Path, unchanged: Path) -> None:
    suite = "suites=[{task = 'needle', lengths = [64, 128], num_samples = 3, depths = [0.0, 1.0]}]"
    base = unchanged.parent / "eval.toml"
    base.write_text(f'model = "{model}"\noutput = "{unchanged}/eval"\n')
    report = facts(dry_run("eval", str(base), "--set", suite, cwd=unchanged))
    assert "needle: 12 samples, forced decoding" in report
    assert f"{unchanged}/eval: new" in report
    assert "KV cache at most" in report
    report = facts(dry_run("serve", str(model), "--set", "dtype=bfloat16", "--set", "rollout.num_blocks=4"))
    assert "bfloat16: weights" in report
    assert "(4 blocks × 16 tokens = 64 tokens)" in report
    out = dry_run("gateway", str(model), "--journal", str(unchanged / "journal"))
    assert f'journal = "{unchanged}/journal"  # default: ""' in out
    assert "# config (--engine-set)" in out
    documents, corpus_file = unchanged.parent / "documents", unchanged.parent / "corpus.toml"
    documents.mkdir()
    for index in range(3):
        (documents / f"{index}.txt").write_text("x" * 400)
    corpus_file.write_text(f'[[sources]]\npath = "{documents}"\n')
    report = facts(dry_run("corpus", str(corpus_file), str(unchanged / "corpus")))
    assert f"0: {documents}: 3 files, 1.20KB in 1 part" in report
    assert f"{unchanged}/corpus: new" in report


def test_training_stages_describe_model_memory_and_steps(model: Path, unchanged: Path) -> None:
    corpus = write_corpus(unchanged.parent / "corpus")
    config = make_config(corpus)
    write_resolved(config, unchanged.parent / "pretrain.toml")
    anywhere = ("--set", "train.machine.device=auto", "--set", "train.machine.dtype=auto")
    report = facts(dry_run("pretrain", str(unchanged.parent / "pretrain.toml"), *anywhere, "--runs", str(unchanged)))
    network = network_config(config)
    network = network.model_copy(update={"num_mtp": max(phase.num_mtp or 0 for phase in config.phases)})
    assert network.num_mtp > network_config(config).num_mtp
    sizes = training_memory(network, config.train.optimizer, 2)
    assert f"bfloat16 (cuda): weights {sizes.weights / 1e3:.2f}KB" in report
    assert f"master weights {sizes.masters / 1e3:.2f}KB" in report
    assert "float32 (cpu): weights" in report
    assert "constant: 6 × 128 tokens = 768 tokens" in report
    data = unchanged.parent / "train.jsonl"
    data.write_text("{}\n")
    overrides = ("--set", f"model={model}", "--set", f"data.sources.0.path={data}")
    report = facts(dry_run("sft", "configs/sft/nano.toml", *overrides, "--runs", str(unchanged)))
    assert f"{data}: 1 file, 3 bytes" in report
    assert "1 epoch of the encoded trajectories" in report
    assert f"{count(SMALL).total_with_mtp / 1e6:.2f}M parameters, 1 MTP module included" in report


def test_what_would_be_refused_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["rl", "configs/rl/demo.toml", "--dry-run", "--set", f"model={tmp_path}/none"]) == 2
    captured = capsys.readouterr()
    assert "num_steps = " in captured.out
    assert f"model '{tmp_path}/none' is not a folder" in captured.err
    assert cli.main(["rl", "configs/rl/demo.toml", "--dry-run", "--set", "num_step=3"]) == 2
    assert capsys.readouterr().out == ""
    assert cli.main(["serve", str(model), "--dry-run", "--set", "rollout.speculation=3"]) == 2
    assert "3 drafts need as many MTP modules; this model has 1" in capsys.readouterr().err


def test_a_started_run_is_reported_and_its_config_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs/pretrain/demo.toml"
    config = load(PretrainConfig, path)
    run_dir = tmp_path / config.name
    checkpoint = run_dir / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "position.json").write_text('{"position": {"step_in_phase": 3, "step": 3}}')
    write_resolved(config, run_dir / "config.toml")
    words = ["pretrain", str(path), "--runs", str(tmp_path), "--dry-run", "--set", f"corpus={config.corpus}"]
    cli.main(words)
    num_steps = sum(phase.steps for phase in config.phases)
    assert f"{run_dir}: resumes after step 3 of {num_steps:,}" in capsys.readouterr().out
    assert cli.main([*words, "--set", "seed=99"]) == 2
    assert f"{run_dir} was started with seed = {config.seed}, now it is 99" in capsys.readouterr().err
    (run_dir / "model").mkdir()
    cli.main(words)
    assert f"{run_dir}: finished" in capsys.readouterr().out
    assert sorted(path.name for path in run_dir.iterdir()) == ["checkpoints", "config.toml", "model"]
