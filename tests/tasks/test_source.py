"""Sources of families: each form is parsed without an import, and users' modules are refused in one message."""

from pathlib import Path

import pytest

from m2forge.config import build, load_resolved
from m2forge.errors import ConfigError, M2ForgeError, NotFoundError
from m2forge.records import Domain, Submission
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import FamilyConfig
from m2forge.tasks.source import Source, SourceKind, family_key, located, parse_source
from m2forge.tasks.user_code import load_object

FAMILY = """
from dataclasses import dataclass
from m2forge import Family, Verdict
from m2forge.tasks.family import make_task

class Doubles(Family):
    name, domain, levels = "doubles", "reasoning", range(1, 3)

    def draw(self, difficulty, seed):
        number = seed % 10 ** difficulty
        return make_task(self, difficulty, f"Double {number}.", {"number": number})

    def verify(self, task, submission):
        return Verdict(float(submission.answer == str(2 * task.metadata["number"])))

class Bare:
    name = "bare"

class Raising(Family):
    def __init__(self):
        raise KeyError("no data")

class NoLevels(Family):
    name, domain, levels = "x", "reasoning", range(0)

class NoDomain(Family):
    name, domain, levels = "x", "cooking", range(2)

ready = Doubles()
"""


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("chain", Source(SourceKind.EMBEDDED, "chain")),
        ("my_tasks.py:Stack", Source(SourceKind.FILE, "my_tasks.py", "Stack")),
        ("a.b:Stack", Source(SourceKind.MODULE, "a.b", "Stack")),
        ("data/t.jsonl", Source(SourceKind.JSONL, "data/t.jsonl")),
        ("t.jsonl#coding", Source(SourceKind.JSONL, "t.jsonl", domain=Domain.CODING)),
        ("reasoning-gym:gcd", Source(SourceKind.GYM, "gcd")),
        ("verifiers:wordle", Source(SourceKind.VERIFIERS, "wordle")),
        ("folders:data/set", Source(SourceKind.FOLDERS, "data/set")),
        ("folders:data/set#coding", Source(SourceKind.FOLDERS, "data/set", domain=Domain.CODING)),
    ],
)
def test_every_form_of_a_source_is_parsed(text: str, source: Source) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("folders:", "expected a name after 'folders:'"),
        ("my_tasks.py", "expected the family's name after the file"),
        ("my_tasks.py:", "expected FILE.py:NAME"),
        ("tasks/my tasks:x", "expected FILE.py:NAME or PACKAGE.MODULE:NAME"),
        ("reasoning-gym:", "expected a name after"),
        ("a b", "expected a family's name, FILE.py:NAME"),
    ],
)
def test_what_is_no_source_is_refused_in_the_config(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(FamilyConfig, {"source": text})


def test_the_former_key_is_refused_but_resumes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name: unknown key, value 'chain'; this key is now 'source'"):
        build(FamilyConfig, {"name": "chain"})
    (tmp_path / "config.toml").write_text('name = "chain"\ndifficulty = [1, 2]\n')
    assert load_resolved(FamilyConfig, tmp_path / "config.toml") == FamilyConfig(source="chain", difficulty=(1, 2))


def test_paths_are_located_and_keys_keep_their_domain(tmp_path: Path) -> None:
    assert family_key("t.jsonl", Domain.CODING) == "t.jsonl#coding"
    assert family_key("chain", Domain.AGENT) == "chain"
    assert located("t.jsonl#coding", tmp_path) == f"{tmp_path}/t.jsonl#coding"
    assert located("my_tasks.py:Stack", tmp_path) == f"{tmp_path}/my_tasks.py:Stack"
    assert located("a.b:Stack", tmp_path) == "a.b:Stack"


@pytest.mark.parametrize("name", ["Doubles", "ready"])
def test_a_family_comes_from_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "my_tasks.py").write_text(FAMILY)
    family = find_family(f"{tmp_path}/my_tasks.py:{name}")
    task = family.draw(2, 1234)
    assert (family.name, family.domain, task.instruction) == ("doubles", Domain.REASONING, "Double 34.")
    assert family.verify(task, Submission("68")).perf == 1
    assert (family.tools(task), family.latency_s(task, "x")) == ((), 0.0)


def test_an_embedded_family_comes_by_the_same_door() -> None:
    assert find_family("m2forge.tasks.agent:Chain") == find_family("chain")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Doubled", "it has no 'Doubled'; did you mean 'Doubles'"),
        ("Bare", "a family without domain, levels, draw, verify, tools, call, latency_s, demonstrate; derive it from"),
        ("Raising", "Raising\\(\\) raised KeyError: 'no data'"),
        ("NoLevels", "levels: expected a range such as range\\(1, 4\\), received range\\(0, 0\\)"),
        ("NoDomain", "expected text and one of reasoning, coding, agent, general, received 'x' and 'cooking'"),
    ],
)
def test_what_is_no_family_is_refused_by_name(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "my_tasks.py").write_text(FAMILY)
    with pytest.raises(M2ForgeError, match=problem):
        find_family(f"{tmp_path}/my_tasks.py:{name}")


@pytest.mark.parametrize("code", ["raise ValueError('no licence')", "import sys; sys.exit('no licence')"])
def test_a_module_that_raises_at_import_is_refused(tmp_path: Path, code: str) -> None:
    (tmp_path / "my_tasks.py").write_text(f"x = 1\n{code}\n")
    with pytest.raises(ConfigError, match=r"my_tasks.py: raised at import:\n(.|\n)*line 2(.|\n)*no licence"):
        load_object(f"{tmp_path}/my_tasks.py:Stack")


@pytest.mark.parametrize(
    "text", ["no_such_package.tasks:Stack", "m2forge.no_such_module:Stack", "/no/my_tasks.py:Stack"]
)
def test_a_module_that_is_not_there_is_refused(text: str) -> None:
    with pytest.raises(NotFoundError, match="no such"):
        load_object(text)
