"""Completion of commands, options, files and config keys, and the bash script that asks for it."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m2forge import cli
from m2forge import shell_completion as completion
from m2forge.command_config import config_kinds
from m2forge.shell_completion import script

ROOT = Path(__file__).parent.parent
NUM_TRIES = 3
CONFIG = """
[[phases]]
steps = 1
[[phases]]
steps = 2
"""
CURRICULUM = """
[[curriculum.stages]]
[curriculum.stages.domains.agent]
"""


def complete(words: list[str]) -> list[str]:
    return completion.complete(words, {name: command.add_arguments for name, command in cli.COMMANDS.items()})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["para"], ["params"]),
        (["pr"], ["presets", "pretrain"]),
        (["--v"], ["--version"]),
        (["zebra", ""], []),
        (["rl", "--r"], ["--runs"]),
        (["rl", "--he"], ["--help"]),
        (["completion", ""], ["bash", "zsh"]),
        (["gateway", "x", "--engine", "s"], ["sglang"]),
        (["params", "m2-"], ["m2-mini", "m2-nano", "m2-tiny"]),
        (["rl", "--set", "train.opt"], ["train.optimizer."]),
        (["rl", "--set", "train.optimizer.muon_m"], ["train.optimizer.muon_momentum="]),
        (["rl", "--set", "train.optimizer.kind="], ["train.optimizer.kind=adamw", "train.optimizer.kind=muon"]),
        (["rl", "--set", "train.optimizer.kind=m"], ["train.optimizer.kind=muon"]),
        (["rl", "--set", "reward.shuffled="], ["reward.shuffled=false", "reward.shuffled=true"]),
        (["rl", "--set", "num_steps="], []),
        (["eval", "--set", "suites.0.num_hops"], ["suites.0.num_hops="]),
        (["eval", "--set", "suites."], ["suites.0."]),
        (["rl", "--set", "curriculum.stages.0.domains."], []),
        (["gateway", "x", "--engine-set", "rollout.stale_cache=k"], ["rollout.stale_cache=keep"]),
        (["params", "m2", "--set", "moe.scoring="], ["moe.scoring=sigmoid", "moe.scoring=softmax"]),
    ],
)  # fmt: skip
def test_the_last_word_is_completed(words: list[str], expected: list[str]) -> None:
    assert complete(words) == expected


def test_files_are_offered_where_a_command_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("run.toml", "notes.txt", ".hidden.toml"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.toml").touch()
    assert complete(["rl", ""]) == ["folder/", "run.toml"]
    assert complete(["rl", "run.toml", "folder/"]) == ["folder/b.toml"]
    assert complete(["rl", "~/fo"]) == ["~/folder/"]
    assert complete(["rl", f"{tmp_path}/."]) == [f"{tmp_path}/.hidden.toml"]
    assert complete(["rl", "none/"]) == []
    assert complete(["export", "n"]) == ["notes.txt"]


def test_lists_and_mappings_of_the_files_give_their_parts(tmp_path: Path) -> None:
    config, curriculum = tmp_path / "a.toml", tmp_path / "b.toml"
    config.write_text(CONFIG)
    curriculum.write_text(CURRICULUM)
    assert complete(["pretrain", str(config), "--set", "phases."]) == ["phases.0.", "phases.1."]
    assert complete(["rl", str(curriculum), "--set", "curriculum.stages.0.domains."]) == [
        "curriculum.stages.0.domains.agent."
    ]
    config.write_text("[[[")
    assert complete(["pretrain", str(config), "--set", "phases."]) == ["phases.0."]


def test_every_option_that_sets_keys_has_a_config_class() -> None:
    for name in cli.COMMANDS:
        options = {option for option in ("--set", "--engine-set", "--sampling") if option in complete([name, "--"])}
        assert set(config_kinds(name)) == options, name


def cpu_s(*command: str) -> tuple[float, str]:
    """Shortest CPU time of three runs, and their output: other processes lengthen the wait, and now and then this."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(seconds), done.stdout


def test_an_answer_takes_half_a_second_and_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from m2forge import cli; sys.exit(cli.main())"
    for _ in range(NUM_TRIES):
        seconds, answer = cpu_s("-c", program, "__complete", "rl", "--set", "agent.")
        assert "agent.timeout_s=" in answer.splitlines()
        # Slower where the libraries alone take longer: a full machine's caches are not ours.
        libraries_s, _ = cpu_s("-c", "import numpy, pydantic, typer")
        if seconds < max(0.6, 2.5 * libraries_s):
            return
    pytest.fail(f"{seconds:.2f} s of CPU time, the libraries alone {libraries_s:.2f} s")


def ask_bash(folder: Path, *lines: str) -> list[list[str]]:
    """What the script puts into COMPREPLY for each command line, with the cursor at its end."""
    command = folder / "m2forge"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m m2forge "$@"\n')
    command.chmod(0o700)
    (folder / "script").write_text(script("bash"))
    program = f'source "{folder}/script"\nwhile IFS= read -r COMP_LINE; do COMP_POINT=${{#COMP_LINE}}; _m2forge; '
    program += 'printf "%s\\n" "${COMPREPLY[@]}"; echo .; done'
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        input="".join(f"{line}\n" for line in lines),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answers: list[list[str]] = [[]]
    for line in done.stdout.splitlines():
        if line == ".":
            answers.append([])
        elif line:
            answers[-1].append(line)
    return answers[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    lines = [
        "m2forge pr",
        "m2forge completion ",
        "m2forge rl configs/rl/d",
        "m2forge rl configs/rl/demo.toml --set train.optimizer.k",
        # Bash splits words at =, and so replaces only what follows it.
        "m2forge rl configs/rl/demo.toml --set train.optimizer.kind=",
        "m2forge rl configs/rl/demo.toml --set train.optimizer.kind=m",
        "m2forge zebra ",
    ]
    assert ask_bash(tmp_path, *lines) == [
        ["presets", "pretrain"],
        ["bash", "zsh"],
        ["configs/rl/demo-terminal.toml", "configs/rl/demo.toml"],
        ["train.optimizer.kind="],
        ["adamw", "muon"],
        ["muon"],
        [],
    ]


def test_the_scripts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in cli.SHELLS:
        assert cli.main(["completion", shell]) == 0
        out = capsys.readouterr().out
        assert out == script(shell)
        assert '"${words[' in out
        assert "__complete" in out


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_accepts_its_script() -> None:
    done = subprocess.run(["zsh", "-n"], input=script("zsh"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
