"""Adapters: what is computed and trained equals the merged weights; PEFT reads ours, and we read PEFT's."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from m2forge.errors import CheckpointError, ConfigError
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model, open_source, save_model
from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.model.convert import export_model
from m2forge.model.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    PREFIX,
    Adapter,
    LowRank,
    adapter_tensors,
    attach,
    is_adapter,
)
from m2forge.model.start import resume_from
from m2forge.model.tensor_source import refuse_misfits
from m2forge.model.transformer import Transformer
from tests.model.draw import SMALL, model_configs
from tests.model.peer import transformers_twin

EVERYTHING = r"[qkvo]_proj|(gate|up|down)_proj|w[123]"
BASE = Path("base")


def draw_adapters(model: Transformer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def weight_name(adapter: str) -> str:
    is_linear = adapter.endswith(".adapter")
    return f"{adapter.removesuffix('.adapter')}.weight" if is_linear else adapter.removesuffix("_adapter")


def loss_of(model: Transformer, tokens: Tensor) -> Tensor:
    logits = model.logits(model(tokens[:, :-1], with_mtp=False).hidden_ND)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")


def saved(network: ModelConfig, lora: LoRAConfig, folder: Path, dtype: torch.dtype = torch.float64) -> Transformer:
    """A network with drawn adapters; its base and itself are saved."""
    model = build(network, dtype=dtype)
    save_model(model, folder / "base")
    attach(model, lora, folder / "base")
    draw_adapters(model)
    save_model(model, folder / "adapter")
    return model


@given(st.data())
def test_new_adapters_change_nothing_and_learn_alone(data: st.DataObject) -> None:
    network = data.draw(model_configs(num_mtp=data.draw(st.integers(0, 1))))
    model = build(network)
    tokens = torch.randint(0, network.vocab_size, (2, 7), generator=torch.Generator().manual_seed(0))
    before = model(tokens).hidden_ND
    attach(model, LoRAConfig(rank=3, targets=(EVERYTHING,), seed=1), BASE)
    assert torch.equal(model(tokens).hidden_ND, before)
    model.freeze_main(False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in model.state_dict() if is_adapter(name)}
    assert trained


@given(st.data())
def test_outputs_and_gradients_are_those_of_merged_weights(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    network = data.draw(model_configs(num_mtp=data.draw(st.integers(0, 1))))
    lora = LoRAConfig(rank=data.draw(st.integers(1, 5)), alpha=data.draw(st.floats(0.5, 8)), targets=(EVERYTHING,))
    model = saved(network, lora, tmp_path_factory.mktemp("lora"))
    assert model.base is not None
    twin = load_model(model.base.parent / "adapter", dtype=torch.float64)
    tokens = torch.randint(0, network.vocab_size, (2, 6), generator=torch.Generator().manual_seed(1))
    for one in (model, twin):
        loss_of(one, tokens).backward()
    assert torch.equal(model(tokens).hidden_ND, twin(tokens).hidden_ND)
    dense = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in twin.named_parameters()}
    for name, module in model.named_modules():
        if not isinstance(module, Adapter):
            continue
        for part in module.parts.values():
            assert isinstance(part, LowRank)
            grad = lora.scale * dense[weight_name(name)][..., part.start : part.stop, :]
            for parameter, wanted in ((part.a, part.b.mT @ grad), (part.b, grad @ part.a.mT)):
                found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-12)


def test_a_sampler_merges_the_very_bits_that_were_trained(tmp_path: Path) -> None:
    """In bfloat16, over a base that is stored in float32."""
    model = build(SMALL)
    save_model(model, tmp_path / "base")
    model = load_model(tmp_path / "base", dtype=torch.bfloat16)
    attach(model, LoRAConfig(targets=(EVERYTHING,)), tmp_path / "base")
    draw_adapters(model)
    save_model(model, tmp_path / "adapter")
    served = load_model(tmp_path / "adapter", dtype=torch.bfloat16)
    assert served.lora is None
    adapters = {name: one for name, one in model.named_modules() if isinstance(one, Adapter)}
    assert len(adapters) == 4 * (SMALL.num_layers + SMALL.num_mtp)
    for name, adapter in adapters.items():
        weight, merged = (one.get_parameter(weight_name(name)) for one in (model, served))
        assert torch.equal(adapter(weight), merged)
        assert not torch.equal(weight, merged)


def test_training_goes_on_from_a_saved_adapter(tmp_path: Path) -> None:
    model = saved(SMALL, LoRAConfig(rank=4, targets=("v_proj", r"experts\.\d+\.w2")), tmp_path)
    again = resume_from(tmp_path / "adapter").build("cpu", torch.float64)
    assert again.lora == model.lora
    assert [name for name, one in model.state_dict().items() if not torch.equal(one, again.state_dict()[name])] == []
    assert [parameter.requires_grad for parameter in again.parameters()] == [
        parameter.requires_grad for parameter in model.parameters()
    ]
    size = sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())
    assert size < (tmp_path / "base/model.safetensors").stat().st_size / 5


def test_an_adapter_of_an_adapter_is_merged_twice_and_exported(tmp_path: Path) -> None:
    network = SMALL.model_copy(update={"num_mtp": 0})
    saved(network, LoRAConfig(rank=2), tmp_path, torch.float32)
    second = load_model(tmp_path / "adapter")
    attach(second, LoRAConfig(rank=2, targets=("q_proj",)), tmp_path / "adapter")
    draw_adapters(second, seed=2)
    save_model(second, tmp_path / "second")
    export_model(tmp_path / "second", tmp_path / "exported")
    merged, plain = load_model(tmp_path / "second").state_dict(), load_model(tmp_path / "exported").state_dict()
    assert [name for name in plain if not torch.equal(merged[name], plain[name])] == []
    content = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG_FILE).read_text())
    (tmp_path / "adapter" / ADAPTER_CONFIG_FILE).write_text(
        json.dumps(content | {"base_model_name_or_path": str(tmp_path / "second")})
    )
    with pytest.raises(CheckpointError, match="builds on this one"):
        open_source(tmp_path / "second")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.filterwarnings("ignore")
def test_peft_loads_ours_and_we_load_pefts(family: str, tmp_path: Path) -> None:
    update = {"family": family, "moe": None, "intermediate_size": 48, "num_mtp": 0, "num_layers": 2}
    attention = SMALL.attention.model_copy(
        update={"qk_norm": "none", "rotary_dim": SMALL.attention.head_dim, "qkv_bias": family == "qwen2"}
    )
    network = SMALL.model_copy(update=update | {"attention": attention})
    lora = LoRAConfig(rank=4, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
    model = saved(network, lora, tmp_path, torch.float32)
    tokens = torch.randint(0, network.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    base = load_model(tmp_path / "base")

    peer = PeftModel.from_pretrained(transformers_twin(base), tmp_path / "adapter", is_trainable=True)
    wanted = model.logits(model(tokens).hidden_ND).view(2, 9, -1)
    torch.testing.assert_close(peer(tokens).logits, wanted, rtol=1e-4, atol=1e-5)
    loss_of(model, tokens).backward()
    logits = peer(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    theirs = {name.replace(".default.weight", ".weight"): parameter.grad for name, parameter in peer.named_parameters()}
    assert {name for name, _ in adapter_tensors(model)} == {name for name, grad in theirs.items() if grad is not None}
    q = model.get_submodule("blocks.0.attention.qkv.adapter.parts.q_proj")
    assert isinstance(q, LowRank)
    public = f"{PREFIX}model.layers.0.self_attn.q_proj"
    torch.testing.assert_close(q.a.grad, theirs[f"{public}.lora_A.weight"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(q.b.grad, theirs[f"{public}.lora_B.weight"], rtol=1e-3, atol=1e-4)

    config = LoraConfig(r=3, lora_alpha=5, target_modules=["k_proj", "gate_proj"], init_lora_weights=False)
    other = get_peft_model(transformers_twin(base), config)
    other.save_pretrained(str(tmp_path / "theirs"))
    content = json.loads((tmp_path / "theirs" / ADAPTER_CONFIG_FILE).read_text())
    (tmp_path / "theirs" / ADAPTER_CONFIG_FILE).write_text(
        json.dumps(content | {"base_model_name_or_path": str(tmp_path / "base")})
    )
    found = load_model(tmp_path / "theirs")
    torch.testing.assert_close(
        found.logits(found(tokens).hidden_ND).view(2, 9, -1), other(tokens).logits, rtol=1e-4, atol=1e-5
    )
    with pytest.raises(CheckpointError, match="another program"):
        resume_from(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_prj",), "no layer ends with 'q_prj'; one that could is model.layers.0.self_attn.q_proj"),
        (("embed_tokens",), "model.embed_tokens cannot have an adapter"),
        (("gate",), "gate cannot have an adapter"),
        ((r"experts\.[0-3]\.w1",), "they name 4 of the 8 experts of blocks.0.ffn.w13; name all"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets: tuple[str, ...], message: str) -> None:
    model = build(SMALL)
    with pytest.raises(ConfigError, match=message):
        attach(model, LoRAConfig(targets=targets), BASE)
    assert model.lora is None
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"r": 0}, "r = 0"),
        ({"base_model_name_or_path": "gone"}, "its base model 'gone' is not here"),
    ],
)
def test_adapters_of_other_kinds_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    saved(SMALL, LoRAConfig(rank=2), tmp_path, torch.float32)
    path = tmp_path / "adapter" / ADAPTER_CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "adapter")


def test_tensors_that_fit_no_weight_are_named(tmp_path: Path) -> None:
    saved(SMALL, LoRAConfig(rank=2), tmp_path, torch.float32)
    path = tmp_path / "adapter" / ADAPTER_FILE
    tensors = load_file(path)
    layer = f"{PREFIX}model.layers.0.self_attn."
    del tensors[f"{layer}q_proj.lora_B.weight"]
    tensors[f"{layer}k_proj.lora_A.weight"] = torch.zeros(2, 3)
    tensors["odd"] = torch.zeros(1)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        refuse_misfits(open_source(tmp_path / "adapter"))
    for text in ("q_proj.lora_A.weight has no counterpart", "k_proj: matrices of shape", "odd is no tensor"):
        assert text in str(caught.value)
    path.write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_source(tmp_path / "adapter")
