"""Task folders in the terminal: folders and findings in, text out; `to_dict` is the same as JSON."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from m2forge.records import JsonValue
from m2forge.tasks.folders.folder import FileKind, Rejected, TaskFolder, unsupported, walk
from m2forge.tasks.folders.lint import Finding
from m2forge.tasks.folders.task_toml import Step

MAX_SHOWN_LINES = 40
"""Lines of a script or Dockerfile that are shown."""
MAX_SHOWN_FILES = 200


def to_dict(folder: TaskFolder) -> dict[str, JsonValue]:
    return {
        "name": folder.name,
        "path": str(folder.path),
        "digest": folder.digest(),
        "domain": folder.provenance.domain,
        "source": folder.provenance.source,
        "package": folder.provenance.package,
        "config": folder.config.model_dump(mode="json"),
        "steps": [step.name for step in folder.steps],
        "instructions": [folder.instruction(step) for step in folder.steps or (None,)],
        "files": {name: _size(folder.path / name, kind) for name, kind in walk(folder.path)},
        "unsupported": unsupported(folder),
    }


def print_folder(folder: TaskFolder, console: Console) -> None:
    """Configuration, files, instructions and scripts of one folder."""
    console.print(Text(folder.name, style="bold"), Text(str(folder.path), style="dim"))
    console.print(_settings(folder))
    console.print(_tree(folder.path))
    for step in folder.steps or (None,):
        title = INSTRUCTION if step is None else f"step {step.name}: {INSTRUCTION}"
        console.print(Panel(Markdown(folder.instruction(step)), title=title, title_align="left"))
        console.print(Group(*_scripts(folder, step)))


INSTRUCTION = "instruction"


def _settings(folder: TaskFolder) -> Table:
    config, origin = folder.config, folder.provenance
    environment = config.environment
    limits = {"cpus": environment.cpus, "memory MB": environment.memory_mb, "storage MB": environment.storage_mb}
    rows = {
        "schema": config.schema_version,
        "source": " ".join(filter(None, (origin.source, origin.package, origin.domain, origin.split)))
        or "not recorded",
        "image": environment.docker_image or _base(folder),
        "network": str(environment.network),
        "limits": ", ".join(f"{value:g} {name}" for name, value in limits.items() if value is not None) or "none",
        "agent": f"user {_shown(config.agent.user)}, {_seconds(config.agent.timeout_sec)}",
        "verifier": f"{config.mode()}, user {_shown(config.verifier.user)}, {_seconds(config.verifier.timeout_sec)}",
        "artifacts": ", ".join(artifact.source for artifact in config.artifacts_of()) or "none",
        "solution": "yes" if all(folder.solution(step) for step in folder.steps or (None,)) else "no",
    }
    if folder.steps:
        rows["steps"] = (
            f"{', '.join(step.name for step in folder.steps)}; {config.multi_step_reward_strategy or 'mean'}"
        )
    if missing := unsupported(folder):
        rows["cannot run"] = ", ".join(missing)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name, style="cyan"), Text(value))
    return table


def _base(folder: TaskFolder) -> str:
    """The first FROM of the Dockerfile."""
    text = folder.dockerfile.read_text(encoding="utf-8", errors="replace") if folder.dockerfile is not None else ""
    froms = [line.split()[1] for line in text.splitlines() if line.upper().startswith("FROM ") and line.split()[1:]]
    return f"environment/Dockerfile, from {froms[0]}" if froms else "none"


def _shown(user: str | int | None) -> str:
    return "of the image" if user is None else str(user)


def _seconds(timeout_s: float | None) -> str:
    return "no time limit" if timeout_s is None else f"{timeout_s:g} s"


def _tree(root: Path) -> Tree:
    tree, branches = Tree(f"{root.name}/"), dict[str, Tree]()
    names = sorted(walk(root))
    for name, kind in names[:MAX_SHOWN_FILES]:
        branch, prefix = tree, ""
        *folders, base = name.split("/")
        for part in folders:
            prefix += f"{part}/"
            branch = branches[prefix] if prefix in branches else branches.setdefault(prefix, branch.add(f"{part}/"))
        mark = {FileKind.EXECUTABLE: "*", FileKind.LINK: " → " + _target(root / name), FileKind.FOLDER: "/"}.get(
            kind, ""
        )
        branch.add(Text.assemble(base + mark, (f"  {_size(root / name, kind):,} B", "dim")))
    if len(names) > MAX_SHOWN_FILES:
        tree.add(f"… and {len(names) - MAX_SHOWN_FILES} more files")
    return tree


def _target(path: Path) -> str:
    return str(path.readlink()) if path.is_symlink() else ""


def _size(path: Path, kind: FileKind) -> int:
    return 0 if kind is FileKind.FOLDER else path.lstat().st_size


def _scripts(folder: TaskFolder, step: Step | None) -> Iterator[RenderableType]:
    for path in (folder.dockerfile if step in (None, *folder.steps[:1]) else None, folder.test_script(step)):
        if path is None:
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        rest = [f"… and {len(lines) - MAX_SHOWN_LINES} more lines"] if len(lines) > MAX_SHOWN_LINES else []
        lexer = "docker" if path.name == "Dockerfile" else "bash"
        code = Syntax("\n".join([*lines[:MAX_SHOWN_LINES], *rest]), lexer, background_color="default")
        yield Panel(code, title=str(path.relative_to(folder.path)), title_align="left")


def print_findings(paths: Sequence[Path], findings: Sequence[Finding], console: Console) -> None:
    for finding in findings:
        console.print(str(finding), markup=False, highlight=False, soft_wrap=True)
    folders = "folder" if len(paths) == 1 else "folders"
    console.print(f"{len(paths)} {folders}, {len(findings)} findings")


def print_folders(folders: Sequence[TaskFolder], rejected: Sequence[Rejected], console: Console) -> None:
    """One line for each folder, and why others cannot be used."""
    table = Table("task", "domain", "source", "verifier", "steps", "instruction")
    for folder in folders:
        first = folder.instruction(folder.steps[0] if folder.steps else None).strip().splitlines()[0]
        table.add_row(
            Text(folder.name),
            str(folder.provenance.domain or "–"),
            Text(folder.provenance.package or folder.provenance.source or "–"),
            str(folder.config.mode(folder.steps[0] if folder.steps else None)),
            str(len(folder.steps) or 1),
            Text(first[:60]),
        )
    console.print(table)
    for item in rejected:
        console.print(f"rejected: {item.problem}", markup=False, highlight=False, soft_wrap=True)
