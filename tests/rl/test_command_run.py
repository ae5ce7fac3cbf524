"""An agent that cannot be run ends `m2forge rl` before anything is written. (test_own_tasks.py runs programs.)"""

import sys
from pathlib import Path

import pytest

from m2forge.cli import main
from m2forge.config import build, write_resolved
from m2forge.errors import ConfigError
from m2forge.rl.config import RLConfig
from m2forge.rl.loop import run_rl
from m2forge.train.run_dir import CONFIG_FILE, open_run
from tests.rl.scene import make_config
from tests.sandbox.places import require


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"kind": "command", "command": ["no-such-agent", "{instruction}"]}, "'no-such-agent' is not in PATH"),
        ({"command": ["no-such-agent"]}, "'no-such-agent' is not in PATH"),
        ({"kind": "command", "command": ["./agent.sh"]}, "'./agent.sh' is not an executable file"),
    ],
)
def test_a_command_that_is_not_there_writes_nothing(tmp_path: Path, agent: dict[str, object], message: str) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError) as caught:
        run_rl(make_config(tmp_path / "model", agent=agent), tmp_path / "runs")
    assert message in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("agent", [{"kind": "command", "command": ["sh"]}, {"kind": "loop"}, {"command": ["sh"]}])
def test_without_namespaces_one_message_says_what_to_enable(
    tmp_path: Path, agent: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program that starts a sandbox reports the kernel's refusal."""
    require("namespace")
    refusing = "import socket, struct, sys\nend = socket.socket(fileno=int(sys.argv[2]))\n"
    refusing += "text = b'namespaces: Operation not permitted'\n"
    refusing += "end.sendall(struct.pack('<IBI', len(text) + 5, 5, 0) + text)\nend.recv(1 << 20)\nsys.exit(1)\n"
    (tmp_path / "refusing").write_text(f"#!{sys.executable}\n{refusing}")
    (tmp_path / "refusing").chmod(0o755)
    monkeypatch.setattr("m2forge.sandbox.namespace.program", lambda: tmp_path / "refusing")
    (tmp_path / "model").mkdir()
    config = make_config(tmp_path / "model", agent={**agent, "sandbox": {"backend": "namespace"}})
    write_resolved(config, tmp_path / "rl.toml")
    assert main(["rl", str(tmp_path / "rl.toml"), "--runs", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert "the kernel refused the namespaces" in said
    assert "kernel.unprivileged_userns_clone=1" in said
    assert 'sandbox.backend = "process"' in said
    assert not (tmp_path / "runs").exists()


def test_a_run_from_before_sandboxes_resumes_as_plain_processes(tmp_path: Path) -> None:
    """Its configuration names no backend, and its programs ran with the files and the network of this machine."""
    config = make_config(tmp_path, agent={"kind": "command", "command": ["sh"]})
    open_run(tmp_path, config, None)
    text = (tmp_path / CONFIG_FILE).read_text()
    (tmp_path / CONFIG_FILE).write_text(text.replace('backend = "process"\n', ""))
    open_run(tmp_path, config, 0)
    (tmp_path / CONFIG_FILE).write_text(text.replace('backend = "process"\n', ""))
    confined = make_config(tmp_path, agent={"kind": "command", "command": ["sh"], "sandbox": {"backend": "namespace"}})
    with pytest.raises(ConfigError, match=r"agent\.sandbox\.backend = 'process', now it is 'namespace'"):
        open_run(tmp_path, confined, 0)


def test_an_agent_without_a_kind_is_a_worker(tmp_path: Path) -> None:
    config = make_config(tmp_path, agent={"command": ["true"]})
    assert (config.agent.kind, config.agent.num_jobs) == ("worker", 16)
    with pytest.raises(ConfigError, match=r"agent: Input tag 'robot'.*'worker', 'command'"):
        make_config(tmp_path, agent={"kind": "robot", "command": ["true"]})
    with pytest.raises(ConfigError, match=r"agent\.num_workers: unknown key"):
        make_config(tmp_path, agent={"kind": "command", "command": ["true"], "num_workers": 2})
    with pytest.raises(ConfigError, match=r"no placeholder {instuction}; did you mean 'instruction'"):
        make_config(tmp_path, agent={"kind": "command", "command": ["x", "{instuction}"]})
    assert build(RLConfig, {**config.model_dump(mode="json", exclude_none=True)}) == config
