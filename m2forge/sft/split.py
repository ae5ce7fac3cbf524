"""Which trajectories are held out for evaluation: a trajectory in, its side of the division out.

The side is a function of the conversation alone: of what the user, the assistant and the tools said, without system
prompt, tool definitions and call ids. So it survives a resume, another order or file format of the sources and another
seed, and copies of a conversation are all on one side.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from m2forge.records import JsonValue
from m2forge.sft.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Selection:
    """One side of the division; the same `share` and `hashes` with the other side select the other trajectories."""

    side: Literal["train", "held_out"]
    share: float = 0.0
    """Conversations are held out whose hash is below this share of the range of hashes."""
    hashes: frozenset[int] = frozenset()
    """Conversations are also held out whose hash is one of these."""

    def includes(self, conversation: int) -> bool:
        """Whether the conversation with this hash is on this side."""
        is_held_out = conversation < self.share * 2.0**64 or conversation in self.hashes
        return is_held_out == (self.side == "held_out")

    def identity(self) -> list[JsonValue]:
        """Everything the selection depends on, as JSON."""
        return [self.side, self.share, *sorted(self.hashes)]


def conversation_hash(trajectory: Trajectory) -> int:
    """A hash in [0, 2^64)."""
    turns = [
        [message.role, message.content, message.thinking, [[call.name, call.arguments] for call in message.tool_calls]]
        for message in trajectory.messages
        if message.role != "system"
    ]
    text = json.dumps(turns, ensure_ascii=False, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
