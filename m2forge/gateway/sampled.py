"""A completion to be recorded."""

from dataclasses import dataclass

from m2forge.errors import RecordError
from m2forge.records import Call
from m2forge.text.completion import Completion
from m2forge.tree.sample import ExpertArray, checked_experts


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One completion, as the engine sampled it and as parsed for the client."""

    call: Call
    completion: Completion
    experts: ExpertArray | None = None
    """Routed experts of the first tokens of prompt plus completion, in the token tree's format."""

    def check_experts(self, shape: tuple[int, ...] | None) -> None:
        """`shape`: layers and experts per layer of earlier samples; None if this is the first."""
        if self.experts is None:
            return
        checked_experts(self.experts)
        if shape not in (None, self.experts.shape[1:]):
            raise RecordError(f"expected {shape} experts per token, received {self.experts.shape[1:]}")
