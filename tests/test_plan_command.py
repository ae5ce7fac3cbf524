"""`m2forge plan` over presets, stages' files and bad input."""

import json
from pathlib import Path

import pytest
import torch

from m2forge import cli
from m2forge.config import dump
from m2forge.model.preset import preset
from m2forge.plan import measure
from m2forge.plan.gpu import find_gpu
from m2forge.plan.parallel_layout import Plan, make_plans
from m2forge.plan.work import step_work
from m2forge.plan_command import Sampling, make_ring, network_workload, read_workload
from m2forge.train.memory import TrainingStep

ROOT = Path(__file__).parent.parent
RL = """
name = "run"
model = "m2-mini"
num_steps = 30
policy.pack_tokens = 32768
pool.window = { queue = 80, window = 80 }

[curriculum]
batch_groups = 10

[[curriculum.stages]]
name = "copies"

[curriculum.stages.domains.agent]
ratio = 1.0
context = 4096
families = [{ source = "copies" }]

[agent]
command = ["python", "agent.py"]
jobs_per_worker = 640
"""
RATES = ["--sampler-rate", "100000", "--attempt-rate", "400", "--attempt-tokens", "4000"]


@pytest.fixture
def rl(tmp_path: Path) -> Path:
    path = tmp_path / "rl.toml"
    path.write_text(RL)
    return path


def test_a_preset_is_planned_at_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "m2-mini", "--gpus", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"] == "m2-mini at its native context"
    assert found["plans"][0]["fits"]
    assert (found["errors"]["step_time"], found["errors"]["memory"]) == (0.103, 0.05)
    components = found["plans"][0]["memory"]["components"]
    assert {"weights", "moments", "activations"} <= components.keys()


def test_a_stage_is_planned_by_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(ROOT / "configs/pretrain/mini.toml"), "--gpus", "1"]) == 0
    assert "one GPU, recompute none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "unmeasured"),
    [
        (["--gpus", "1"], ""),
        (["--gpus", "2"], "; never measured: more than one GPU"),
        (["--gpus", "2", "--gpu", "H100"], "; never measured: H100, more than one GPU"),
    ],
)
def test_a_plan_prints_its_measured_errors(
    words: list[str], unmeasured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "m2-mini", *words]) == 0
    errors = "step time within 10.3% on 13 steps, predicted from 4 others, and peak memory within 5.0%"
    assert f"\nerrors on one H200: {errors}{unmeasured}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "m2-mini", "--gpus", "0"], "expected a finite number above 0"),
        (["plan", "m2-mini", "--price", "nan"], "--price nan: expected a finite number above 0"),
        (["plan", "m2-mini", "--gpu", "H20"], "unknown GPU 'H20'"),
        (["plan", "m2-mimi"], "m2-mini"),
        (["plan", "m2-mini", "--measure"], "torch sees none here"),
    ],
)
def test_bad_input_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_an_rl_run_splits_its_gpus(rl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(rl), "--gpus", "8", *RATES, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["splits"][0]
    assert best["training_gpus"] + best["num_samplers"] == 8
    assert found["plans"][0]["layout"] == best["layout"]
    assert best["tokens_per_s"] == max(split["tokens_per_s"] for split in found["splits"])
    # All eight GPUs are paid, those that sample too.
    assert best["dollars_per_million"] == pytest.approx(8 * 3 / 3600 / best["tokens_per_s"] * 1e6)
    assert cli.main(["plan", str(rl), "--gpus", "8", *RATES]) == 0
    told = capsys.readouterr().out
    assert "8 × H200 split between trainer and samplers" in told
    assert f"best: {best['training_gpus']} GPUs train" in told
    assert best["simulation"]["verdict"] in told


def test_attempts_that_do_more_than_sample_need_more_slots(rl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = []
    for own in ([], ["--attempt-seconds", "100"]):
        assert cli.main(["plan", str(rl), "--gpus", "8", *RATES, *own, "--json"]) == 0
        rates.append(json.loads(capsys.readouterr().out)["splits"][0]["tokens_per_s"])
    # 640 attempts of 10 s at 400 tokens/s, and 100 s more.
    assert rates[1] <= 640 * 4000 / 110 * 1.05 < rates[0]


def test_agent_hosts_and_a_token_limit_count(rl: Path) -> None:
    rl.write_text(f"{RL}\n[cluster]\nagent_hosts = 3\n")
    whole = read_workload(str(rl))[1]
    rl.write_text(f"batch_tokens = 100000\n{RL}")
    limited = read_workload(str(rl))[1]
    assert whole is not None
    assert limited is not None
    sampling, plan = Sampling(1e5, 400.0, 4000.0, 1, 0.5), mini_plan()
    ring, short = make_ring(whole, sampling, plan, 2), make_ring(limited, sampling, plan, 2)
    assert (ring.num_jobs, ring.sampler_rate, ring.batch_units) == (3 * 640, 2e5, 10)
    # A group has 8 x 4,000 tokens: three fit.
    assert (short.num_jobs, short.batch_units) == (640, 3)
    assert short.step_s == pytest.approx(0.3 * ring.step_s)


def mini_plan() -> Plan:
    workload = network_workload("m2-mini", preset("m2-mini"))
    return make_plans(workload, find_gpu("H200"), 1, 3.0, 5e10)[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (RATES[:2], "--sampler-rate: simulating the run needs --attempt-rate and --attempt-tokens too"),
        (RATES[2:], "--attempt-rate: simulating the run needs --sampler-rate too"),
        (["--spread", "0.1"], "--spread: simulating the run needs --sampler-rate and --attempt-rate and"),
        ([*RATES, "--attempt-tokens", "0"], "--attempt-tokens 0.0: expected a finite number above 0"),
        ([*RATES, "--spread", "-1"], "--spread -1.0: expected a finite number of at least 0"),
        ([*RATES, "--attempt-seconds", "-1"], "--attempt-seconds -1.0: expected a finite number of at least 0"),
        ([*RATES, "--sampler-gpus", "0"], "--sampler-gpus 0: expected"),
        ([*RATES, "--gpus", "1"], "--gpus 1: the trainer needs a GPU and a sampler 1; give 2 or more"),
    ],
)
def test_sampling_without_effect_is_refused(
    words: list[str], said: str, rl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(rl), *words]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert not found.out


@pytest.mark.parametrize("option", [*RATES[::2], "--spread", "--sampler-gpus", "--attempt-seconds"])
def test_only_an_rl_run_has_samplers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "m2-mini", option, "1"]) == 2
    assert f"{option}: only the TOML of rl has samplers, and m2-mini is none" in capsys.readouterr().err


def test_a_trainer_that_does_not_fit_is_refused(rl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Packs of paths that are too short to walk: only ranks that share them make their activations smaller.
    rl.write_text(RL.replace("32768", "4194304"))
    assert cli.main(["plan", str(rl), "--gpus", "2", *RATES]) == 2
    found = capsys.readouterr()
    assert "no layout of the trainer fits on the others: one GPU, recompute block needs" in found.err
    assert "fits on 4: give --gpus 5" in found.err
    assert not found.out
    assert cli.main(["plan", str(rl), "--gpus", "5", *RATES]) == 0
    assert "best: 4 GPUs train" in capsys.readouterr().out


def test_a_sampler_that_is_too_small_is_refused(rl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rl.write_text(RL.replace("m2-mini", "m2"))
    assert cli.main(["plan", str(rl), "--gpus", "64", *RATES]) == 2
    assert "whose weights take 457 GB, and H200 has 141 GB; give 4 or more" in capsys.readouterr().err


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[TrainingStep]:
    """The steps that a stand-in for the GPU's timer is given; it takes twice as long as the H200's rates say."""
    steps: list[TrainingStep] = []

    def measure_step(step: TrainingStep, device: torch.device) -> measure.Measured:
        steps.append(step)
        return measure.Measured(2 * step_work(step).seconds(find_gpu("H200").rates), 0, 0, 0)

    monkeypatch.setattr(measure, "measure_step", measure_step)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140 * 10**9, 141 * 10**9))
    return steps


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Six layers of M2, which no single GPU trains."""
    path = tmp_path / "wide.toml"
    path.write_text(dump(preset("m2").with_layers(6).model_copy(update={"max_context": 65_536})))
    return path


def test_measure_times_the_share_of_the_best_layout(
    wide: Path, timed: list[TrainingStep], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(wide), "--gpus", "8", "--json"]
    assert cli.main(words) == 0
    before = json.loads(capsys.readouterr().out)
    layout = before["plans"][0]["layout"]
    assert layout["expert"] > 1
    assert cli.main([*words, "--measure"]) == 0
    after = json.loads(capsys.readouterr().out)
    share, moe = timed[0], timed[0].network.moe
    assert moe is not None
    assert moe.num_experts == 256 // layout["expert"]
    assert share.batch.num_tokens == 65_536 // layout["context"]
    assert (share.recompute, share.walk) == (layout["recompute"], None)
    assert len(after["timed"]) == len(timed) >= 4
    # The plan uses what was timed.
    assert "on NVIDIA H200" in after["rates"]["origin"]
    same = next(plan for plan in after["plans"] if plan["layout"] == layout)
    assert same["compute_s"] == pytest.approx(2 * before["plans"][0]["compute_s"], rel=0.05)


def test_measure_says_what_it_times_before_it_does(
    wide: Path, timed: list[TrainingStep], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    measure_step = measure.measure_step

    def watched(step: TrainingStep, device: torch.device) -> measure.Measured:
        seen.append(" ".join(capsys.readouterr().err.split()))
        return measure_step(step, device)

    monkeypatch.setattr(measure, "measure_step", watched)
    assert cli.main(["plan", str(wide), "--gpus", "8", "--measure"]) == 0
    said = ("finding the best layout for 8 × H200", "timing a rank's share of", "step 1 of 5 on NVIDIA H200: ")
    places = [seen[0].index(words) for words in said]
    assert places == sorted(places)
    assert f"{timed[0].network.num_layers} of 6 layers with" in seen[0]
    assert "step 2 of 5" in seen[1]


def test_measure_times_the_adapters_of_an_rl_run(
    rl: Path, timed: list[TrainingStep], capsys: pytest.CaptureFixture[str]
) -> None:
    rl.write_text(f"{RL}\n[train.lora]\nrank = 4\n")
    assert cli.main(["plan", str(rl), "--gpus", "4", "--measure", *RATES]) == 0
    told = capsys.readouterr().out
    assert all(step.lora is not None and step.lora.rank == 4 for step in timed)
    assert "12 of 12 layers" in told
    assert "adapters of rank 4" in told


def test_measure_without_a_layout_that_fits_is_refused(
    wide: Path, timed: list[TrainingStep], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(wide), "--gpus", "2", "--measure"]) == 2
    found = capsys.readouterr()
    assert "--measure: no layout fits on 2 × H200, so no rank's share can be timed" in found.err
    assert "fits on 4: give --gpus 4" in found.err
    assert not timed
    assert not found.out


@pytest.mark.parametrize(("written", "said"), [(b"x = [", "not valid TOML"), (b'x = "\xff"', "not UTF-8 text")])
def test_a_broken_file_is_one_error(
    written: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_bytes(written)
    assert cli.main(["plan", str(tmp_path / "run.toml")]) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"m2forge: error: {tmp_path / 'run.toml'}: {said}")
    assert found.count("\n") == 1
