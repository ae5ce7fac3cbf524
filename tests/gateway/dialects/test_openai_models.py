"""The list of models, as the real client reads it."""

import httpx2
from openai.types import Model

from m2forge.gateway.dialects.openai.chat import model_body, models_body
from tests.gateway.openai_client import connected, extras_of


def test_the_client_lists_and_retrieves_models() -> None:
    with connected() as (client, wire):
        wire.handle = lambda body: httpx2.Response(200, json=models_body(["m2", "gpt-5"], 1_700_000_000))
        assert [model.id for model in client.models.list()] == ["m2", "gpt-5"]
        wire.handle = lambda body: httpx2.Response(200, json=model_body("m2", 1_700_000_000))
        model = client.models.retrieve("m2")
    assert Model.model_validate(model.to_dict(), strict=True).created == 1_700_000_000
    assert not extras_of(model)
