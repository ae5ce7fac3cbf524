"""The command line: exit statuses, and errors in one place."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from m2forge import __version__, cli
from m2forge.errors import ConfigError

ROOT = Path(__file__).parent.parent


def replace_presets(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(args: object) -> None:
        raise error

    command = cli.Command("fails", cli.COMMANDS["presets"].add_arguments, fail)
    monkeypatch.setitem(cli.COMMANDS, "presets", command)


def test_version_and_help_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"m2forge {__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(command.summary in out for command in cli.COMMANDS.values())


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    assert cli.COMMANDS[name].summary in capsys.readouterr().out


def test_unknown_command_suggests_the_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["parms", "m2"]) == 2
    assert capsys.readouterr().err == "m2forge: error: unknown command 'parms'; did you mean 'params'?\n"
    assert cli.main(["zebra"]) == 2
    assert f"known: {', '.join(sorted(cli.COMMANDS))}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["params"], ["params", "m2", "--lay", "4"], ["import", "a", "b", "--dtype", "int8"]]
)
def test_wrong_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    assert "error:" in capsys.readouterr().err


def test_bad_input_is_one_message_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_presets(monkeypatch, ConfigError("a.toml: steps: missing"))
    assert cli.main(["presets"]) == 2
    assert capsys.readouterr().err == "m2forge: error: a.toml: steps: missing\n"


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_presets(monkeypatch, KeyboardInterrupt())
    assert cli.main(["presets"]) == 130
    assert capsys.readouterr().err == "m2forge: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_presets(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["presets"])


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_shard_size_must_be_a_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "a", "b", f"--max-shard-gb={size}"]) == 2
    assert "expected a finite size above 0" in capsys.readouterr().err


def test_files_stack_and_an_error_names_the_one_with_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, mine = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text(f'model = "m2-nano"\noutput = "{tmp_path}/out"\n[held_out]\ncorpus = "c"\nnum_pack = 1\n')
    mine.write_text("seed = -1\n[held_out]\nnum_packs = 3\n")
    assert cli.main(["eval", str(base), str(mine), "--set", "dtype=int8"]) == 2
    lines = capsys.readouterr().err.replace(f"{tmp_path}/", "").splitlines()
    assert "base.toml: held_out.num_pack: unknown key, value 1; did you mean 'num_packs'?" in lines[-1] + lines[-2]
    assert any("mine.toml: seed: expected greater than or equal to 0, received -1" in line for line in lines)
    assert any("--set dtype: dtype: expected 'auto', 'bfloat16' or 'float32'" in line for line in lines)
    assert lines[0] == "m2forge: error: base.toml + mine.toml: 3 problems"
    assert cli.main(["corpus", str(base), str(mine), str(tmp_path / "dest")]) == 2
    assert "base.toml + mine.toml: sources: missing" in capsys.readouterr().err.replace(f"{tmp_path}/", "")


def test_reader_that_leaves_early_is_no_error() -> None:
    program = (
        "import sys; from m2forge import cli; c = cli.COMMANDS['presets'];"
        "cli.COMMANDS['presets'] = cli.Command('', c.add_arguments, lambda args: print('x' * 10**6));"
        "sys.exit(cli.main(['presets']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def test_a_path_that_the_system_refuses_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["params", "a" * 300]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("m2forge: error: aaa")
    assert "File name too long" in line


def test_serve_answers_until_it_is_told_to_stop(tmp_path: Path) -> None:
    from tests.inference.folder import write_model

    write_model(tmp_path / "model")
    command = [sys.executable, "-m", "m2forge", "serve", str(tmp_path / "model"), "--port", "0", "--set", "step=3"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            assert line.startswith(f"serving {tmp_path / 'model'} on http://127.0.0.1:")
            name, key = process.stdout.readline().split()
            assert (name, len(key)) == ("key:", 32)
            url = line.split()[-1]
            body = b'{"ids": [1, 2], "max_tokens": 3, "stream": false}'
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/generate", body, headers)
            with urllib.request.urlopen(request, timeout=20) as response:
                (sample,) = json.load(response)["samples"]
            assert len(sample["ids"]) == 3
            assert sample["versions"] == [3, 3, 3]
            chat = b'{"model": "m", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}'
            request = urllib.request.Request(f"{url}/v1/chat/completions", chat, headers)
            with urllib.request.urlopen(request, timeout=20) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 3
            request = urllib.request.Request(f"{url}/v1/models", headers=headers)
            with urllib.request.urlopen(request, timeout=20) as response:
                assert [model["id"] for model in json.load(response)["data"]] == ["model"]
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "m2forge: interrupted\n"


def test_serve_refuses_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["serve", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "none' is not a folder" in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path), "--port", "70000"]) == 2
    assert "server.port" in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path), "--set", "rollout.num_block=3"]) == 2
    assert "did you mean 'num_blocks'?" in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path), "--key-file", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "none: the key cannot be read (No such file or directory)" in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path), "--set", "server.admin_key=secret", "--port", "0"]) == 2
    assert "unknown key" in capsys.readouterr().err
    monkeypatch.setenv("M2FORGE_ADMIN_KEY", "secret")
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "write the key to a file of mode 0600 and give that file as --key-file" in capsys.readouterr().err
