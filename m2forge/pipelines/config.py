"""The configuration of `m2forge pipeline`: one table that names the pipeline, and what all pipelines share.

    name = "questions"
    workers = 2

    [models.writer]                             # optional; any OpenAI-compatible endpoint
    url = "http://127.0.0.1:8400/v1"
    model = "m2"

    [questions]
    source = "tasks.jsonl"
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]

PIPELINES = ("questions",)
"""Keys of `PipelineConfig` that name a pipeline."""


class EndpointConfig(Config):
    """A model behind any endpoint with OpenAI's chat completions."""

    url: str = Field(pattern=r"^https?://")
    """Base URL, such as http://127.0.0.1:8400/v1."""
    model: str = Field(min_length=1)
    """The model's name, a part of the key under which completions are stored."""
    key_env: str | None = None
    """Environment variable that holds the API key; None: no key is sent."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """None: the endpoint's default, as for `top_p`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Count = 4096
    """Maximum tokens of a completion."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Timeout of one request."""
    max_retries: Annotated[int, Field(ge=0)] = 5
    """Retries of a request that failed, was refused with status 408, 409, 429 or 5xx, or whose response is no chat
    completion; then the item is failed."""
    retry_s: Annotated[float, Field(gt=0)] = 1.0
    """Delay before the first retry; doubled before each further one, up to a minute."""
