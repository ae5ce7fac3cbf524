"""The chat format of an opened model: its own template where there is none of ours, or a reason why messages fail."""

import logging
from pathlib import Path

import pytest

from m2forge import cli
from m2forge.errors import FormatError
from m2forge.inference.model import find_format
from m2forge.text.message import Message
from tests.sft.start import write_start
from tests.text.own_template import LLAMA, QWEN, R1, tokenizer_of

ALPACA = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n"


def test_a_models_own_template_is_its_chat_format(tmp_path: Path) -> None:
    tokenizer_of(LLAMA).save(tmp_path)
    assert find_format(tmp_path, "auto", "refuse").name == "template"
    tokenizer_of(QWEN).save(tmp_path)
    assert find_format(tmp_path, "auto", "refuse").name == "chatml"
    with pytest.raises(FormatError, match="prefix_rewrites"):
        find_format(tmp_path, "template", "refuse")


def test_rewrites_are_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer_of(R1).save(tmp_path)
    with caplog.at_level(logging.WARNING):
        find_format(tmp_path, "auto", "allow")
    assert "the prefix cache serves a conversation only up to there" in caplog.records[0].getMessage()


def test_a_template_that_cannot_be_parsed_leaves_raw_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer_of(ALPACA).save(tmp_path)
    with caplog.at_level(logging.WARNING):
        format = find_format(tmp_path, "auto", "allow")
    assert "raw prompts are served" in caplog.records[0].getMessage()
    with pytest.raises(FormatError, match=r"no chat format: .*no special token"):
        format.render([Message("user", "a")])


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages[0].content + 1 }}"])
def test_a_template_that_is_none_exits_with_2(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_start(tmp_path / "model", tokenizer_of(template))
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    sft = tmp_path / "sft.toml"
    sft.write_text(
        f'name = "a"\nmodel = "{model}"\npack_tokens = 64\nlr = {{ start = 1e-3 }}\n'
        f'data = {{ context = 64, sources = [{{ path = "{data}" }}] }}\n'
    )
    rl, runs = Path(__file__).parents[2] / "configs/rl/demo.toml", tmp_path / "runs"
    before = sorted(tmp_path.rglob("*"))
    for argv in (
        ["sft", str(sft), "--runs", str(runs)],
        ["rl", str(rl), "--runs", str(runs), "--set", f"model={model}", "--set", "gateway.format=auto"],
        ["serve", str(model), "--port", "0", "--set", "device=cpu"],
        ["gateway", str(model), "--port", "0", "--engine-set", "device=cpu"],
        ["chat", str(model), "--set", "device=cpu"],
    ):
        assert cli.main(argv) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "template" in line]
        assert "the model's chat template cannot" in line
    assert sorted(tmp_path.rglob("*")) == before
