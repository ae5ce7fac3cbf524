"""Low-rank adapters (LoRA): the weights of chosen layers are frozen, and the product of two small matrices is trained.

    W' = W + alpha / rank · B A        A: rank × columns, B: rows × rank

The network computes with W' itself, rounded to the weight's dtype: what is trained equals what a sampler serves, which
merges the same adapter. A and B belong to one public layer (q_proj, or w1 of one expert), although our networks stack
several layers in one weight. Embedding, head, norms and routers stay frozen.

On disk an adapter is a folder under PEFT's names, beside config.json and the tokenizer:

    adapter_config.json          rank, alpha, which layers, and the folder or GGUF file of the base model
    adapter_model.safetensors    base_model.model.LAYER.lora_A.weight, base_model.model.LAYER.lora_B.weight

`AdapterSource` reads such a folder as if it were the merged model; `fill_adapters` reads the adapters from which
training resumes.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from m2forge.errors import CheckpointError, ConfigError
from m2forge.files import write_atomic
from m2forge.model.architecture import Part, adapted_layers
from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.model.config_file import CONFIG_FILE, is_sharded_folder, read_json
from m2forge.model.folder import read_identity
from m2forge.model.manifest import NO_IMAGES, read_manifest, received_tensors, refuse_changed
from m2forge.model.rows import Rows, fill_rows, whole
from m2forge.model.safetensors_file import Written
from m2forge.model.tensor_source import Source, TensorHeader, TokenIds
from m2forge.model.transformer import Linear, MixtureFFN, Transformer

ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
BASE_KEY = "base_model_name_or_path"


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W', computed in at least float32 and rounded once to the weight's dtype."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(exact) + scale * (b.to(exact) @ a.to(exact))).to(weight.dtype)


class LowRank(nn.Module):
    """A and B of one range of rows of a weight; of all experts, where it stacks experts."""

    def __init__(self, start: int, stop: int, shape: torch.Size, rank: int, like: Tensor) -> None:
        super().__init__()
        self.start, self.stop = start, stop
        *experts, _, columns = shape
        self.a = nn.Parameter(like.new_empty(*experts, rank, columns))
        self.b = nn.Parameter(like.new_zeros(*experts, stop - start, rank))


class Adapter(nn.Module):
    """The adapters of the layers that one weight stacks: the weight in, W' out."""

    def __init__(self, parts: Mapping[tuple[int, int], str], weight: Tensor, config: LoRAConfig) -> None:
        """`parts`: ranges of rows, in order, and the name of each."""
        super().__init__()
        self.scale = config.scale
        self.parts = nn.ModuleDict(
            {
                name: LowRank(start, stop, weight.shape, config.rank, weight.detach())
                for (start, stop), name in parts.items()
            }
        )

    def forward(self, weight: Tensor) -> Tensor:
        pieces, done = [], 0
        for part in self.parts.values():
            assert isinstance(part, LowRank)
            if part.start > done:
                pieces.append(weight[..., done : part.start, :])
            pieces.append(merge(weight[..., part.start : part.stop, :], part.a, part.b, self.scale))
            done = part.stop
        if done < weight.shape[-2]:
            pieces.append(weight[..., done:, :])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)


# -- which layers ------------------------------------------------------------------------------------------------------


def attach(model: Transformer, config: LoRAConfig, base: Path) -> None:
    """Give `model`, whose weights are those of `base`, adapters that change nothing yet; only these are trained."""
    add_adapters(model, config, base)
    draw_adapters(whole(model.state_dict()), config.seed)


def add_adapters(model: Transformer, config: LoRAConfig, base: Path) -> None:
    """The same, without values of A and B."""
    # Of a weight: its ranges of rows, the short name of the layer that each is, and how many experts have it.
    ranges: dict[str, Counter[tuple[int, int | None, str]]] = {}
    for layer, part in adapted_layers(model.config, config).items():
        ranges.setdefault(part.name, Counter())[part.start, part.stop, _short(layer)] += 1
    for name, numbers in ranges.items():
        weight = model.get_parameter(name)
        num_experts = weight.shape[0] if weight.dim() == 3 else 1
        if (number := min(numbers.values())) != num_experts:
            raise ConfigError(f"lora.targets: they name {number} of the {num_experts} experts of {name}; name all")
    model.requires_grad_(False)
    for name, numbers in ranges.items():
        weight = model.get_parameter(name)
        parts = {
            (start, stop or weight.shape[-2]): short for start, stop, short in sorted(numbers, key=lambda one: one[0])
        }
        _install(model, name, Adapter(parts, weight, config))
    model.lora, model.base = config, base


@torch.no_grad()
def draw_adapters(held: Mapping[str, Rows], seed: int) -> None:
    """Give the adapters among `held` their first values. As PEFT draws A: uniform with variance 1 / (3 · columns)."""
    generator = torch.Generator().manual_seed(seed)
    for name, (tensor, start, shape) in held.items():
        if is_adapter(name) and name.endswith(".a"):
            bound = 1 / math.sqrt(shape[-1])
            full = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            tensor.copy_(full[start : start + tensor.shape[0]])
        elif is_adapter(name):
            tensor.zero_()


def _short(layer: str) -> str:
    return layer.rpartition(".")[2]


def _install(model: Transformer, name: str, adapter: Adapter) -> None:
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(owner, Linear):
        owner.adapter = adapter
    else:
        assert isinstance(owner, MixtureFFN)
        setattr(owner, f"{last}_adapter", adapter)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name in our state."""
    return "adapter.parts." in name


# -- on disk -----------------------------------------------------------------------------------------------------------


def adapter_parts(config: ModelConfig, lora: LoRAConfig) -> Iterator[tuple[str, Part]]:
    """(PEFT's name, location in our state) of A and B of each layer."""
    for layer, part in adapted_layers(config, lora).items():
        path, _, last = part.name.rpartition(".")
        owner = f"{path}.adapter" if last == "weight" else f"{path}.{last}_adapter"
        for kind, public in (("a", "lora_A"), ("b", "lora_B")):
            yield f"{PREFIX}{layer}.{public}.weight", Part(f"{owner}.parts.{_short(layer)}.{kind}", part.expert)


def adapter_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """A and B of each layer, under PEFT's names; views of the parameters."""
    assert model.lora is not None
    state = model.state_dict()
    for name, part in adapter_parts(model.config, model.lora):
        yield name, part.of(state[part.name])


def write_adapter(model: Transformer, folder: Path, dtype: torch.dtype | None = None) -> Written:
    """Write the adapter into an existing folder."""
    tensors = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()
        for name, tensor in adapter_tensors(model)
    }
    write_tensors(tensors, folder)
    write_atomic(folder / ADAPTER_CONFIG_FILE, adapter_json(model))
    return Written(len(tensors), sum(tensor.nbytes for tensor in tensors.values()), 1)


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_FILE, {"format": "pt"})
    (folder / ADAPTER_FILE).chmod(folder.stat().st_mode & 0o666)


def adapter_json(model: Transformer) -> str:
    """The adapter_config.json of a network with adapters."""
    lora, base = model.lora, model.base
    assert lora is not None
    assert base is not None
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE_KEY: str(base.resolve()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": rf"(?:.*\.)?(?:{'|'.join(lora.targets)})",
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "m2forge": lora.model_dump_json(),
    }
    return json.dumps(content, indent=2) + "\n"


def base_of(folder: Path) -> Path:
    """The base model of the adapter in `folder`."""
    named = read_json(folder / ADAPTER_CONFIG_FILE).get(BASE_KEY)
    if not isinstance(named, str) or not Path(named).exists():
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG_FILE}: its base model {named!r} is not here; set {BASE_KEY} to the folder of it"
        )
    return Path(named)


def is_adapter_folder(path: Path) -> bool:
    return (path / ADAPTER_CONFIG_FILE).is_file()


class AdapterSource:
    """See `Source`: the base model with the adapter merged. Reads PEFT's adapters too, if they are plain LoRA."""

    config: ModelConfig
    token_ids: TokenIds

    def __init__(self, folder: Path, base: Source, images: Mapping[str, Tensor] = NO_IMAGES) -> None:
        """`images`: files of the folder that came by broadcast, by name."""
        path = folder / ADAPTER_CONFIG_FILE
        content = read_json(path)
        self.origin, self._base = str(folder), base
        self._scale = _read_scale(path, content)
        self.config, self.token_ids = base.config, base.token_ids
        if (folder / CONFIG_FILE).exists():
            self.config, self.token_ids = read_identity(folder)
        self.headers: Mapping[str, TensorHeader] = base.headers
        self.tensors = self._load(folder, images)
        """A and B under PEFT's names."""
        self._pairs, problems = _find_pairs(self.tensors, base.headers)
        self.problems = (*base.problems, *problems)

    def _load(self, folder: Path, images: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not is_sharded_folder(folder):
            return _load_adapter(folder, images)
        from m2forge.model.sharded_folder import ShardedFolder

        stored = ShardedFolder(folder)
        state = {name: stored.rows(name, 0, header.shape[0]) for name, header in stored.headers.items()}
        return {name: part.of(state[part.name]) for name, part in adapter_parts(self.config, read_lora(folder))}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        weight = self._base.read(name, dtype)
        if (pair := self._pairs.get(name)) is None:
            return weight
        # Rounded as the trained network's weights are, before the adapter is added.
        return merge(weight.to(dtype), *pair, self._scale)


def _read_scale(path: Path, content: Mapping[str, object]) -> float:
    others = ("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")
    refused = [f"{key} = {content[key]!r}" for key in others if content.get(key)]
    if content.get("peft_type") != "LORA" or content.get("bias", "none") != "none":
        refused.append(f"peft_type {content.get('peft_type')!r}, bias {content.get('bias')!r}")
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank <= 0:
        refused.append(f"r = {rank!r}, lora_alpha = {alpha!r}")
    if refused:
        raise CheckpointError(f"{path}: {refused[0]} is not supported; merge this adapter with PEFT first")
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    return alpha / rank


def _load_adapter(folder: Path, images: Mapping[str, Tensor] = NO_IMAGES) -> Mapping[str, Tensor]:
    path = folder / ADAPTER_FILE
    if (entry := read_manifest(folder).get(ADAPTER_FILE)) is not None:
        if (received := received_tensors(path, entry["digest"], images)) is not None:
            return received
        refuse_changed(path, entry["digest"])
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch it again") from error


def _find_pairs(
    tensors: Mapping[str, Tensor], headers: Mapping[str, TensorHeader]
) -> tuple[dict[str, tuple[Tensor, Tensor]], list[str]]:
    """A and B by the public name of their weight, and one line per tensor that fits no weight."""
    pairs, problems = {}, []
    for name, a in tensors.items():
        found = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight", name)
        if found is None:
            problems.append(f"{name} is no tensor of a plain LoRA adapter")
            continue
        layer, kind = found[1], found[2]
        other = tensors.get(f"{PREFIX}{layer}.lora_{'B' if kind == 'A' else 'A'}.weight")
        header = headers.get(f"{layer}.weight")
        if other is None or header is None:
            problems.append(f"{name} has no {'weight in the base model' if header is None else 'counterpart'}")
        elif kind == "A":
            if (
                a.dim() != 2
                or other.dim() != 2
                or header.shape != (other.shape[0], a.shape[1])
                or a.shape[0] != other.shape[1]
            ):
                shapes = f"{list(other.shape)} and {list(a.shape)}"
                problems.append(f"{layer}: matrices of shape {shapes} for a weight of shape {list(header.shape)}")
            else:
                pairs[f"{layer}.weight"] = (a, other)
    return pairs, problems


def read_lora(folder: Path) -> LoRAConfig:
    """How the adapter in `folder` was made; raises if another program made it."""
    ours = read_json(folder / ADAPTER_CONFIG_FILE).get("m2forge")
    if not isinstance(ours, str):
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG_FILE}: written by another program; training cannot resume from it"
        )
    return LoRAConfig.model_validate_json(ours)


def fill_adapters(held: Mapping[str, Rows], folder: Path, config: ModelConfig) -> None:
    """Fill the adapters among `held` with those in `folder`."""
    if is_sharded_folder(folder):
        from m2forge.model.sharded_folder import ShardedFolder

        ShardedFolder(folder).read({name: rows for name, rows in held.items() if is_adapter(name)})
    else:
        stored = _load_adapter(folder)
        fill_rows(held, adapter_parts(config, read_lora(folder)), lambda name, _: stored[name])
