"""The optimizer: one slot of state per trained weight, keyed by the weight's name.

Names survive changes of the model: added modules get new slots, frozen weights keep theirs, and a checkpoint is a flat
table of tensors. Weights below float32 are updated through a float32 master weight.

Gradients are accumulated over packs and all-reduced over ranks in at least float32 before norms are computed: norms,
clipping and update equal those of one process with all the packs. For a sharded weight, each rank keeps and updates the
state of its own shard.

A step with non-finite gradients changes no weight and no moment but still counts as a step: the count is stored on the
host, while only the device knows whether the gradients are finite.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from m2forge.errors import CheckpointError, TrainingError
from m2forge.kernels.adamw import AdamWRule, AdamWState, adamw_
from m2forge.kernels.arithmetic import at_least_float32
from m2forge.model.lora import is_adapter
from m2forge.model.rows import Rows
from m2forge.model.tensor_source import TensorHeader
from m2forge.model.transformer import Transformer
from m2forge.train.config import OptimizerConfig
from m2forge.train.parallel import (
    SINGLE_RANK,
    Ranks,
    gathered,
    held_rows,
    is_counted,
    is_sharded,
    local,
    num_replicas,
    sharded_modules,
    sliced,
)

BUCKET_ELEMENTS = 1 << 25
"""Gradient elements per all-reduce."""
CHUNK_ELEMENTS = 1 << 24
"""Elements per chunk: three float32 tensors of this size, on each of two streams, take 384 MiB of device memory."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RMS_FACTOR = 0.2


@dataclass
class Slot:
    """The state of one weight, or of this rank's shard of it."""

    weight: nn.Parameter
    master: Tensor | None
    """The weight in float32, if it is stored in a lower precision."""
    tensors: dict[str, Tensor]
    """AdamW: mean, square. Muon: momentum."""
    num_steps: int = 0
    total: Tensor | None = None
    """Gradient accumulated over the packs of a step, or summed over the ranks; None while `weight.grad` suffices."""

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.weight)

    @property
    def local(self) -> Tensor:
        """The part of the weight that this rank holds."""
        return local(self.weight.data)

    @property
    def exact(self) -> Tensor:
        """The tensor that the update is added to."""
        return self.local if self.master is None else self.master

    @property
    def gradient(self) -> Tensor | None:
        if self.total is not None:
            return self.total
        return None if self.weight.grad is None else local(self.weight.grad)

    def clear(self) -> None:
        self.total = self.weight.grad = None


class StoredState(Protocol):
    """Tensors on disk; a rank reads only its rows."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]: ...

    def read(self, held: Mapping[str, Rows]) -> None: ...


@dataclass(frozen=True)
class Norms:
    """Gradient norms of one step, before clipping; scalar tensors."""

    overall: Tensor
    by_layer: dict[str, Tensor]


class Optimizer:
    def __init__(
        self,
        model: Transformer,
        config: OptimizerConfig,
        ranks: Ranks = SINGLE_RANK,
        offload: Literal["none", "host"] = "none",
    ) -> None:
        """`offload`: host keeps master weights and moments in host memory."""
        self.config, self.ranks, self.offload = config, ranks, offload
        self.slots: dict[str, Slot] = {}
        self._has_partial_sums = False
        """Whether FSDP2 holds gradients of a step that has not ended."""
        self.follow(model)

    def follow(self, model: Transformer) -> None:
        """Train the weights of `model`: with the slots of the same names that this optimizer has, else fresh ones."""
        self._attention, self._device = model.config.attention, model.embedding.weight.device
        self._sharded_modules = sharded_modules(model)
        self.reshard()
        # In the model's order, whenever a weight was added: norms are summed in slot order.
        self.slots = {
            name: self.slots.get(name) or self._fresh_slot(name, weight)
            for name, weight in model.named_parameters()
            if model.lora is None or is_adapter(name)
        }
        for name, weight in model.named_parameters():
            if name in self.slots:
                self.slots[name].weight = weight

    def _fresh_slot(self, name: str, weight: nn.Parameter) -> Slot:
        precision, held = at_least_float32(weight.dtype), local(weight.data)
        master = None if weight.dtype == precision else self._to_storage(held.to(precision))
        kinds = ("momentum",) if self._is_muon(name, weight) else ("mean", "square")
        return Slot(weight, master, {kind: self._to_storage(torch.zeros_like(held, dtype=precision)) for kind in kinds})

    def _to_storage(self, tensor: Tensor) -> Tensor:
        return to_host(tensor) if self.offload == "host" else tensor

    def reshard(self) -> None:
        """Free the gathered weights of FSDP modules: the update changes the shards."""
        for module in self._sharded_modules:
            module.reshard()

    def add_up_replicas(self, *, is_last: bool) -> None:
        """Have replicas of a sharded model add up their gradients in the step's last backward pass alone; before, each
        keeps the sum of its own."""
        if not self._sharded_modules:
            return
        sharded = [slot.weight for slot in self.slots.values() if is_sharded(slot.weight)]
        self._has_partial_sums = bool(sharded) and num_replicas(sharded[0]) > 1
        for module in self._sharded_modules:
            module.set_requires_all_reduce(is_last, recurse=False)

    def clear(self) -> None:
        """Discard gradients, such as those of an interrupted step. FSDP2 has no way to discard those of replicated
        shards."""
        if self._has_partial_sums:
            raise TrainingError(
                "a step was interrupted, and its gradients remain in replicated shards; start again from a checkpoint"
            )
        for slot in self.slots.values():
            slot.total = slot.weight.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of a pack to the step's total, and clear them."""
        for slot in self.slots.values():
            if slot.weight.grad is not None:
                grad = local(slot.weight.grad)
                if slot.total is None:
                    slot.total = grad.to(slot.exact.dtype)
                else:
                    slot.total += grad
                slot.weight.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> Norms:
        """Update the weights that have gradients on any rank, then clear the gradients."""
        self._has_partial_sums = False
        self.reshard()
        if self.ranks.num_ranks > 1:
            self._add_up_ranks()
        active = {name: slot for name, slot in self.slots.items() if slot.gradient is not None}
        if not active:
            # A frozen phase whose loss weight is 0 at this step.
            return Norms(torch.zeros((), device=self._device), {})
        norms = _norms(active, self.ranks)
        # A non-finite norm makes the scale non-finite, which skips the step.
        scale = torch.where(norms.overall > self.config.max_norm, self.config.max_norm / norms.overall, 1.0)
        scale = torch.where(norms.overall.isfinite(), scale, torch.nan)
        for slot in active.values():
            slot.num_steps += 1
        self._step_adamw(active, scale, lr)
        self._step_muon(active, scale, lr)
        for slot in active.values():
            slot.clear()
        return norms

    def _add_up_ranks(self) -> None:
        """All-reduce the gradients of unsharded weights; FSDP has already reduced the others."""
        slots = [slot for slot in self.slots.values() if not slot.is_sharded]
        if not slots:
            return
        # A rank without packs has no gradients, and must contribute zeros where others have some.
        is_active = torch.tensor([slot.gradient is not None for slot in slots], dtype=torch.int64)
        active = [slot for slot, num in zip(slots, self.ranks.sum(is_active).tolist(), strict=True) if num]
        for bucket in _buckets(active):
            grads = [torch.zeros_like(slot.local) if slot.gradient is None else slot.gradient for slot in bucket]
            sent = torch.cat([grad.flatten().to(slot.exact.dtype) for slot, grad in zip(bucket, grads, strict=True)])
            totals = self.ranks.sum(sent).split([grad.numel() for grad in grads])
            for slot, grad, total in zip(bucket, grads, totals, strict=True):
                slot.clear()
                slot.total = total.view_as(grad)

    def _step_adamw(self, active: Mapping[str, Slot], scale: Tensor, lr: float) -> None:
        by_decay: dict[float, list[Slot]] = defaultdict(list)
        for name, slot in active.items():
            if "mean" in slot.tensors and slot.local.numel():
                by_decay[self._decay(name, slot.weight)].append(slot)
        for decay, slots in by_decay.items():
            states = [AdamWState(slot.local, slot.master, **slot.tensors) for slot in slots]
            grads = [slot.gradient for slot in slots if slot.gradient is not None]
            rule = AdamWRule(lr, decay, self.config.betas, self.config.eps)
            update = adamw_from_host_ if self.offload == "host" else adamw_
            update(states, grads, [slot.num_steps for slot in slots], scale, rule)

    def _step_muon(self, active: Mapping[str, Slot], scale: Tensor, lr: float) -> None:
        slots = {name: slot for name, slot in active.items() if "momentum" in slot.tensors}
        if not slots or not bool(scale.isfinite()):
            return
        for name, slot in slots.items():
            assert slot.gradient is not None
            # A sharded matrix is gathered; in a stack of matrices each rank holds whole matrices.
            like = slot.weight if slot.weight.dim() == 2 else slot.local
            stored = (slot.exact, slot.tensors["momentum"])
            exact, momentum, grad = (
                gathered(x.to(self._device), like) for x in (*stored, slot.gradient.to(slot.exact.dtype) * scale)
            )
            muon_(
                self._matrices(name, exact),
                self._matrices(name, momentum),
                self._matrices(name, grad),
                lr=lr,
                decay=self._decay(name, slot.weight),
                momentum=self.config.muon_momentum,
                iterations=self.config.muon_iterations,
            )
            for old, changed in zip(stored, (exact, momentum), strict=True):
                if changed is not old:
                    old.copy_(sliced(changed, like))
            if slot.master is not None:
                slot.local.copy_(slot.master)

    def _decay(self, name: str, weight: Tensor) -> float:
        return self.config.weight_decay if weight.dim() > 1 and not name.startswith("embedding.") else 0.0

    def _is_muon(self, name: str, weight: Tensor) -> bool:
        inside = not name.startswith(("embedding.", "head.")) and not is_adapter(name)
        return self.config.kind == "muon" and weight.dim() > 1 and inside

    def _matrices(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Views of the matrices that a weight stacks along its rows."""
        if name.endswith("attention.qkv.weight"):
            widths = (self._attention.q_width, self._attention.kv_width, self._attention.kv_width)
            return list(tensor.split(widths, dim=-2))
        if name.endswith(("ffn.w13", "ffn.w13.weight")):
            return list(tensor.chunk(2, dim=-2))
        return [tensor]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def held(self) -> dict[str, Rows]:
        """What this rank holds of the state, by name: all that a resumed run needs beside the weights and
        `num_steps`. No copies."""
        self._settle()
        return {name: held_rows(tensor, slot.weight) for name, slot, tensor in self._state_tensors()}

    @property
    def num_steps(self) -> dict[str, int]:
        """Steps taken by each weight."""
        return {name: slot.num_steps for name, slot in self.slots.items()}

    def load(self, stored: StoredState, num_steps: Mapping[str, int]) -> None:
        """Read this rank's part of the state that any ranks have stored."""
        held = self.held()
        mismatched = sorted(held.keys() ^ stored.headers.keys()) + sorted(
            name for name in held.keys() & stored.headers.keys() if held[name].shape != stored.headers[name].shape
        )
        if mismatched or num_steps.keys() != self.slots.keys():
            raise CheckpointError(
                f"the optimizer's state does not fit this network or optimizer: {(mismatched or ['step counts'])[:4]}; "
                "resume with the configuration that the run was started with"
            )
        stored.read(held)
        for name, slot in self.slots.items():
            slot.num_steps = num_steps[name]

    def _state_tensors(self) -> Iterator[tuple[str, Slot, Tensor]]:
        """Every state tensor of every slot, with its name."""
        for name, slot in self.slots.items():
            if slot.master is not None:
                yield f"{name}/master", slot, slot.master
            for kind, tensor in slot.tensors.items():
                yield f"{name}/{kind}", slot, tensor

    def _settle(self) -> None:
        """Wait for pending copies between device and host memory."""
        if self.offload == "host" and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _buckets(slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """Group slots of one dtype, up to `BUCKET_ELEMENTS`."""
    open_buckets: dict[torch.dtype, list[Slot]] = defaultdict(list)
    for slot in slots:
        bucket = open_buckets[slot.exact.dtype]
        if bucket and sum(other.local.numel() for other in bucket) + slot.local.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = open_buckets[slot.exact.dtype] = []
        bucket.append(slot)
    yield from (bucket for bucket in open_buckets.values() if bucket)


def _norms(active: Mapping[str, Slot], ranks: Ranks) -> Norms:
    grads = [slot.gradient for slot in active.values() if slot.gradient is not None]
    precision = max((at_least_float32(grad.dtype) for grad in grads), key=lambda kind: kind.itemsize)
    norm_S = torch.stack(list(torch._foreach_norm(grads, 2, dtype=precision)))
    if any(slot.is_sharded for slot in active.values()):
        # The squares of all shards add up.
        counts = [is_counted(slot.weight, ranks) for slot in active.values()]
        square_S = norm_S.double().square() * torch.tensor(counts, device=norm_S.device)
        norm_S = ranks.sum(square_S).sqrt().to(precision)
    by_layer: dict[str, list[Tensor]] = defaultdict(list)
    for name, norm in zip(active, norm_S.unbind(), strict=True):
        by_layer[layer_of(name)].append(norm)
    return Norms(norm_S.norm(), {layer: torch.stack(found).norm() for layer, found in by_layer.items()})


def layer_of(name: str) -> str:
    """The layer that a weight's norm counts under: `layer_3`, `mtp_1`, `embedding`, `head` or `norm`."""
    first, *rest = name.split(".")
    kinds = {"blocks": "layer", "mtp": "mtp"}
    return f"{kinds[first]}_{rest[0]}" if first in kinds else first


# -- Muon --------------------------------------------------------------------------------------------------------------


def muon_(
    masters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    lr: float,
    decay: float,
    momentum: float,
    iterations: int,
) -> None:
    """Muon: momentum with an orthogonalized update, for the hidden matrices of the model. Updates matrices, or stacks
    of them, in place; each item may be a view into a larger weight.

        buf ← μ buf + (1 − μ) g               u = (1 − μ) g + μ buf            (Nesterov)
        O = NewtonSchulz(u) ≈ U Vᵀ, where u = U Σ Vᵀ
        w ← (1 − lr·decay) w − lr · 0.2 √max(a, b) · O                     for w of shape (a, b)

    The factor gives the update the same RMS as AdamW's, so both share one learning rate. A matrix stored stacked in
    another tensor (q, k and v; the two halves of an expert; the experts of a layer) is orthogonalized on its own.
    """
    for master, buffer, grad in zip(masters, buffers, grads, strict=True):
        buffer.lerp_(grad, 1 - momentum)
        update = orthogonalize(grad.lerp(buffer, momentum), iterations)
        size = max(master.shape[-2:]) ** 0.5
        master.mul_(1 - lr * decay).add_(update.to(master.dtype), alpha=-lr * RMS_FACTOR * size)


def orthogonalize(matrices: Tensor, iterations: int) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end between about 0.7 and 1.2. Newton–Schulz, X ← aX
    + (bA + cA²)X with A = XXᵀ, needs only matrix products and runs over whole stacks at once.
    """
    precision = torch.bfloat16 if matrices.is_cuda else matrices.dtype
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(precision)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


# -- state in host memory ----------------------------------------------------------------------------------------------


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned if `tensor` is on CUDA."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def adamw_from_host_(
    states: Sequence[AdamWState],
    grads: Sequence[Tensor],
    times: Sequence[int],
    scale: Tensor,
    rule: AdamWRule,
    chunk_elements: int | None = None,
) -> None:
    """`adamw.adamw_` for states whose tensors other than the weight are in host memory. The host may read or change
    them once the device has finished the step.

        host: master, mean, square  → a chunk →  device: the same step as without offload  → the chunk →  host

    Weights and gradients stay on the device. The update is elementwise, so splitting it into chunks changes no bit. On
    CUDA the host memory is pinned and chunks alternate between two streams: while one is copied in or computed, the
    previous one is copied out. All device memory of a chunk is allocated and freed within its stream.
    """
    size, streams = chunk_elements or CHUNK_ELEMENTS, _streams(scale.device)
    for stream in streams:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(scale.device))
    stream_cycle = cycle(streams)
    for state, grad, time in zip(states, grads, times, strict=True):
        for start in range(0, state.weight.numel(), size):
            stream = next(stream_cycle)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                _step_chunk(state, grad, time, scale, rule, slice(start, start + size))
    for stream in streams:
        if stream is not None:
            torch.cuda.current_stream(scale.device).wait_stream(stream)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
    """The same streams at every step, because torch's allocator reuses memory freed on a stream only on that stream."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _step_chunk(state: AdamWState, grad: Tensor, time: int, scale: Tensor, rule: AdamWRule, chunk: slice) -> None:
    at_host = [None if x is None else x.view(-1)[chunk] for x in (state.master, state.mean, state.square)]
    master, mean, square = (None if x is None else x.to(scale.device, non_blocking=True, copy=True) for x in at_host)
    assert mean is not None
    assert square is not None
    here = AdamWState(state.weight.view(-1)[chunk], master, mean, square)
    adamw_([here], [grad.reshape(-1)[chunk]], [time], scale, rule)
    for host, changed in zip(at_host, (master, mean, square), strict=True):
        if host is not None and changed is not None:
            host.copy_(changed, non_blocking=True)
