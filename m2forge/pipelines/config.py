"""The configuration of `m2forge pipeline`: one table that names the pipeline, and what all pipelines share.

name = "questions"
workers = 2

[models.writer]                             # optional; any OpenAI-compatible endpoint
url = "http://127.0.0.1:8400/v1"
model = "m2"

[questions]
source = "tasks.jsonl"
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.errors import suggest
from m2forge.pipelines.swe.config import SweConfig
from m2forge.tasks.config import VerifyConfig

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]

PIPELINES = ("questions", "swe")
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


class QuestionsConfig(Config):
    """Tasks of any source become task folders, and with teachers trajectories: `m2forge/pipelines/questions.py`."""

    source: str = Field(min_length=1)
    """A source of tasks: a family's name, FILE.py:NAME, PACKAGE.MODULE:NAME or FILE.jsonl."""
    num: Count = 1000
    """Number of tasks; of a fixed list at most all."""
    level: Annotated[int, Field(ge=0)] | None = None
    """Level of difficulty; None: all levels."""
    writer: str | None = None
    """Model that rewrites instructions; None: the instructions stay as they are."""
    num_variants: Count = 2
    """Rewritten instructions of each task, beside its own."""
    min_words: Annotated[int, Field(ge=0)] = 3
    max_words: Count = 2000
    """Instructions with fewer or more words are rejected."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Jaccard similarity of instructions from which on the later one is a near-duplicate."""
    judge: str | None = None
    """Model that scores the criteria; None: no rubric."""
    criteria: tuple[str, ...] = ("The task is clear and complete.", "The task has one right answer.")
    min_score: Share = 0.75
    """Tasks whose mean score is lower are rejected."""
    teachers: tuple[str, ...] = ()
    """Models that answer the tasks in turn; empty: the source's own demonstrations."""
    num_draws: Count = 1
    """Answers to each task."""
    max_per_task: Count = 1
    """Accepted answers of each task, the shortest first."""
    verify: VerifyConfig = VerifyConfig()


class PipelineConfig(Config):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """The run's name: its directory is runs/NAME."""
    seed: Annotated[int, Field(ge=0)] = 0
    workers: Annotated[int, Field(gt=0, le=1024)] = 4
    """Items that a stage processes at once, in threads or worker processes. Results do not depend on it."""
    replay: bool = False
    """Use stored completions alone; a completion that is not stored ends the run."""
    completions: tuple[str, ...] = ()
    """Files `pipeline.db` of other runs, whose completions are used too."""
    models: dict[str, EndpointConfig] = Field(default_factory=dict)
    """Models that stages ask, by the name that the pipeline's table uses."""
    questions: QuestionsConfig | None = None
    swe: SweConfig | None = None

    @property
    def pipeline(self) -> str:
        """The key of the table that names the pipeline."""
        return next(key for key in PIPELINES if getattr(self, key) is not None)

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = [key for key in PIPELINES if getattr(self, key) is not None]
        if len(found) != 1:
            raise ValueError(
                f"expected one of the tables {', '.join(PIPELINES)}, received {', '.join(found) or 'none'}"
            )
        if self.questions is not None:
            for name in filter(None, (self.questions.writer, self.questions.judge, *self.questions.teachers)):
                if name not in self.models:
                    raise ValueError(f"questions: no table models.{name}; {suggest(name, self.models)}")
        return self
