"""The optimizer: one slot of state per trained weight, kept by the weight's name.

Names outlive a change of the network: modules that are added get fresh slots, weights that are frozen keep theirs, and
a checkpoint is a flat table of tensors. Weights below float32 learn through a float32 master.

Gradients of several packs add up in at least float32. `step` measures their norms, clips, and updates; a step whose
gradients are not finite changes no weight and no moment, and is counted all the same: the count is known here, whether
they are finite only on the device.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from m2forge.errors import CheckpointError
from m2forge.kernels.adamw import AdamWRule, AdamWState, adamw_
from m2forge.kernels.precision import at_least_float32
from m2forge.model.transformer import Transformer
from m2forge.train.config import OptimizerConfig
from m2forge.train.muon import muon_


@dataclass
class Slot:
    """The state of one weight."""

    weight: nn.Parameter
    master: Tensor | None
    """The weight in float32, where it is kept in less."""
    tensors: dict[str, Tensor]
    """AdamW: mean, square. Muon: momentum."""
    num_steps: int = 0
    total: Tensor | None = None
    """Gradient added up over the packs of a step, where there are several."""

    @property
    def exact(self) -> Tensor:
        """What the update is added to."""
        return self.weight.data if self.master is None else self.master

    @property
    def gradient(self) -> Tensor | None:
        return self.weight.grad if self.total is None else self.total


@dataclass(frozen=True)
class Norms:
    """Lengths of the gradients of one step, before clipping; tensors of no dimension."""

    overall: Tensor
    by_layer: dict[str, Tensor]


class Optimizer:
    def __init__(self, model: Transformer, config: OptimizerConfig) -> None:
        self.config = config
        self.slots: dict[str, Slot] = {}
        self.follow(model)

    def follow(self, model: Transformer) -> None:
        """Take up the weights that `model` has and this optimizer does not."""
        self._attention = model.config.attention
        # In the network's order, whenever a weight was added: norms are summed in the order of the slots.
        self.slots = {
            name: self.slots.get(name) or self._fresh_slot(name, weight) for name, weight in model.named_parameters()
        }

    def _fresh_slot(self, name: str, weight: nn.Parameter) -> Slot:
        precision = at_least_float32(weight.dtype)
        master = None if weight.dtype == precision else weight.data.to(precision)
        kinds = ("momentum",) if self._is_muon(name, weight) else ("mean", "square")
        return Slot(weight, master, {kind: torch.zeros_like(weight.data, dtype=precision) for kind in kinds})

    def collect(self) -> None:
        """Add the gradients of a pack to the step's, and clear them."""
        for slot in self.slots.values():
            if slot.weight.grad is not None:
                if slot.total is None:
                    slot.total = slot.weight.grad.to(slot.exact.dtype)
                else:
                    slot.total += slot.weight.grad
                slot.weight.grad = None

    @torch.no_grad()
    def step(self, rate: float) -> Norms:
        """Update the weights that have gradients, then clear them."""
        active = {name: slot for name, slot in self.slots.items() if slot.gradient is not None}
        if not active:
            # A frozen phase whose loss weight passes through 0.
            first = next(iter(self.slots.values())).exact
            return Norms(first.new_zeros(()), {})
        norms = _norms(active)
        # A norm that is not finite makes a scale that is not finite, which skips the step.
        scale = torch.where(norms.overall > self.config.max_norm, self.config.max_norm / norms.overall, 1.0)
        scale = torch.where(norms.overall.isfinite(), scale, torch.nan)
        for slot in active.values():
            slot.num_steps += 1
        self._step_adamw(active, scale, rate)
        self._step_muon(active, scale, rate)
        for slot in active.values():
            slot.total = slot.weight.grad = None
        return norms

    def _step_adamw(self, active: Mapping[str, Slot], scale: Tensor, rate: float) -> None:
        by_decay: dict[float, list[Slot]] = defaultdict(list)
        for name, slot in active.items():
            if "mean" in slot.tensors:
                by_decay[self._decay(name, slot.weight)].append(slot)
        for decay, slots in by_decay.items():
            states = [AdamWState(slot.weight.data, slot.master, **slot.tensors) for slot in slots]
            grads = [slot.gradient for slot in slots if slot.gradient is not None]
            rule = AdamWRule(rate, decay, self.config.betas, self.config.eps)
            adamw_(states, grads, [slot.num_steps for slot in slots], scale, rule)

    def _step_muon(self, active: Mapping[str, Slot], scale: Tensor, rate: float) -> None:
        slots = {name: slot for name, slot in active.items() if "momentum" in slot.tensors}
        if not slots or not bool(scale.isfinite()):
            return
        for name, slot in slots.items():
            assert slot.gradient is not None
            grad = slot.gradient.to(slot.exact.dtype) * scale
            muon_(
                self._matrices(name, slot.exact),
                self._matrices(name, slot.tensors["momentum"]),
                self._matrices(name, grad),
                rate=rate,
                decay=self._decay(name, slot.weight),
                momentum=self.config.muon_momentum,
                iterations=self.config.muon_iterations,
            )
            if slot.master is not None:
                slot.weight.data.copy_(slot.master)

    def _decay(self, name: str, weight: Tensor) -> float:
        return self.config.weight_decay if weight.dim() > 1 and not name.startswith("embedding.") else 0.0

    def _is_muon(self, name: str, weight: Tensor) -> bool:
        inside = not name.startswith(("embedding.", "head."))
        return self.config.kind == "muon" and weight.dim() > 1 and inside

    def _matrices(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Views of the matrices that a stored tensor stacks along its rows."""
        if name.endswith("attention.qkv.weight"):
            widths = (self._attention.q_width, self._attention.kv_width, self._attention.kv_width)
            return list(tensor.split(widths, dim=-2))
        if name.endswith(("ffn.w13", "ffn.w13.weight")):
            return list(tensor.chunk(2, dim=-2))
        return [tensor]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """(tensors by name, steps each weight has taken): all that a later run needs beside the weights."""
        tensors: dict[str, Tensor] = {}
        for name, slot in self.slots.items():
            if slot.master is not None:
                tensors[f"{name}/master"] = slot.master
            tensors.update({f"{name}/{kind}": tensor for kind, tensor in slot.tensors.items()})
        return tensors, {name: slot.num_steps for name, slot in self.slots.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], num_steps: Mapping[str, int]) -> None:
        ours, _ = self.state()
        wrong = sorted(ours.keys() ^ tensors.keys()) + sorted(
            name for name in ours.keys() & tensors.keys() if ours[name].shape != tensors[name].shape
        )
        if wrong or num_steps.keys() != self.slots.keys():
            raise CheckpointError(
                f"the optimizer's state does not fit this network and optimizer: {(wrong or ['step counts'])[:4]}; "
                "resume with the configuration that the run was started with"
            )
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])
        for name, slot in self.slots.items():
            slot.num_steps = num_steps[name]


def _norms(active: Mapping[str, Slot]) -> Norms:
    grads = {name: slot.gradient for name, slot in active.items()}
    present = {name: grad for name, grad in grads.items() if grad is not None}
    precision = max((at_least_float32(grad.dtype) for grad in present.values()), key=lambda kind: kind.itemsize)
    norms = torch._foreach_norm(list(present.values()), 2, dtype=precision)
    by_layer: dict[str, list[Tensor]] = defaultdict(list)
    for name, norm in zip(present, norms, strict=True):
        by_layer[layer_of(name)].append(norm)
    return Norms(
        torch.stack(list(norms)).norm(), {layer: torch.stack(found).norm() for layer, found in by_layer.items()}
    )


def layer_of(name: str) -> str:
    """What a weight counts under: `layer_3`, `mtp_1`, `embedding`, `head` or `norm`."""
    first, *rest = name.split(".")
    kinds = {"blocks": "layer", "mtp": "mtp"}
    return f"{kinds[first]}_{rest[0]}" if first in kinds else first
