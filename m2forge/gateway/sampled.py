"""One completion while it is recorded."""

from dataclasses import dataclass

from m2forge.errors import RecordError
from m2forge.records import Call
from m2forge.text.completion import Completion
from m2forge.tree.sample import ExpertArray, checked_experts


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One completion, as the engine drew it and as the client is told."""

    call: Call
    completion: Completion
    experts: ExpertArray | None = None
    """Where the first tokens of prompt and completion went, as a tree takes it."""

    def check_experts(self, shape: tuple[int, ...] | None) -> None:
        """`shape`: layers and experts per layer of those before; None where this is the first."""
        if self.experts is None:
            return
        checked_experts(self.experts)
        if shape not in (None, self.experts.shape[1:]):
            raise RecordError(f"expected {shape} experts per token, received {self.experts.shape[1:]}")
