"""FSDP2: weights, gradients and optimizer state sharded over the ranks.

Every rank keeps a shard of each weight, along its first dimension. A block's weights are all-gathered when the block
runs and freed after it; its gradients are reduce-scattered (by sum, not mean: see parallel.py). Weights outside the
blocks (embedding, head, norms, the projections of the MTP modules) stay gathered from the first forward pass of a step
until the optimizer's step, because the loss needs the head after the model's forward pass.

The few weights kept in a higher precision than the rest (selection biases that learn by gradient) are not sharded:
their gradients are all-reduced like those of an unsharded model.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from m2forge.kernels.precision import at_least_float32
from m2forge.model.block import Block
from m2forge.model.build import empty
from m2forge.model.transformer import Transformer
from m2forge.train.parallel import ProcessRanks, Ranks


def shard_model(model: Transformer, ranks: ProcessRanks) -> None:
    """Shard `model`, equal on all ranks, in place; each block moves to the rank's device as it is sharded."""
    mesh = init_device_mesh(ranks.device.type, (ranks.num_ranks,))
    dtype = model.embedding.weight.dtype
    policy = MixedPrecisionPolicy(reduce_dtype=at_least_float32(dtype))
    whole = {weight for weight in model.parameters() if weight.dtype != dtype}
    for weight in whole:
        weight.data = weight.data.to(ranks.device)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole)
    for split in sharded_modules(model):
        split.set_gradient_divide_factor(1.0)
        # Otherwise torch uses a pre-multiplied sum, which only NCCL supports.
        split.set_force_sum_reduction_for_comms(True)
    sharded_modules(model)[0].set_reshard_after_backward(False, recurse=False)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard; the tensor itself if it is not sharded. Writes go through."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gathered(slice_of: Tensor, like: Tensor) -> Tensor:
    """All-gather a tensor that is sharded like `like`; all ranks call this together."""
    if not isinstance(like, DTensor):
        return slice_of
    split = DTensor.from_local(
        slice_of.to(like.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return split.full_tensor()


@torch.no_grad()
def sliced(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank holds whole."""
    if not isinstance(like, DTensor):
        return whole
    split = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return split.to_local()


@torch.no_grad()
def whole_model(model: Transformer, ranks: Ranks) -> Transformer | None:
    """The unsharded model, for saving: `model` itself if it is not sharded, else a copy in rank 0's host memory, and
    None on the other ranks. All ranks call this together."""
    modules = sharded_modules(model)
    if not modules:
        return model
    for module in modules:
        module.reshard()
    copy = empty(model.config, "cpu", model.embedding.weight.dtype) if ranks.rank == 0 else None
    target = {} if copy is None else copy.state_dict()
    for name, tensor in model.state_dict().items():
        full = gathered(local(tensor), tensor)
        if copy is not None:
            target[name].copy_(full)
    if copy is not None:
        copy.token_ids = model.token_ids
    return copy
