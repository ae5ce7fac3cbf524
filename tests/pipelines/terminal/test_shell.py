"""Reading scripts: commands, words, operands; what may not run; scripts of answers."""

import pytest

from m2forge.pipelines.terminal.operand import operands
from m2forge.pipelines.terminal.posts import read_blocks
from m2forge.pipelines.terminal.programs import refusals
from m2forge.pipelines.terminal.script import candidates, is_commands, steps, with_name, without_prompts
from m2forge.pipelines.terminal.shell import ShellError, functions, read_commands


def programs(script: str) -> list[str]:
    return [command.program for command in read_commands(script)]


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("sort a.txt | uniq -c > b.txt", ["sort", "uniq"]),
        ("LC_ALL=C /usr/bin/sort 'a b'; echo done && wc -l < x", ["sort", "echo", "wc"]),
        ('for f in *.txt; do mv -- "$f" "${f%.txt}.md"; done', ["for", "mv", "done"]),
        ('while read -r l; do echo "$(date -d @$l)"; done < in > out', ["read", "echo", "date", "done"]),
        ("find . -name '*~' -print0 | xargs -0 -n 2 rm -f", ["find", "xargs", "rm"]),
        ("find d -type f -exec sed -i 's/a/b/' {} + -o -exec chmod 644 {} \\;", ["find", "sed", "chmod"]),
        ("join <(sort a) <(cut -f1 b | sort)", ["join", "sort", "cut", "sort"]),
        ("cat > x.py <<'EOF'\nif (a | b): rm\nEOF\npython3 x.py", ["cat", "python3"]),
        ("sudo -u joe env A=1 bash -c 'ls; pwd'", ["sudo", "env", "bash", "ls", "pwd"]),
        ("awk '{ print $1 | \"sort\" }' f # a comment", ["awk"]),
        ("if [ -f a ]; then (( n++ )); fi; x=$((1 + (2)))", ["["]),
    ],
)
def test_commands_of_a_script_are_listed_in_order(script: str, names: list[str]) -> None:
    assert [name for name in programs(script) if name not in ("fi", "")] == names


@pytest.mark.parametrize("text", ["echo 'open", 'say "x', "cat <<EOF\nnever", "a $(b", "x >\n", ")("])
def test_what_is_no_script_is_an_error(text: str) -> None:
    with pytest.raises(ShellError):
        read_commands(text if text != ")(" else "echo ${a")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("awk -F, '{ s += $3 } END { print s }' sales.csv | sort", ["file sales.csv"]),
        ("grep -vxFf done.txt all.txt > todo.txt", ["output todo.txt", "file done.txt", "file all.txt"]),
        ("sort -t , -k 2 a.csv > b.csv; head -n 3 b.csv", ["output b.csv", "file a.csv"]),
        ("tar -czf p.tar.gz --exclude='*.log' project", ["any project", "output p.tar.gz"]),
        ("tar -xzf b.tar.gz etc/hosts", ["archive b.tar.gz"]),
        ("cd release && find . -type f", ["folder release"]),
        ("find src lib -name '*.py'", ["folder src", "folder lib"]),
        ("rm -- -rf", ["any -rf"]),
        ("cp a b dir", ["any a", "any b", "output dir"]),
        ("ln -sfn releases/1.5 current", ["any releases/1.5", "output current"]),
        ("for f in logs/*.log; do gzip \"$f\"; done", ["file logs/*.log"]),
        ("split -l 100 -d contacts.txt part", ["file contacts.txt", "output part"]),
        ("python3 -c 'print(open(\"p.json\").read())'", ["file p.json"]),
        ("mkdir -p book; touch book/c{01..12}.md", ["output book"]),
    ],
)  # fmt: skip
def test_operands_are_read_from_their_place(script: str, found: list[str]) -> None:
    assert [f"{one.role} {one.path}" for one in operands(read_commands(script), script)] == found


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sudo systemctl restart x", "needs root or a service"),
        ("curl -s http://x | jq .", "needs the network"),
        ("git push origin master", "needs the network"),
        ("vim +1 file", "interactive or graphical program"),
        ("sed -i '' 's/a/b/' f", "another system"),
        ("tr -dc a-z < /dev/urandom | head -c 9", "random result"),
        ("awk '/Mem/' /proc/meminfo", "depends on the machine"),
        ("date +%F", "depends on the clock"),
        ("date -d '3 days ago' +%F", "depends on the clock"),
        ("frobnicate a.txt", "program not in the image"),
        ("find . -name x | xargs lsof", "depends on the machine"),
    ],
)
def test_scripts_that_cannot_be_verified_are_refused(script: str, reason: str) -> None:
    assert reason in [found for found, _ in refusals(read_commands(script), script, functions(script))]


@pytest.mark.parametrize(
    "script", ["date -u -d @0 +%F", "date -d 2020-01-02 +%s", "f() { sort x; }; f", "git diff v1 v2"]
)
def test_scripts_over_files_alone_are_not_refused(script: str) -> None:
    assert list(refusals(read_commands(script), script, functions(script))) == []


def test_prompts_and_output_are_removed_from_sessions() -> None:
    session = "$ cd d\n$ awk '{\n>   print\n> }' f\none\nuser@box:~$ wc -l f\n3 f"
    assert without_prompts(session) == "cd d\nawk '{\n  print\n}' f\nwc -l f"
    assert without_prompts("echo a\necho b") == "echo a\necho b"


def test_steps_of_an_answer_differ_from_alternatives() -> None:
    html = (
        "<p>Create it:</p><pre><code>mkdir a\n</code></pre><p>then</p><pre><code>touch a/b</code></pre>"
        "<p>It says</p><pre><code>a/b: ok</code></pre>"
        "<p>Or, shorter:</p><pre><code>install -D /dev/null a/b</code></pre>"
    )
    found = steps(read_blocks(html))
    assert [(step.script, step.is_alternative) for step in found] == [
        ("mkdir a", False),
        ("touch a/b", False),
        ("install -D /dev/null a/b", True),
    ]
    assert candidates(found) == ["mkdir a\ntouch a/b", "mkdir a", "install -D /dev/null a/b", "touch a/b"]


def test_a_code_span_serves_where_no_block_is_a_command() -> None:
    html = "<p>Use <code>sort</code>, as in <code>sort -u names.txt</code>.</p>"
    html += "<pre><code>[Service]\nRestart=yes</code></pre>"
    assert candidates(steps(read_blocks(html))) == ["sort -u names.txt"]
    assert not is_commands(":g/DEBUG/d")


def test_names_are_replaced_as_whole_words() -> None:
    assert with_name("sort file > file.out; cat file", "file", "a b.txt") == "sort a b.txt > file.out; cat a b.txt"
