"""OpenAI's list of models: `GET /v1/models` and `GET /v1/models/NAME`.

A gateway serves one policy under any number of names, because agents insist on the names they know.
"""

from collections.abc import Sequence

from m2forge.records import JsonValue

PATH = "/v1/models"
OWNER = "m2forge"


def models_body(names: Sequence[str], created_s: int) -> dict[str, JsonValue]:
    return {"object": "list", "data": [model_body(name, created_s) for name in names]}


def model_body(name: str, created_s: int) -> dict[str, JsonValue]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": OWNER}
