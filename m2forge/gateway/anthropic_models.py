"""Anthropic's model list, served on the same routes as OpenAI's (`openai_models.py`) to Anthropic clients."""

from collections.abc import Sequence
from datetime import UTC, datetime

from m2forge.records import JsonValue


def models_body(names: Sequence[str], created_s: int) -> dict[str, JsonValue]:
    data: list[JsonValue] = [model_body(name, created_s) for name in names]
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def model_body(name: str, created_s: int) -> dict[str, JsonValue]:
    created_at = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created_at, "lifecycle": "active"}
