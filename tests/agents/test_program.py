"""What a sandbox shows of an agent's program: its installation and the files that the command names, nothing beside."""

import asyncio
from pathlib import Path

import pytest

from m2forge.agents.config import CommandSandboxConfig, VersionConfig
from m2forge.agents.program import inside_path, require_inside, visible
from m2forge.errors import ConfigError
from m2forge.sandbox.init_sandbox import PATH
from tests.sandbox.places import require

CONFIG = CommandSandboxConfig()


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_an_installation_is_visible_and_on_the_path(tmp_path: Path) -> None:
    executable(tmp_path / "npm/node_modules/pkg/cli.js")
    (tmp_path / "npm/node_modules/.bin").mkdir()
    (tmp_path / "npm/node_modules/.bin/agent").symlink_to("../pkg/cli.js")
    path = f"/usr/bin:{tmp_path}/npm/node_modules/.bin:{tmp_path}/other"
    shown = visible(CONFIG, ("agent",), {"PATH": path})
    assert shown.folders == (f"{tmp_path}/npm/node_modules",)
    assert inside_path(shown, {"PATH": path}) == {}, "a configured PATH stays as it is"


def test_the_path_inside_has_visible_folders_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "venv/bin/agent")
    (tmp_path / "venv/pyvenv.cfg").write_text(f"home = {tmp_path}/python/bin\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/venv/bin:{tmp_path}/keys:/usr/bin")
    shown = visible(CONFIG, ("agent", "{instruction}"), {})
    assert shown.folders == (f"{tmp_path}/venv", f"{tmp_path}/python")
    assert inside_path(shown, {}) == {"PATH": f"{tmp_path}/venv/bin:{PATH}"}


def test_files_of_the_command_are_visible_alone(tmp_path: Path) -> None:
    script = executable(tmp_path / "home/agent.sh")
    (tmp_path / "home/key").write_text("k")
    assert visible(CONFIG, ("sh", str(script), "{instruction}"), {}).folders == (str(script),)
    given = CONFIG.model_copy(update={"folders": (str(tmp_path / "home"),)})
    assert visible(given, ("sh", str(script)), {}).folders == given.folders
    plain = CommandSandboxConfig(backend="process")
    assert visible(plain, (str(script),), {}) == plain


def test_a_program_is_found_inside_with_its_version(tmp_path: Path) -> None:
    require("namespace")
    script = executable(tmp_path / "home/agent.sh", "#!/bin/sh\necho agent 1.2; ls " + str(tmp_path / "home"))
    command = (str(script), "--version")
    shown = visible(CONFIG, command, {})
    asyncio.run(require_inside(shown, command, {}, VersionConfig(command=command, text="agent 1.2")))
    with pytest.raises(ConfigError, match=r"expected 'agent 2' from .*, received 'agent 1.2\\nagent.sh'"):
        asyncio.run(require_inside(shown, command, {}, VersionConfig(command=command, text="agent 2")))
    with pytest.raises(ConfigError, match=r"'no-such' is not in the sandbox; .* agent\.sandbox\.folders"):
        asyncio.run(require_inside(shown, ("no-such",)))


def test_without_its_network_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="could not reach the policy"):
        CommandSandboxConfig(network="none")
