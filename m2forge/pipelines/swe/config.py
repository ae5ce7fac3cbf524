"""The table `swe` of a pipeline's configuration: where candidates come from, and how their tests run.

[swe]
sdists = ["toolz 1.1.0 1.2.0"]
injected = ["toolz 1.2.0"]

[[swe.repositories]]
path = "clones/toolz"
package = "toolz"
"""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from m2forge.config import Config
from m2forge.sandbox.config import SandboxConfig

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Pair = Annotated[str, StringConstraints(pattern=r"^\S+ \S+ \S+$")]
Pinned = Annotated[str, StringConstraints(pattern=r"^\S+ \S+$")]
RouteName = Literal["bug", "feature", "perf", "test", "refactor"]
Transform = Literal["test", "review"]


class RepositoryConfig(Config):
    path: str = Field(min_length=1)
    """A local git clone."""
    package: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The project's name, by which its tasks are held out together."""
    num_commits: Count = 300
    """The newest commits of the checked-out branch that become candidates."""
    num_merged: Annotated[int, Field(gt=0, le=8)] = 1
    """Adjacent commits that are merged into one candidate."""
    pull_requests: str | None = None
    """A file of pull requests, JSON Lines or arrays: records of GitHub's REST API, or objects with base_commit,
    merge_commit, title, body and issues. Merged ones become the candidates instead of commits."""
    issues: str | None = None
    """A file of issues of GitHub's REST API. Those that a pull request closes ("fixes #12") become its statement."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.issues is not None and self.pull_requests is None:
            raise ValueError("swe.repositories.issues: belongs to pull requests; set pull_requests too")
        return self


class BuildModelConfig(Config):
    """The model that repairs environments which rules could not build, by one action a round: requirements and
    variables in Python and Node, variables in other languages."""

    model: str = Field(min_length=1)
    """A key of `models`."""
    max_rounds: Annotated[int, Field(gt=0, le=16)] = 4
    """Actions for one candidate."""
    max_tokens: Count = 40_000
    """Tokens of prompts and completions for one candidate; no round begins above it."""


class SweConfig(Config):
    """Releases, commits and pull requests become verified task folders: `m2forge/pipelines/swe/pipeline.py`."""

    sdists: tuple[Pair, ...] = ()
    """Consecutive releases with an sdist: "PACKAGE OLD NEW"."""
    index: str = Field(default="https://pypi.org/simple", pattern=r"^https?://")
    """The package index that lists the sdists. Wheels come from the index that pip is configured for."""
    repositories: tuple[RepositoryConfig, ...] = ()
    debian: tuple[tuple[str, str], ...] = ()
    """Pairs of .dsc files with their archives beside them, or of upstream archives (.orig.tar), the older one first."""
    injected: tuple[Pinned, ...] = ()
    """Releases with an sdist into which bugs are injected: "PACKAGE VERSION"."""
    injected_paths: tuple[str, ...] = ()
    """Local releases into which bugs are injected: folders or source archives, named PACKAGE-VERSION or
    PACKAGE_VERSION."""
    num_bugs: Count = 20
    """Number of bugs per release."""
    routes: Annotated[tuple[RouteName, ...], Field(min_length=1)] = ("bug", "feature", "perf", "test", "refactor")
    """The kinds of tasks to make; candidates of other kinds are rejected."""
    transforms: tuple[Transform, ...] = ()
    """More tasks of the same bugs and features. test: write tests that find the bug or the lack. review: find the fault
    in a change, which half of the changes have."""
    base_image: str = "host"
    """The image in which tests run, in place of the Dockerfile's base: a name of `m2forge image list`, or `host`. It
    needs python3 and git."""
    test_timeout_s: Seconds = 300.0
    """Limit of one run of a project's tests."""
    build_model: BuildModelConfig | None = None
    """None: a candidate whose environment rules cannot build is rejected."""
    writer: str | None = None
    """A key of `models`: rewrites statements; None: the statements by rule stay."""
    judge: str | None = None
    """A key of `models`: judges statements against hidden tests; None: no judge."""
    sandbox: SandboxConfig = SandboxConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.sdists or self.repositories or self.debian or self.injected or self.injected_paths):
            raise ValueError("swe: no candidates; set sdists, repositories, debian, injected or injected_paths")
        for key, names in (("routes", self.routes), ("transforms", self.transforms)):
            if len(set(names)) < len(names):
                raise ValueError(f"swe.{key}: expected each once, received {', '.join(names)}")
        if self.sandbox.backend == "process":
            raise ValueError('swe.sandbox.backend: tests of foreign projects must be confined; set "namespace"')
        return self
