"""README and docs/ show nothing that does not run: their Python, their commands, their links."""

import argparse
import ast
import builtins
import importlib
import json
import random
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError

from m2forge import cli
from m2forge.command_config import config_kind, config_kinds
from m2forge.config import Config, build, load, parse_overrides
from m2forge.config_class import annotations_at
from m2forge.errors import M2ForgeError
from m2forge.model.checkpoint import load_model
from m2forge.tasks.catalog import find_family
from m2forge.tasks.folders.task_toml import Provenance, parse_provenance
from tests.inference.folder import write_model
from tests.inference.scripted import script_engine

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEMO_MODEL = Path("runs/demo/rl/model")
GIVEN = {"engine", "format", "task", "workspace", "call"}
"""Names that incomplete snippets use, as the text around them explains."""
PLACEHOLDER = re.compile(r"[A-Z]+|…")
"""An argument that a reader replaces, such as CONFIG."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page: fenced, with its language, or indented by four columns, without one."""

    page: str
    line: int
    language: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.language == "python" or (not self.language and self.text.startswith(("from ", "import ")))

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def end(self) -> int:
        """The number of the last line."""
        return self.line + self.text.count("\n") - 1


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    name = str(page.relative_to(ROOT))
    language, start, lines = "", 0, list[str]()
    is_fenced = is_indented = False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("```"):
            if is_fenced:
                yield Block(name, start, language, "\n".join(lines) + "\n")
            is_fenced, language, start, lines = not is_fenced, line[3:].strip(), number + 1, []
        elif is_fenced:
            lines.append(line)
        elif line.startswith("    ") and (is_indented or not text.splitlines()[number - 2].strip()):
            start, is_indented = (start, True) if is_indented else (number, True)
            lines.append(line[4:])
        elif is_indented:
            yield Block(name, start, "", "\n".join(lines) + "\n")
            is_indented, lines = False, []
    assert not is_fenced, f"{name}:{start}: the block has no end"


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text(encoding="utf-8"))]
PYTHON = [block for block in BLOCKS if block.is_python]
"""Tests of a room run the complete programs of its page: docs/inference.md, docs/tasks.md."""


def commands_of(block: Block) -> Iterator[list[str]]:
    """The arguments of every `m2forge` command of a block, without the program's name."""
    if block.language not in ("", "console"):
        return
    for line in block.text.splitlines():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:  # a quote that a later line closes: not one of our commands
            continue
        starts = [n + 1 for n, word in enumerate(words) if word == "m2forge" or word.endswith("/bin/m2forge")]
        if starts and (starts[0] == 1 or words[starts[0] - 2] in ("-m", "|")):
            yield words[starts[0] : next((n for n, word in enumerate(words) if word in ("&", "|", ">")), None)]


COMMANDS = [(str(block), arguments) for block in BLOCKS for arguments in commands_of(block)]


def check_command(arguments: list[str]) -> None:
    """Parse a command with its own parser, and validate its configuration without running it."""
    name, *rest = arguments
    command = cli.COMMANDS[name]
    parser = argparse.ArgumentParser(prog=name, exit_on_error=False, allow_abbrev=False)
    command.add_arguments(parser)
    parsed = parser.parse_args(rest)
    files = [path for path in getattr(parsed, "config", []) if not PLACEHOLDER.fullmatch(str(path))]
    shipped = [ROOT / path for path in files if path.parts[0] == "configs"]
    for option, kind in config_kinds(name).items():
        overrides: list[str] = getattr(parsed, option.removeprefix("--").replace("-", "_"))
        check_keys(kind, overrides)
        if option == "--set" and shipped:
            load(kind, shipped, overrides)
        elif not hasattr(parsed, "config") and name != "params":
            build(kind, {}, overrides)


def check_keys(kind: type[Config], overrides: list[str]) -> None:
    for key in parse_overrides(overrides):
        path = tuple(int(part) if part.isdecimal() else part for part in key)
        assert annotations_at(kind, path), f"{'.'.join(key)}: no key of {kind.__name__}"


def unknown_names(tree: ast.Module) -> set[str]:
    """Names that a program reads and binds nowhere."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - bound - set(dir(builtins))


def parse_python(text: str) -> ast.Module:
    tree = compile(text, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    return tree


def missing_imports(tree: ast.Module) -> list[str]:
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            missing += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
    return missing


@pytest.fixture(scope="module")
def after_the_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demo seems to have run: it has the model, with random weights."""
    folder = tmp_path_factory.mktemp("clone")
    write_model(folder / DEMO_MODEL)
    return folder


def test_python_of_the_pool_prints_what_the_page_shows(tmp_path: Path) -> None:
    (block,) = (block for block in PYTHON if block.page == "docs/pool.md")
    found = subprocess.run([sys.executable, "-c", block.text], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert [other.text for other in BLOCKS if str(other) == f"docs/pool.md:{block.end + 3}"] == [found.stdout]


def test_the_agent_of_the_readme_runs(
    after_the_demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(after_the_demo)
    (block,) = (block for block in PYTHON if block.page == "README.md")
    exec(compile(block.text, "README.md", "exec"), {})
    # Random weights call no tool, and answer wrongly.
    assert re.fullmatch(
        r"Start at \d\. Follow \w+ links\. Reply to [\d ]+\. .*0\.0\n", capsys.readouterr().out, re.DOTALL
    )


def test_the_agent_of_the_readme_calls_tools(
    after_the_demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family = find_family("replies")
    task = family.draw(difficulty=2, seed=7)
    demonstration = family.demonstrate(task, random.Random(0))
    said = [message for message in demonstration if message.role == "assistant"]
    assert said[0].tool_calls
    script_engine(monkeypatch, said, family.tools(task))
    monkeypatch.chdir(after_the_demo)
    (block,) = (block for block in PYTHON if block.page == "README.md")
    exec(compile(block.text, "README.md", "exec"), {})
    assert capsys.readouterr().out == f"{task.instruction} {said[-1].content} 1.0\n"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles_and_its_imports_resolve(block: Block) -> None:
    tree = parse_python(block.text)
    assert missing_imports(tree) == []
    assert unknown_names(tree) <= GIVEN


@pytest.mark.parametrize(("place", "arguments"), COMMANDS, ids=[place for place, _ in COMMANDS])
def test_command_parses_and_its_config_is_valid(place: str, arguments: list[str]) -> None:
    check_command(arguments)


def test_the_commands_run_after_the_demo(
    after_the_demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(after_the_demo)
    (block,) = (block for block in BLOCKS if block.page == "README.md" and block.language == "console")
    for line, arguments in zip(block.text.splitlines(), commands_of(block), strict=True):
        status, printed = cli.main(arguments), capsys.readouterr()
        assert status == 0, printed.err
        assert all(figure in printed.out for figure in re.findall(r"\d+\.\d+B", line))
    assert load_model(Path("runs/bf16")).embedding.weight.dtype.itemsize == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_images_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    broken = [target for target in targets if "://" not in target and not leads_somewhere(page, target)]
    assert broken == []


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    return path.exists() and (not anchor or anchor in anchors(path.read_text(encoding="utf-8")))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_commands_in_the_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = re.findall(r"\bpython ((?:benchmarks|examples|dev)/[\w/]+\.py)", text)
    assert [script for script in scripts if not (ROOT / script).exists()] == []
    names = re.findall(r"`m2forge ([a-z]+)\b", text)
    assert [name for name in names if name not in cli.COMMANDS] == []


TOML = [block for block in BLOCKS if block.language == "toml"]


def toml_problems(text: str, before: str = "") -> list[str]:
    """What is wrong with a fragment of a configuration: for each command, in the words of its config class. Empty if
    one accepts the fragment, alone or below the fragment `before`; keys that it requires may be missing."""
    table = tomllib.loads(text)
    if "metadata" in table:
        parse_provenance(table, "task.toml")  # which ignores what it does not know
        unknown = table["metadata"]["m2forge"].keys() - Provenance.model_fields.keys()
        return [f"task.toml: {key}: unknown" for key in unknown]
    problems = []
    for command in cli.COMMANDS:
        kind = config_kind(command)
        if kind is None:
            continue
        try:
            kind.model_validate_json(json.dumps(kind.complete(table)))
        except ValidationError as error:
            if found := [details for details in error.errors() if details["type"] != "missing"]:
                problems.append(f"{command}: {found[0]['loc']}: {found[0]['msg']}")
                continue
        return []
    return toml_problems(before + text) and problems if before else problems


@pytest.mark.parametrize("number", range(len(TOML)), ids=[str(block) for block in TOML])
def test_toml_is_valid_for_a_command_or_a_task_folder(number: int) -> None:
    block, before = TOML[number], TOML[number - 1] if number else None
    assert toml_problems(block.text, before.text if before and before.page == block.page else "") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[agent]\nkind = 'command'\ncommand = ['a']\nmax_concurent = 1", "max_concurent"),
        ("[eval]\nevery = 'often'", "every"),
        ("[metadata.m2forge]\npakage = 'a'", "pakage"),
    ],
)
def test_toml_that_no_command_accepts_is_found(text: str, problem: str) -> None:
    assert any(problem in found for found in toml_problems(text))


def test_the_readme_lists_all_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (listed,) = re.findall(r"# extras: (.*)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(listed.split(", ")) == set(extras)


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)", (ROOT / "docs/index.md").read_text(encoding="utf-8")))
    assert listed == {page.name for page in PAGES if page.parent.name == "docs"} - {"index.md"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("m2forge rl configs/rl/demo.toml --set num_stps=2", "num_stps"),
        ("m2forge rl configs/rl/demo.toml --set num_steps=many", "num_steps"),
        ("m2forge rl configs/rl/absent.toml", "absent"),
        ("m2forge pretrain CONFIG --set train.machine.paralel=data", "paralel"),
        ("$ m2forge gateway FOLDER --engine-set rollout.num_block=2", "num_block"),
        ("$ m2forge serve FOLDER --prot 1", "--prot"),
        (".venv/bin/m2forge pages runs", "pages"),
        ("torchrun -m m2forge sft", "required"),
    ],
)
def test_a_command_that_would_not_run_is_found(line: str, problem: str) -> None:
    ((_, arguments),) = ((block, found) for block in [Block("x", 1, "", f"{line}\n")] for found in commands_of(block))
    with pytest.raises((M2ForgeError, AssertionError, KeyError, argparse.ArgumentError, SystemExit)) as caught:
        check_command(arguments)
    if not isinstance(caught.value, SystemExit):
        assert problem in str(caught.value)


def test_python_that_would_not_run_is_found() -> None:
    tree = parse_python("from m2forge.errors import Absent\nprint(undefined, Absent)\n")
    assert missing_imports(tree) == ["m2forge.errors.Absent"]
    assert unknown_names(tree) == {"undefined"}


def test_a_link_to_an_absent_heading_is_found() -> None:
    assert leads_somewhere(ROOT / "README.md", "docs/rl.md#deployed-agents")
    assert not leads_somewhere(ROOT / "README.md", "docs/rl.md#absent")
    assert not leads_somewhere(ROOT / "README.md", "docs/absent.md")
