"""Sizes and costs, against the released model's figures and against networks with memory."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge import cli
from m2forge.model.architecture import to_public
from m2forge.model.build import skeleton
from m2forge.model.config import ModelConfig, WindowConfig
from m2forge.model.config_file import CONFIG_FILE
from m2forge.model.count import count, render
from m2forge.model.preset import PRESETS
from tests.model.draw import SMALL, model_configs


def test_m2_has_the_released_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["params", "m2"]) == 0
    out = capsys.readouterr().out
    rows = {line[:22].strip(): line[22:].split() for line in out.splitlines()}
    assert rows["with embedding, head"][0] == "228.69B"
    assert rows["in layers"][1] == "9.80B"
    assert rows["total"] == ["228.69B", "229.9B"]
    assert "1.23B = 229.92B, the report's 229.9B" in out


def test_json_holds_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["params", "m2", "--layers", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_layers"] == 4
    assert report["published"] is None
    # 4 layers · (8 KV heads · 128) · (keys and values) · 2 bytes
    assert report["cache_bytes_per_token"] == 4 * 1024 * 2 * 2


def component_of(name: str, num_dims: int) -> str:
    """The component that a tensor of a built network belongs to."""
    top = name.split(".")[0]
    if top in ("mtp", "embedding", "head"):
        return top
    if ".router." in name:
        return "router"
    if "norm.weight" in name:
        return "norms"
    if ".attention." in name:
        return "attention"
    assert ".ffn." in name, name
    return "experts" if num_dims == 3 else "dense ffn"


def built_totals(config: ModelConfig) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, tensor in skeleton(config).state_dict().items():
        totals[component_of(name, tensor.dim())] += tensor.numel()
    return dict(totals)


def counted_totals(config: ModelConfig) -> dict[str, int]:
    return {part.name: part.total for part in count(config).components if part.total}


@given(st.data())
def test_every_component_equals_that_of_the_built_network(data: st.DataObject) -> None:
    config = data.draw(model_configs(num_mtp=data.draw(st.integers(0, 2))))
    assert counted_totals(config) == built_totals(config)


@pytest.mark.parametrize("bias", [{"selection_bias": False}, {"bias_update": "gradient", "aux_loss_weight": 0.1}])
def test_selection_biases_are_counted_if_they_exist(bias: dict[str, object]) -> None:
    assert SMALL.moe is not None
    config = SMALL.model_copy(update={"moe": SMALL.moe.model_copy(update=bias)})
    assert counted_totals(config) == built_totals(config)


def test_presets_equal_the_built_networks() -> None:
    # All of m2's layers are alike, and building them all takes seconds.
    for config in (*(PRESETS[name] for name in PRESETS if name != "m2"), PRESETS["m2"].with_layers(2)):
        assert counted_totals(config) == built_totals(config)


def test_components_add_up_to_the_network() -> None:
    report = count(SMALL)
    held = sum(built_totals(SMALL).values())
    assert report.total_with_mtp == sum(part.total for part in report.components) == held
    assert report.total == held - built_totals(SMALL)["mtp"]
    by_name = {part.name: part for part in report.components}
    assert by_name["experts"].active * 4 == by_name["experts"].total  # 2 of 8
    assert by_name["mtp"].active == 0
    assert "with mtp" in render(report)


def test_params_takes_a_second_and_no_torch(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps(to_public(PRESETS["m2"])))
    for model in ("m2", str(folder)):
        program = (
            "import resource, sys; from m2forge import cli; status = cli.main(['params', sys.argv[1]]);"
            "used = resource.getrusage(resource.RUSAGE_SELF); seconds = used.ru_utime + used.ru_stime;"
            "sys.exit(f'{status} torch {seconds}' if status or 'torch' in sys.modules or seconds > 1 else 0)"
        )
        done = subprocess.run([sys.executable, "-c", program, model], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "228.69B" in done.stdout


def test_flops_follow_the_formula() -> None:
    config = SMALL.model_copy(update={"num_mtp": 0})
    report = count(config, contexts=(512,))
    (cost,) = report.costs
    attention = 4 * 4 * 128 * 512 // 2  # layers · 4 · q_width · half the context
    assert cost.forward_flops == 2 * (report.active_in_layers + 512 * 128) + attention
    assert cost.training_flops == 3 * cost.forward_flops
    (with_mtp,) = count(SMALL, contexts=(512,)).costs
    assert with_mtp.forward_flops == cost.forward_flops
    block = report.active_in_layers // 4 + 2 * 128 * 128
    extra = 2 * (block + 512 * 128) + attention // 4
    # Norms make the difference: a module has three more, the main model a final one.
    assert with_mtp.training_flops - cost.training_flops == pytest.approx(3 * extra, rel=0.01)


def test_a_tied_head_is_held_once_and_still_multiplied() -> None:
    untied, tied = (count(SMALL.model_copy(update={"tied_head": tied})) for tied in (False, True))
    assert untied.total - tied.total == 512 * 128
    assert untied.costs == tied.costs


def test_windowed_layers_stop_growing() -> None:
    window = WindowConfig(size=60, layers=(0, 1, 2), num_sinks=4)
    config = SMALL.model_copy(update={"attention": SMALL.attention.model_copy(update={"window": window})})
    report = count(config, contexts=(1024,))
    assert report.cache_bytes_per_token == 256
    assert report.costs[0].cache_bytes == 256 * (1024 + 3 * 64)
    assert report.costs[0].forward_flops < count(SMALL, contexts=(1024,)).costs[0].forward_flops


def test_every_preset_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PRESETS)
