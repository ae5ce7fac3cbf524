"""Sandboxes in containers: our PID 1 runs commands, the runtime builds the root."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from m2forge.errors import ConfigError, NotFoundError
from m2forge.protocols import Command, OutcomeReason, Sandbox
from m2forge.sandbox import container
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.container import ContainerSandbox
from m2forge.sandbox.image import ImageStore
from m2forge.sandbox.namespace import NamespaceSandbox
from tests.sandbox.places import require, shell, use
from tests.sandbox.test_kill import wait_until

ROOT = Path(__file__).parent.parent.parent
CONFIG = SandboxConfig(backend="podman", timeout_s=30, grace_s=0.1)


def test_a_container_is_a_sandbox(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    require("podman")
    container._report_unbounded_disk.cache_clear()
    caplog.clear()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "source" / "run").chmod(0o755)

    async def act(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, ContainerSandbox)
        outcome = await sandbox.run(Command(("sh", "-c", "pwd; id -u; cat; exit 3"), stdin=b"fed\n"))
        assert (outcome.stdout.text(), outcome.status) == ("/workspace\n1000\nfed\n", 3)
        assert (await sandbox.run(Command(("sleep", "60"), timeout_s=0.1))).reason is OutcomeReason.TIMEOUT
        rights = await sandbox.run(
            Command(("grep", "-E", "^(CapPrm|NoNewPrivs|Seccomp):", "/proc/self/status"), user="0")
        )
        assert [line.split()[1] for line in rights.stdout.text().splitlines()] == ["0" * 16, "1", "2"]
        install = Command(("sh", "-c", "echo x > /opt-file; chown 7:7 /opt-file"), user="0")
        assert (await sandbox.build(install)).is_success
        # Each file is limited; that their sum is not is reported.
        filled = await sandbox.run(
            Command(("sh", "-c", "head -c 1000001 /dev/zero > large; echo $?; stat -c %s large"))
        )
        assert filled.stdout.text().split()[-1] == "1000000"
        await sandbox.write("a/b", b"hello")
        assert await sandbox.read("a/b", 10) == b"hello"
        await sandbox.upload(tmp_path / "source", "in")
        assert (await sandbox.run(Command(("in/run",)))).stdout.text() == "ran\n"
        assert await sandbox.download("in", tmp_path / "dest", 1000) == ()
        snapshot = await sandbox.snapshot()
        await sandbox.run(Command(("rm", "-r", "a")))
        fork = await sandbox.fork(snapshot)
        assert await fork.read("a/b", 10) == b"hello"
        await fork.close()
        await snapshot.remove()

    use(CONFIG.model_copy(update={"max_disk_bytes": 1_000_000}), act)
    assert ["and not their sum" in record.getMessage() for record in caplog.records] == [True]
    assert (tmp_path / "dest" / "run").read_text() == "#!/bin/sh\necho ran\n"
    left = subprocess.run(["podman", "ps", "-aq", "--filter", f"name=m2forge-{os.getpid()}"], capture_output=True)
    assert left.stdout == b""


def test_a_dockerfile_is_an_image_of_every_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("podman")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "file").write_text("inside\n")
    (tmp_path / "context" / "Dockerfile").write_text("FROM scratch\nENV COLOUR=blue\nCOPY file /opt/file\n")
    ImageStore().build("mine", [str(tmp_path / "context")])
    for backend in ("namespace", "podman"):
        config = SandboxConfig(backend=backend, layers=("mine",))
        assert shell("cat /opt/file; echo $COLOUR", config).stdout.text() == "inside\nblue\n"


def test_a_container_ends_with_its_owner() -> None:
    require("podman")
    code = (
        "import asyncio\n"
        "from m2forge.sandbox.backend import open_sandbox\n"
        "from m2forge.sandbox.config import SandboxConfig\n"
        "async def main():\n"
        "    sandbox = await open_sandbox(SandboxConfig(backend='podman'))\n"
        "    print(sandbox._name, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    pid = json.loads(subprocess.run(["podman", "inspect", name], capture_output=True).stdout)[0]["State"]["Pid"]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 20)


def test_a_missing_runtime_or_image_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require("podman")
    with pytest.raises(NotFoundError, match="neither `m2forge image list` nor podman has 'no-such:image'"):
        shell("true", CONFIG.model_copy(update={"image": "no-such:image"}))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="not installed"):
        shell("true", CONFIG)


def test_auto_falls_back_to_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*arguments: object) -> None:
        raise ConfigError("no namespaces")

    async def accept(runtime: str, *arguments: object) -> str:
        if runtime == "podman":
            raise ConfigError("no podman")
        return runtime

    monkeypatch.setattr(NamespaceSandbox, "open", refuse)
    monkeypatch.setattr(ContainerSandbox, "open", accept)
    assert str(asyncio.run(open_sandbox(SandboxConfig(backend="auto")))) == "docker"


@pytest.mark.parametrize(("key", "value"), [("upper", "disk"), ("max_inodes", 10)])
def test_what_a_container_cannot_honour_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}: backend"):
        SandboxConfig.model_validate({"backend": "podman", key: value})
