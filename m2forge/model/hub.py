"""Hub ids: `OWNER/NAME` in, the model's folder in huggingface_hub's cache out.

A path that exists is taken as it is. Any other name of the form OWNER/NAME is a model of the hub (`HF_ENDPOINT`, by
default https://huggingface.co), which huggingface_hub fetches with a progress bar into its own cache (`HF_HOME`), as
the user that `HF_TOKEN` names. Only the files that the caller needs are fetched, the weights last.

`pinned` resolves a branch or tag to a commit and puts it into a run's config. So all processes of the run read the same
weights, also when it resumes, and a commit that is in the cache needs no network.
"""

import logging
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

from m2forge.errors import CheckpointError, ConfigError, NotFoundError
from m2forge.model.config_file import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, weight_map

HubParts = Literal["config", "tokenizer", "all"]
"""config: config.json alone; tokenizer: all but the weights."""
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
TEXT_FILES = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
"""Patterns of the files beside the weights that are part of a model."""
EXAMPLE = "Qwen/Qwen3-0.6B"

_log = logging.getLogger(__name__)


class NamesModel(Protocol):
    """A config whose model may be a hub id."""

    @property
    def model(self) -> str: ...

    @property
    def revision(self) -> str | None: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self: ...


NamesModelT = TypeVar("NamesModelT", bound=NamesModel)


def is_hub_id(model: str) -> bool:
    """Whether `model` can only be a hub id: no such path exists, and it has the form of one."""
    return HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def refuse_revision(model: str, revision: str | None) -> None:
    """Raise if there is a revision, because `model` is a path or a preset."""
    if revision is not None:
        raise ConfigError(f"revision {revision!r}: {model} is not a hub model, which alone has revisions; leave it out")


def pinned(config: NamesModelT, resolved: Path | None = None) -> NamesModelT:
    """`config` with the commit of its hub model as its `revision`. `resolved`: where a run writes its config; a run
    that was started with the same model stays at its commit, unless `config` names a revision."""
    if not is_hub_id(config.model):
        return config
    revision = config.revision
    if revision is None and resolved is not None and resolved.is_file():
        written = tomllib.loads(resolved.read_text(encoding="utf-8"))
        revision = written.get("revision") if written.get("model") == config.model else None
    return config.model_copy(update={"revision": _Hub(config.model).resolve(revision)})


def find_model(model: str, revision: str | None = None, parts: HubParts = "all") -> Path:
    """The path that `model` names, or the folder of the hub model, fetched at `revision` (a branch, tag or commit;
    None: its main branch). The folder holds `parts` at least."""
    path = Path(model)
    if path.exists():
        refuse_revision(model, revision)
        return path
    if not is_hub_id(model):
        raise NotFoundError(
            f"model {model!r} is not a folder that exists, nor a hub id; give a folder that `m2forge pretrain`, `sft` "
            f"or `import` wrote, or OWNER/NAME, such as {EXAMPLE}"
        )
    return _Hub(model).fetch(revision, parts)


def find_folder(model: str, revision: str | None = None, parts: HubParts = "all") -> Path:
    """As `find_model`, where a file, such as a GGUF file, cannot be used."""
    path = find_model(model, revision, parts)
    if not path.is_dir():
        raise NotFoundError(
            f"model {model!r} is not a folder; `m2forge import {model} FOLDER` makes one of a GGUF file"
        )
    return path


class _Hub:
    """One model of the hub."""

    def __init__(self, id: str) -> None:
        self.id = id

    def resolve(self, revision: str | None) -> str:
        """The commit of a revision."""
        with self._explained(revision):
            from huggingface_hub import HfApi

            return HfApi().resolve_revision(self.id, revision=revision).resolved

    def fetch(self, revision: str | None, parts: HubParts) -> Path:
        commit = self.resolve(revision)
        folder = self._download(commit, (CONFIG_FILE,) if parts == "config" else TEXT_FILES)
        if parts != "all":
            return folder
        is_split = (folder / INDEX_FILE).exists()
        names = sorted(set(weight_map(folder).values())) if is_split else [WEIGHTS_FILE]
        if not all((folder / name).exists() for name in names):
            _log.info("fetching the weights of %s at commit %s from the hub", self.id, commit)
        folder = self._download(commit, names)
        if not is_split and not (folder / WEIGHTS_FILE).exists():
            raise CheckpointError(
                f"model {self.id!r} of the hub holds neither {WEIGHTS_FILE} nor {INDEX_FILE} at commit {commit}; give "
                "a model with safetensors, or convert it first"
            )
        return folder

    def _download(self, commit: str, patterns: Sequence[str]) -> Path:
        """Fetch the files that match and are not in the cache. Folders inside the model's are left out: they hold the
        same model for other programs."""
        with self._explained(commit):
            from huggingface_hub import snapshot_download

            return Path(
                snapshot_download(self.id, revision=commit, allow_patterns=list(patterns), ignore_patterns=["*/*"])
            )

    @contextmanager
    def _explained(self, revision: str | None) -> Iterator[None]:
        """Turns every failure of the hub into one error that names the model and the hub."""
        try:
            yield
        except ModuleNotFoundError as error:
            raise NotFoundError(
                f"model {self.id!r}: no such folder here, and hub ids need {error.name}, which is not installed; run: "
                "pip install huggingface_hub, or give a folder"
            ) from error
        except Exception as error:
            problem = _problem(error)
            if problem is None:
                raise
            from huggingface_hub.constants import ENDPOINT

            at = "" if revision is None else f" (revision {revision!r})"
            raise NotFoundError(
                f"model {self.id!r}{at}: no such folder here, and the hub {ENDPOINT} {problem}; or give a folder"
            ) from error


def _problem(error: Exception) -> str | None:
    """What the hub did and what to do; None if the error is none of the hub's."""
    from httpx2 import TransportError
    from huggingface_hub import constants, errors

    match error:
        case errors.GatedRepoError():
            return "does not give it to this user; accept its terms there and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "has no model of this name, or a private one; correct it, or set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return "does not have this revision; give a branch, a tag or a commit"
        case errors.HFValidationError():
            return f"has no such names: {_first_line(error)}"
        case errors.HfHubHTTPError():
            return f"answered {_first_line(error)}; try again later"
        case errors.LocalEntryNotFoundError() | errors.RevisionResolutionError() | TransportError():
            reason = _first_line(error.__cause__ or error)
            cache = f"a model that was fetched stays in {constants.HF_HUB_CACHE}"
            return f"cannot be reached ({reason}); connect to the network and try again ({cache})"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
