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

from pydantic import Field, JsonValue, model_validator

from m2forge.config import Config
from m2forge.errors import suggest
from m2forge.pipelines.swe.config import SweConfig
from m2forge.pipelines.terminal.config import TerminalConfig
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.source import parse_reference
from m2forge.tasks.task_set import Split

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]

PIPELINES = {
    "questions": "m2forge.pipelines.questions",
    "swe": "m2forge.pipelines.swe.pipeline",
    "terminal": "m2forge.pipelines.terminal.pipeline",
    "distill": "m2forge.pipelines.distill",
}
"""Keys of `PipelineConfig` that name a pipeline, and its module, whose `make_pipeline` takes the key's table."""
CUSTOM = "custom"
"""The key of a pipeline that the user wrote."""
SOLUTION = "solution"
"""The teacher that runs a folder's own solution."""


class EndpointConfig(Config):
    """A model behind any endpoint with OpenAI's chat completions, or in a folder, which the run then serves itself."""

    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Base URL, such as http://127.0.0.1:8400/v1."""
    folder: str | None = None
    """Model folder, GGUF file or hub id that `m2forge serve` serves while the run needs it, instead of `url`."""
    serve: tuple[str, ...] = ()
    """Its settings, as KEY=VALUE of `m2forge serve --set`."""
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

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        if (self.url is None) == (self.folder is None):
            raise ValueError("expected url or folder, and one of them")
        if self.folder is None and self.serve:
            raise ValueError("serve: settings of a server that `folder` starts; leave it out with url")
        if self.folder is not None and self.key_env is not None:
            raise ValueError("key_env: a server that `folder` starts has a key of its own; leave it out")
        return self


class QuestionsConfig(Config):
    """Tasks of any source become task folders, and with teachers trajectories: `m2forge/pipelines/questions.py`."""

    source: str = Field(min_length=1)
    """A source of tasks: a family's name, FILE.py:NAME, PACKAGE.MODULE:NAME or FILE.jsonl."""
    num: Count = 1000
    """Number of tasks; a fixed list gives at most all of its tasks."""
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


class ScaffoldConfig(Config):
    """The variants of the scaffold around the teachers. Each attempt draws one of every list, so that a policy trained
    on them does not depend on one variant."""

    tools: Annotated[tuple[str, ...], Field(min_length=1)] = ("shell",)
    """Names of the tool that runs commands."""
    descriptions: Annotated[tuple[str, ...], Field(min_length=1)] = ("Run a command.",)
    """Descriptions of that tool."""
    systems: Annotated[tuple[str, ...], Field(min_length=1)] = ("",)
    """System prompts; an empty one is not sent."""
    prompts: Annotated[tuple[str, ...], Field(min_length=1)] = ("{instruction}",)
    """User messages; `{instruction}` stands for the task's."""
    environments: Annotated[tuple[dict[str, str], ...], Field(min_length=1)] = ({},)
    """Environment variables of the commands."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for prompt in self.prompts:
            if "{instruction}" not in prompt:
                raise ValueError(f"prompts: expected {{instruction}} in each, received {prompt!r}")
        return self


class DistillConfig(Config):
    """Attempts of teachers at task folders become a corpus for SFT: `m2forge/pipelines/distill.py`."""

    folders: str = Field(min_length=1)
    """A task folder, or a folder that holds some at any depth."""
    split: Split = "train"
    num: Count = 10_000
    """Maximum number of folders."""
    teachers: Annotated[tuple[str, ...], Field(min_length=1)] = ("solution",)
    """Teachers that attempt the tasks, in turn: models of the table `models`, and `solution`, which runs the folder's
    own solution."""
    num_draws: Count = 1
    """Attempts at each task."""
    scaffold: ScaffoldConfig = ScaffoldConfig()
    max_turns: Count = 30
    """Completions of one attempt."""
    max_repeats: Count = 2
    """Maximum runs of one command; an attempt with more is rejected as looping."""
    max_per_task: Count = 2
    """Accepted attempts at each task, the shortest first."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Jaccard similarity of the commands of two attempts at one task from which on the later one is a
    near-duplicate."""
    least: Share = 1.0
    """Minimum perf of accepted attempts."""
    command_s: Annotated[float, Field(gt=0)] = 60.0
    """Timeout of a command."""
    base_image: str | None = None
    """Image used instead of a folder's base image if that is not in `m2forge image list`, such as `host`; None: such a
    folder ends the run."""
    sandbox: SandboxConfig = SandboxConfig()


class CustomConfig(Config):
    """A pipeline of the user's own, in a file or an installed module."""

    pipeline: str = Field(min_length=1)
    """FILE.py:NAME or PACKAGE.MODULE:NAME of a function that takes the table `options` and returns a `Pipeline`."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """The function's argument: any keys and values that JSON can hold."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        parse_reference(self.pipeline)
        return self


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
    """Models that stages request completions from, by the name that the pipeline's table uses."""
    questions: QuestionsConfig | None = None
    swe: SweConfig | None = None
    terminal: TerminalConfig | None = None
    distill: DistillConfig | None = None
    custom: CustomConfig | None = None

    @property
    def tables(self) -> dict[str, Config]:
        """The tables that name a pipeline, by key: one, in a valid configuration."""
        named: dict[str, Config | None] = {
            "questions": self.questions,
            "swe": self.swe,
            "terminal": self.terminal,
            "distill": self.distill,
            CUSTOM: self.custom,
        }
        return {key: table for key, table in named.items() if table is not None}

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = list(self.tables)
        if len(found) != 1:
            raise ValueError(
                f"expected one of the tables {', '.join((*PIPELINES, CUSTOM))}, received {', '.join(found) or 'none'}"
            )
        for name in self._asked():
            if name not in self.models:
                raise ValueError(f"{found[0]}: no table models.{name}; {suggest(name, self.models)}")
        return self

    def _asked(self) -> list[str]:
        """The models that the pipeline's table names."""
        if self.questions is not None:
            return [name for name in (self.questions.writer, self.questions.judge, *self.questions.teachers) if name]
        if self.terminal is not None:
            solver = self.terminal.solver
            return [name for name in (self.terminal.repair_model, None if solver is None else solver.model) if name]
        if self.swe is not None:
            repairer = self.swe.build_model
            named = (None if repairer is None else repairer.model, self.swe.writer, self.swe.judge)
            return [name for name in named if name]
        return [] if self.distill is None else [name for name in self.distill.teachers if name != SOLUTION]
