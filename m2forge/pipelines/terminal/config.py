"""The table `[terminal]` of `m2forge pipeline`: questions about the command line become task folders.

name = "terminal"

[terminal]
posts = "Posts.xml"
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.sandbox.config import SandboxConfig

Count = Annotated[int, Field(gt=0)]

TAGS = (
    *("bash", "shell", "sh", "zsh", "linux", "unix", "command-line", "terminal", "shell-script", "coreutils", "gnu"),
    *("awk", "sed", "grep", "find", "xargs", "cut", "sort", "uniq", "join", "paste", "comm", "diff", "patch", "tr"),
    *("head", "tail", "wc", "split", "tac", "rev", "fold", "fmt", "expand", "column", "seq", "date", "touch", "du"),
    *("tar", "gzip", "zcat", "zip", "chmod", "permissions", "file-permissions", "ln", "symlink", "symbolic-link"),
    *("cp", "mv", "rm", "mkdir", "rename", "files", "filenames", "directory", "directories", "directory-structure"),
    *("text-processing", "csv", "json", "log", "logs", "regex", "checksum", "base64", "perl", "git", "scripting"),
)


class SolverConfig(Config):
    """The reference solver whose pass rate decides which variant of a task is written."""

    model: str | None = None
    """A key of `models`: any policy behind an endpoint."""
    form: Literal["script", "shell"] = "script"
    """How a model works. script: one completion holds a bash script, which runs. shell: the model calls a shell in the
    sandbox of the attempt until a completion has no call."""
    max_turns: Count = 30
    """Completions of one attempt with a shell."""
    command_s: Annotated[float, Field(gt=0)] = 60.0
    """Timeout of a command in that shell."""
    max_output: Annotated[int, Field(ge=100)] = 8000
    """Characters of a command's output that the model sees, half from its beginning and half from its end."""
    command: str | None = None
    """Instead of `model`: a shell command in the sandbox of an attempt, which reads the instruction from standard
    input; M2FORGE_ATTEMPT is the number of the attempt."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.model is None) == (self.command is None):
            raise ValueError("expected one of model and command")
        given = self.model_fields_set
        if self.model is None and "form" in given:
            raise ValueError("form: of a model; leave it out with command")
        if self.form != "shell" and (unused := sorted(given & {"max_turns", "command_s", "max_output"})):
            raise ValueError(f'{unused[0]}: of a model with a shell; set form = "shell", or leave it out')
        return self


class TerminalConfig(Config):
    posts: str | None = None
    """Path of Posts.xml of a Stack Exchange dump, plain or compressed by gzip, bzip2 or xz."""
    eg: str | None = None
    """Path of the package eg from PyPI: its archive, or the folder with its examples."""
    intercode: str | None = None
    """Path of the package intercode-bench from PyPI: its wheel, or `bash_queries.json`."""
    tags: tuple[str, ...] = TAGS
    """A question of a dump needs one of these."""
    min_score: int = 3
    """Minimum score of a question of a dump."""
    min_characters: Count = 80
    """Minimum length of a question's text, the title included."""
    max_characters: Count = 6000
    """Maximum length of a question, and of its answer."""
    max_commands: Count = 12
    """Maximum number of commands of an answer."""
    hints: Annotated[int, Field(ge=0, le=3)] = 1
    """Hints of the written variant if there is no solver: 0: none, 1: formats, 2: also commands, 3: also flags."""
    repair_model: str | None = None
    """A key of `models`: the model that repairs an answer where rules fail."""
    max_repairs: Count = 2
    """Requests to `repair_model` for one question."""
    solver: SolverConfig | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 20.0
    """Time limit of an answer."""
    base_image: str = "host"
    """Image for the sandboxes in which answers and written folders are tried."""
    sandbox: SandboxConfig = SandboxConfig()

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        given = [name for name in ("posts", "eg", "intercode") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of posts, eg and intercode, received {', '.join(given) or 'none'}")
        return self
