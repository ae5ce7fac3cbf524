"""Several processes: collectives over the ranks, and FSDP2 shards.

    rank r holds some of a step's packs → its sums and gradients → summed over all ranks → the same update everywhere

Every loss is divided by counts of the whole step, so ranks reduce by sum, never by mean. With one process `SINGLE_RANK`
communicates nothing. All ranks must call the same collectives in the same order: a rank with fewer packs than
another runs blank ones to match.

Weights are equal on all ranks by construction: rank 0 broadcasts its own at the start, and all ranks apply the same
update. A digest verifies this at the start and at every checkpoint.

With FSDP2, weights, gradients and optimizer state are sharded over the `shard` axis of the mesh, whose ranks are
neighbours; `replicate` such groups hold the same (HSDP). Every rank keeps a shard of each weight, along its first
dimension. A block's weights are all-gathered when the block runs and freed after it; its gradients are reduce-scattered
by sum, and in the last micro-batch of a step all-reduced over the replicas. Weights outside the blocks (embedding,
head, norms, the projections of the MTP modules) stay gathered from the first forward pass of a step until the
optimizer's step, because the loss needs the head after the model's forward pass. The few weights of higher precision
than the rest (selection biases that learn by gradient) are not sharded: their gradients are all-reduced like those of
an unsharded model.

With expert parallelism `expert` neighbours of a `shard` group divide the experts (expert_parallel.py). FSDP2 shards a
rank's experts over the shard / expert ranks that have the same ones, and gathers and reduces over these alone: the
tokens of the other ranks have come to the experts.
"""

import hashlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m2forge.errors import ConfigError, TrainingError
from m2forge.kernels.arithmetic import at_least_float32
from m2forge.model.architecture import Part, public_parts
from m2forge.model.config import ModelConfig
from m2forge.model.lora import adapter_parts
from m2forge.model.rows import Rows, draw_rows
from m2forge.model.start import Start
from m2forge.model.transformer import Block, MixtureFFN, MTPSource, Transformer, copied_name
from m2forge.train.config import MeshConfig, head_parts

if TYPE_CHECKING:
    # Loading these takes most of a second; only a sharded model needs them.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from m2forge.train.context_parallel import ContextGroup

TIMEOUT_S = 6 * 3600.0
"""Timeout of a collective. Other ranks wait while rank 0 encodes data and writes checkpoints; if a process dies, the
launcher ends the others."""
CHUNK_ELEMENTS = 1 << 22
T = TypeVar("T")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by size in bytes."""


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, bit-identical on each; `tensor` is not changed."""
        ...

    def max_int(self, value: int) -> int:
        """The maximum of `value` over all ranks, such as the number of packs each rank must run. Also a barrier: no
        rank continues before all have called it."""
        ...


class _SingleRank:
    rank = 0
    num_ranks = 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def max_int(self, value: int) -> int:
        return value


SINGLE_RANK: Ranks = _SingleRank()


class ProcessRanks:
    """torch.distributed's default process group, which must also support CPU tensors: integers are reduced there, to
    avoid a host sync."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the device this process trains on."""
        self.device = device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    def max_int(self, value: int) -> int:
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


@contextmanager
def process_ranks(device: torch.device, mesh: MeshConfig, *, timeout_s: float = TIMEOUT_S) -> Iterator[ProcessRanks]:
    """Join the process group of a launcher such as torchrun, from the variables it sets: RANK, WORLD_SIZE and the
    rendezvous address. On CUDA, LOCAL_RANK chooses the GPU."""
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        raise ConfigError(f"training in parallel needs {missing} in the environment; start it by torchrun")
    mesh.of_ranks(int(os.environ["WORLD_SIZE"]))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"train.machine.mesh: rank {device.index} of this machine finds {torch.cuda.device_count()} GPUs; each "
                "rank needs its own: set smaller numbers"
            )
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield ProcessRanks(device)
    finally:
        dist.destroy_process_group()


def exchange(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, on each."""
    received: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(received, value, group)
    return cast("list[T]", received)


def group_beside() -> dist.ProcessGroup:
    """A second group of all ranks, on which a thread of theirs communicates beside their step. All ranks call this
    together."""
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo"))


@torch.no_grad()
def align(model: nn.Module, ranks: ProcessRanks) -> None:
    """Broadcast the weights of rank 0, before sharding or training."""
    state: dict[str, Tensor] = model.state_dict()
    shapes = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in state.items()]
    if not _same(_digest("\n".join(shapes).encode()), ranks):
        raise ConfigError("the ranks have built different networks; start all of them with one configuration")
    for tensor in state.values():
        sent = tensor.contiguous()
        dist.broadcast(sent, 0)
        tensor.copy_(sent)
    refuse_drift(model, ranks)


def refuse_difference(what: str, content: str, ranks: Ranks) -> None:
    """Raise if `content` differs between ranks."""
    if not _same(_digest(content.encode()), ranks):
        raise ConfigError(f"the ranks see different {what}; all must be started alike, on files that they share")


def refuse_drift(model: nn.Module, ranks: Ranks) -> None:
    """Raise if weights differ between ranks that hold the same."""
    if ranks.num_ranks == 1:
        return
    tensors: list[Tensor] = list(model.state_dict().values())
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    is_same = _same(_combined([tensor for tensor in tensors if not is_sharded(tensor)]), ranks)
    if sharded:
        num_together = ranks.num_ranks // num_replicas(sharded[0])
        mine = torch.zeros(ranks.num_ranks, dtype=torch.int64)
        mine[ranks.rank] = _combined([local(tensor) for tensor in sharded])
        is_same &= len(ranks.sum(mine).view(-1, num_together).unique(dim=0)) == 1
    if not is_same:
        raise TrainingError(
            "the ranks no longer hold the same weights, so one of them computes wrongly; resume from a checkpoint"
        )


def _combined(tensors: Sequence[Tensor]) -> int:
    """A digest of all these tensors."""
    sums = [_fingerprint(tensor) for tensor in tensors]
    return _digest(torch.stack(sums).cpu().numpy().tobytes() if sums else b"")


def num_replicas(tensor: "DTensor") -> int:
    """Number of ranks that hold the same shard."""
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def _fingerprint(tensor: Tensor) -> Tensor:
    """A checksum that depends on every element and its index; overflow wraps around."""
    bits = tensor.contiguous().view(INTEGERS[tensor.itemsize]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK_ELEMENTS):
        weight = 2 * torch.arange(chunk.numel(), device=tensor.device) + 1
        total = total * 31 + (chunk.long() * weight).sum()
    return total


def _digest(content: bytes) -> int:
    """A hash that fits into a signed 64-bit integer."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big")


def _same(value: int, ranks: Ranks) -> bool:
    return ranks.max_int(value) == -ranks.max_int(-value)


def shard_model(model: Transformer, mesh_config: MeshConfig, ranks: ProcessRanks) -> None:
    """Shard `model`, equal on all ranks, in place; each block moves to the rank's device as it is sharded. One on the
    meta device stays there; the rank then allocates and fills only its shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh_config.refuse_misfit(model.config)
    (replicate, shard), expert = mesh_config.of_ranks(ranks.num_ranks).shape, mesh_config.expert
    mesh = init_device_mesh(ranks.device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
    dtype = model.embedding.weight.dtype
    policy = MixedPrecisionPolicy(reduce_dtype=at_least_float32(dtype))
    full = {weight for weight in model.parameters() if weight.dtype != dtype}
    device = torch.device("meta") if model.embedding.weight.is_meta else ranks.device
    for weight in full:
        weight.data = weight.data.to(device)

    def split(module: nn.Module, mesh: "DeviceMesh") -> None:
        over = mesh if replicate > 1 else mesh["shard"]
        fully_shard(module, mesh=over, mp_policy=policy, ignored_params=full)

    if expert > 1:
        sizes, names = (replicate, shard // expert, expert), ("replicate", "shard", "expert")
        experts_mesh = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=names)
        for module in model.modules():
            if isinstance(module, MixtureFFN):
                split(module.router, mesh)
                _divide_experts(module, experts_mesh["expert"], device)
                split(module, experts_mesh["replicate", "shard"])
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for module in (*blocks, model):
        split(module, mesh)
    for unit in sharded_modules(model):
        unit.set_gradient_divide_factor(1.0)
        # Otherwise torch uses a pre-multiplied sum, which only NCCL supports.
        unit.set_force_sum_reduction_for_comms(True)
    sharded_modules(model)[0].set_reshard_after_backward(False, recurse=False)


@torch.no_grad()
def expand_mtp(model: Transformer, num_modules: int, source: MTPSource, mesh: MeshConfig, ranks: Ranks) -> Transformer:
    """`model` with more MTP modules, as `Transformer.expand_mtp` adds them: the same object, or if it is sharded
    another one, since FSDP2 adds no weights to a network that it has divided. The weights are copied shard by shard."""
    if not isinstance(ranks, ProcessRanks) or not mesh.is_sharded:
        model.expand_mtp(num_modules, source)
        return model
    assert model.lora is None, "a stage with adapters adds no modules"
    for unit in sharded_modules(model):
        unit.reshard()
    config = model.config.model_copy(update={"num_mtp": num_modules})
    larger = Start(config, token_ids=model.token_ids).network("meta", model.embedding.weight.dtype)
    shard_model(larger, mesh, ranks)
    larger.to_empty(device=ranks.device)
    old, held = model.state_dict(), held_weights(larger)
    for name, rows in held.items():
        origin = name if name in old else copied_name(name, config.num_layers, source)
        rows.tensor.copy_(local(old[origin]))
    if source == "random":
        for index in range(len(model.mtp), num_modules):
            added = {name: rows for name, rows in held.items() if name.startswith(f"mtp.{index}.")}
            draw_rows(added, config.init_std, seed=index)
    refuse_drift(larger, ranks)
    return larger


def _divide_experts(layer: MixtureFFN, mesh: "DeviceMesh", device: torch.device) -> None:
    """Keep this rank's experts, and their adapters, alone."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from m2forge.train.expert_parallel import ParallelExpertFFN

    for name, weight in list(layer.named_parameters()):
        if not name.startswith("router."):
            path, _, last = name.rpartition(".")
            mine = distribute_tensor(weight.data.to(device), mesh, [Shard(0)], src_data_rank=None)
            setattr(layer.get_submodule(path), last, nn.Parameter(mine, requires_grad=weight.requires_grad))
    layer.expert_ffn = ParallelExpertFFN(mesh.get_group())


def context_group(mesh_config: MeshConfig, ranks: ProcessRanks, network: ModelConfig) -> "ContextGroup | None":
    """The neighbours that share their packs with this rank; None: it has its own."""
    if mesh_config.context == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    from m2forge.train.context_parallel import ContextGroup

    num_packs, num_parts = ranks.num_ranks // mesh_config.context, head_parts(network.attention, mesh_config.context)
    kind, sizes = ranks.device.type, (num_packs, mesh_config.context)
    group = init_device_mesh(kind, sizes, mesh_dim_names=("packs", "context"))["context"].get_group()
    if num_parts == mesh_config.context:
        return ContextGroup(group, group, network)
    # The ranks that divide the queries of a part of the heads are neighbours.
    of_parts = (num_packs, num_parts, mesh_config.context // num_parts)
    parts = init_device_mesh(kind, of_parts, mesh_dim_names=("packs", "parts", "queries"))["parts"].get_group()
    return ContextGroup(group, parts, network)


def sharded_modules(model: nn.Module) -> "list[FSDPModule]":
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def is_counted(tensor: Tensor, ranks: Ranks) -> bool:
    """Whether this rank's part of a tensor counts in a sum over all ranks, in which no element may count twice."""
    if not is_sharded(tensor):
        return ranks.rank == 0
    coordinates: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    return not any(at for at, placement in zip(coordinates, tensor.placements, strict=True) if placement.is_replicate())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard; the tensor itself if it is not sharded. Writes go through."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def held_rows(held: Tensor, like: Tensor) -> Rows:
    """`held`, this rank's part of a tensor that is sharded like `like`, and where it lies in the whole."""
    first = 0
    if is_sharded(like):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, (first, *_) = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return Rows(held, first, tuple(like.shape))


def held_weights(model: Transformer) -> dict[str, Rows]:
    """This rank's shard of the model state; nothing is gathered."""
    return {name: held_rows(local(tensor), tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def gathered(slice_of: Tensor, like: Tensor) -> Tensor:
    """All-gather a tensor that is sharded like `like`; all ranks call this together."""
    if not is_sharded(like):
        return slice_of
    from torch.distributed.tensor import DTensor, Replicate, Shard

    split = DTensor.from_local(
        slice_of.to(like.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    if "expert" in (like.device_mesh.mesh_dim_names or ()):
        # In the reverse order of the cuts: FSDP cut what the rank has of the experts.
        split = split.redistribute(placements=[Replicate()] * (like.device_mesh.ndim - 1) + [Shard(0)])
    return split.full_tensor()


@torch.no_grad()
def sliced(full: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a full tensor that every rank holds."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    split = distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return split.to_local()


@torch.no_grad()
def public_share(model: Transformer, ranks: ProcessRanks) -> dict[str, Tensor]:
    """The tensors that this rank publishes, by public name: all ranks together each tensor once, about equally many
    bytes each. All ranks call this together. A tensor belongs to a rank that holds all of it, as one does each expert,
    if there is any; others are gathered one by one, and those of an adapter all belong to rank 0."""
    for module in sharded_modules(model):
        module.reshard()
    state = model.state_dict()
    parts: dict[str, list[tuple[str, Part]]] = {}
    for public, part in public_parts(model.config) if model.lora is None else adapter_parts(model.config, model.lora):
        parts.setdefault(part.name, []).append((public, part))
    mine = {name: held_rows(local(state[name]), state[name]) for name in parts}
    spans: list[dict[str, tuple[int, int]]] = [{} for _ in range(ranks.num_ranks)]
    dist.all_gather_object(spans, {name: (rows.start, rows.stop) for name, rows in mine.items()})
    num_bytes, owned = [0] * ranks.num_ranks, dict[str, Tensor]()
    for name, found in parts.items():
        rows, full = mine[name], None
        for public, part in found:
            first, stop = (part.expert, part.expert + 1) if part.expert is not None else (part.start, part.stop)
            stop = rows.shape[0] if stop is None else stop
            holders = [rank for rank, span in enumerate(spans) if span[name][0] <= first and stop <= span[name][1]]
            if model.lora is not None:
                holders = [0] if 0 in holders else []
            if not holders and full is None:
                full = gathered(rows.tensor, state[name])
            among = holders or ([0] if model.lora is not None else range(ranks.num_ranks))
            owner = min(among, key=lambda rank: (num_bytes[rank], rank))
            num_bytes[owner] += (stop - first) * torch.Size(rows.shape[1:]).numel() * rows.tensor.itemsize
            if owner != ranks.rank:
                continue
            if full is not None:
                owned[public] = part.of(full).to("cpu", copy=True)
            elif part.expert is not None:
                owned[public] = rows.tensor[part.expert - rows.start][part.start : part.stop]
            else:
                owned[public] = rows.tensor[first - rows.start : stop - rows.start]
    return owned
