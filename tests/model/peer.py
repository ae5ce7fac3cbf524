"""Our weights inside transformers' models: the implementation nobody here wrote."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from m2forge.model.architecture import public_parts, to_public
from m2forge.model.transformer import Transformer


def transformers_twin(model: Transformer) -> Any:
    """A transformers model that shares no memory with ours and holds the same weights."""
    public = to_public(model.config)
    config = AutoConfig.for_model(public.pop("model_type"), **public, pad_token_id=None)
    # The eager experts take any width; the grouped ones refuse odd strides.
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")  # type: ignore[no-untyped-call]
    state = {name: part.of(model.state_dict()[part.name]).detach() for name, part in public_parts(model.config)}
    own = twin.state_dict()
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_public_tensor(name, state))
    return twin.train()


def _public_tensor(name: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers keeps a layer's experts stacked, and M2's mixture under `mlp`; the public files do neither."""
    if name == "lm_head.weight" and name not in state:
        return state["model.embed_tokens.weight"]
    native = any(".block_sparse_moe." in public for public in state)
    public = name.replace(".mlp.", ".block_sparse_moe.") if native else name
    if public in state:
        return state[public]
    prefix, _, kind = public.rpartition(".")
    gate, up, down = ("w1", "w3", "w2") if native else ("gate_proj", "up_proj", "down_proj")
    num_experts = sum(key.startswith(prefix + ".") and key.endswith(f".{down}.weight") for key in state)

    def stack(which: str) -> torch.Tensor:
        return torch.stack([state[f"{prefix}.{expert}.{which}.weight"] for expert in range(num_experts)])

    return torch.cat((stack(gate), stack(up)), dim=1) if kind == "gate_up_proj" else stack(down)


def twin_gradient(name: str, twin: Any, native: bool) -> torch.Tensor:
    """transformers' gradient of the public tensor `name`."""
    parameters = dict(twin.named_parameters())
    inner = name.replace(".block_sparse_moe.", ".mlp.") if native else name
    if inner in parameters:
        return grad_of(parameters[inner])
    prefix, expert, kind, _ = inner.rsplit(".", 3)
    if kind in ("w2", "down_proj"):
        return grad_of(parameters[f"{prefix}.down_proj"])[int(expert)]
    gate, up = grad_of(parameters[f"{prefix}.gate_up_proj"])[int(expert)].chunk(2)
    return gate if kind in ("w1", "gate_proj") else up


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
