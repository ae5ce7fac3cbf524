"""Fixtures: what questions show, contents of the same form, trees that tests of `find` distinguish; gates and hints."""

import json
import random
import re
import subprocess
from pathlib import Path

import pytest

from m2forge.pipelines.stage import Item
from m2forge.pipelines.terminal import fixture, pipeline, state
from m2forge.pipelines.terminal.config import TerminalConfig
from m2forge.pipelines.terminal.operand import Role, operands
from m2forge.pipelines.terminal.posts import Block, markdown, read_blocks
from m2forge.pipelines.terminal.sample_file import read_shown
from m2forge.pipelines.terminal.shell import read_commands
from m2forge.pipelines.terminal.task_folder import instructions


def request(html: str, script: str) -> fixture.Request:
    blocks, commands = read_blocks(html), read_commands(script)
    found = operands(commands, script)
    shown = read_shown(blocks, [one.path for one in found if one.role is not Role.OUTPUT])
    return fixture.Request(script, commands, found, shown, "\n".join(block.text for block in blocks))


def build(html: str, script: str, kind: int, root: Path) -> dict[str, str]:
    """The state that a fixture has, as the texts and kinds of its paths."""
    root.mkdir()
    made = fixture.build(request(html, script), kind)
    subprocess.run(["bash", "-e", "-c", made], cwd=root, check=True)
    return {path: str(entry.get("text", entry["kind"])) for path, entry in state.state(str(root)).items()}


def test_html_becomes_blocks_and_markdown() -> None:
    html = '<p>A <code>b&lt;c</code></p>\n<pre class="lang-bash x"><code>a &amp;&amp; b\n  c\n</code></pre>'
    html += "<ul><li>one</li></ul>"
    blocks = read_blocks(html)
    assert blocks == [Block("A `b<c`"), Block("a && b\n  c", True, "bash"), Block("- one")]
    assert markdown(blocks) == "A `b<c`\n\n```bash\na && b\n  c\n```\n\n- one"


def test_shown_blocks_are_inputs_expected_output_or_listings() -> None:
    html = (
        "<p>I have <code>a.csv</code>:</p><pre><code>1,x\n2,y</code></pre><p>and want</p><pre><code>x 1</code></pre>"
        "<p>My attempt</p><pre><code>cut -d, -f2 a.csv</code></pre><pre><code>cut: a.csv: No such file</code></pre>"
        "<p>In that folder are</p><pre><code>one two.pdf\nb/c.pdf</code></pre>"
    )
    shown = read_shown(read_blocks(html), ["a.csv"])
    assert shown.files == {"a.csv": "1,x\n2,y"}
    assert shown.expected == ["x 1"]
    assert shown.listing == ["one two.pdf", "b/c.pdf"]
    assert not shown.setup


def test_a_session_shows_files_and_commands_set_up() -> None:
    html = "<pre><code>$ cat a.txt\n1\n2\n$ cat b.txt\n3\n$ ls\nx</code></pre>"
    html += "<pre><code>mkdir d; echo 1 > d/a</code></pre>"
    shown = read_shown(read_blocks(html), [])
    assert shown.files == {"a.txt": "1\n2", "b.txt": "3"}
    assert shown.setup == "mkdir d; echo 1 > d/a"


def test_the_shown_fixture_is_the_sample_others_have_its_form(tmp_path: Path) -> None:
    html = "<p>My <code>users.txt</code>:</p><pre><code>3 carol\n1 alice</code></pre>"
    html += "<p>and <code>mails.txt</code></p><pre><code>1 a@b.c\n3 c@b.c</code></pre>"
    script = "join <(sort users.txt) <(sort mails.txt)"
    first, task, second = (build(html, script, kind, tmp_path / str(kind)) for kind in range(3))
    assert first == {"users.txt": "3 carol\n1 alice\n", "mails.txt": "1 a@b.c\n3 c@b.c\n"}
    assert len({json.dumps(one) for one in (first, task, second)}) == 3
    users, mails = (task[name].splitlines() for name in ("users.txt", "mails.txt"))
    assert len(users) == len(mails) == 8
    assert {line.split()[0] for line in users} == {line.split()[0] for line in mails}


def test_trees_have_what_tests_of_find_distinguish(tmp_path: Path) -> None:
    script = "find lib -xtype l; find lib -empty -name '*.tmp' -size +1k -mtime +3 -perm -2 -exec chmod o-w {} +"
    build("<p>In lib</p>", script, fixture.TASK, tmp_path / "w")

    def found(tests: str) -> set[str]:
        done = subprocess.run(f"find lib {tests}", shell=True, cwd=tmp_path / "w", capture_output=True, text=True)
        return set(done.stdout.splitlines())

    assert found("-type l") - found("-xtype l")
    for test in ("-xtype l", "-type d -empty", "-type f -size +1k", "-type f -mtime +30", "-type f -perm -0002"):
        assert found(test)
        assert found("") - found(test)
    names = found("-name '*.tmp'")
    assert len({name.count("/") for name in names}) > 1
    assert any(" " in name.rpartition("/")[2] for name in names)


def test_globs_archives_and_compressed_files_are_generated(tmp_path: Path) -> None:
    logs = build("<p>Logs <code>m.log</code>, <code>m.log.1.gz</code></p>", "zcat -f m.log*", 1, tmp_path / "a")
    assert {"m.log", "m.log.1.gz"} <= set(logs)
    assert (tmp_path / "a" / "m.log.1.gz").read_bytes()[:2] == b"\x1f\x8b"
    packed = build("<p>x</p>", "tar -xzf b.tar.gz etc/hosts", 1, tmp_path / "b")
    assert list(packed) == ["b.tar.gz"]
    listed = subprocess.run(["tar", "-tzf", "b.tar.gz"], cwd=tmp_path / "b", capture_output=True, text=True).stdout
    assert "etc/hosts\n" in listed


@pytest.mark.parametrize(
    "sample", ['[{"name": "Ana", "age": 31}]', "[web]\nport=80\n[db]\nport=5432", "<a>\n  <b>one 17</b>\n</a>"]
)
def test_structured_samples_stay_well_formed(sample: str) -> None:
    varied = fixture.vary(sample, 1, {"port"})
    assert varied != sample
    if sample.startswith("[{"):
        assert [set(one) for one in json.loads(varied)] == [{"name", "age"}] * 4
    else:
        assert re.sub(r"\w", "", varied) == re.sub(r"\w", "", sample) + "\n"
        assert re.findall(r"^\s*\[?<?\w+", varied, re.M) == re.findall(r"^\s*\[?<?\w+", sample, re.M)


def test_sorted_samples_stay_sorted() -> None:
    numbers = [int(line) for line in fixture.vary("7\n12\n105", 2, ()).split()]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 6


def test_names_match_their_pattern() -> None:
    import fnmatch

    rng = random.Random(0)
    for pattern in ("*.txt", "inv_????-??.pdf", "[a-c]*x", "*~"):
        for index in range(4):
            assert fnmatch.fnmatch(fixture.fill(pattern, rng, index), pattern)


CONFIG = TerminalConfig(posts="x")


@pytest.mark.parametrize(
    ("title", "tags", "body", "reason"),
    [
        ("sed fails", [], "Why?", "length"),
        ("Rename files", ["powershell"], "How can I do this? " * 9, "another system"),
        ("Rename files", ["bash"], "I am on OS X and want to rename files. " * 5, "another system"),
        ("What does 2>&1 mean?", ["bash"], "I see this often. " * 9, "asks for an explanation or opinion"),
        ("Rename files", ["bash"], "How can I rename files that came from Windows? " * 3, None),
    ],
)
def test_gates_refuse_by_length_system_and_form(title: str, tags: list[str], body: str, reason: str | None) -> None:
    found = pipeline.gate(title, tags, [Block(body)], CONFIG)
    assert (None if found is None else found.reason) == reason


def test_grades_follow_from_what_the_question_states() -> None:
    code = Block("1,2", True)
    goal = Block("How do I sum the columns of a.csv?")
    assert pipeline.grade("Sum", [goal, code], ["a.csv"])[0] is pipeline.Grade.EXCELLENT
    assert pipeline.grade("Sum", [goal], ["a.csv"])[0] is pipeline.Grade.GOOD
    assert pipeline.grade("Sum", [goal], ["other.csv"])[0] is pipeline.Grade.FAIR
    assert pipeline.grade("Sum", [Block("a.csv is here"), code], ["a.csv"])[0] is pipeline.Grade.POOR


def test_hints_are_removed_step_by_step() -> None:
    question = (
        "<p>I have <code>s.txt</code>. I tried <code>sort -k3 s.txt</code>, in vain. "
        "How do I get <code>id name</code> sorted? Is <code>sort -r</code> what I need?</p>"
        "<pre><code>sort -k3 s.txt</code></pre><p>Wanted:</p><pre><code>b 9\na 1</code></pre>"
    )
    data = {"title": "Sort by a column with sort", "question": question, "solution": "sort -k2,2nr --stable s.txt"}
    shown = {"inputs": ["s.txt"], "changed": {}, "prints": True, "expected": {"is_ordered": True}, "example": "z 1\n"}
    none, formats, commands, flags = instructions(Item("1", data | shown | {"example_expected": ["b 9\na 1"]}))  # type: ignore[arg-type]
    assert "b 9\na 1" not in none
    assert "b 9\na 1" in formats
    for text in (none, formats):
        assert not re.search(r"\bsort (?:-k|with)|with sort|`sort", text)
        assert "How do I get `id name` sorted? Is a command what I need?" in text
    assert "A solution uses `sort`." in commands
    assert "-k3" not in commands
    assert "sort -k3 s.txt" in flags
    assert "A solution uses `sort -k --stable`." in flags
    assert all("`s.txt`" in text and "/workspace/output.txt" in text for text in (none, formats, commands, flags))
