"""Harbor's tasks in our sandboxes: `harbor run -e m2forge.tasks.folders.harbor_environment:SandboxEnvironment`.

Only Harbor imports this module, from an environment with Python 3.12 in which both packages are installed. Harbor's own
trial runs the agent, copies artifacts and believes the reward file; what `tasks/folders/verification.py` adds does not
apply. `--ek base_image=NAME` names the image that stands for one that is not in the store.
"""

import shlex
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

from m2forge.errors import NotFoundError
from m2forge.protocols import Command, OutcomeReason
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.namespace import NamespaceSandbox
from m2forge.tasks.folders.task_image import TaskImage, owner_of_files, task_image

MAX_BYTES = 1 << 30
"""Limit of a copy out of the sandbox."""
TIMEOUT_S = 86_400.0


class SandboxEnvironment(BaseEnvironment):  # type: ignore[misc]  # Harbor is not installed where types are checked
    def __init__(self, *args: object, base_image: str | None = None, **kwargs: object) -> None:
        self._base_image = base_image
        self._sandbox: NamespaceSandbox | None = None
        self._image: TaskImage | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "m2forge"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
        )

    def _validate_definition(self) -> None:
        if not self.task_env_config.docker_image and not (self.environment_dir / "Dockerfile").is_file():
            raise FileNotFoundError(f"{self.environment_dir / 'Dockerfile'}: missing, and docker_image too")

    async def start(self, force_build: bool) -> None:
        environment = self.task_env_config
        config = SandboxConfig(backend="namespace")
        context = None if environment.docker_image else self.environment_dir
        self._image = await task_image(context, environment.docker_image, config, self._base_image)
        # The workspace of a sandbox belongs to its user; Harbor names one only when it runs a command.
        own: dict[str, object] = {
            "image": self._image.base,
            "layers": self._image.layers,
            "workspace": "/logs",
            "user": self._image.user or owner_of_files() or config.user,
            "timeout_s": TIMEOUT_S,
            **self._network(),
        }
        if environment.memory_mb is not None:
            own["max_memory_bytes"] = environment.memory_mb << 20
        if environment.storage_mb is not None:
            own["max_disk_bytes"] = environment.storage_mb << 20
        self._sandbox = await NamespaceSandbox.open(
            SandboxConfig.model_validate(config.model_dump() | own), self._image.env
        )
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    def _network(self) -> dict[str, object]:
        policy = self.network_policy
        match policy.network_mode:
            case NetworkMode.NO_NETWORK:
                return {"network": "none"}
            case NetworkMode.ALLOWLIST:
                return {"network": "allowlist", "allow": tuple(host.removeprefix("*") for host in policy.allowed_hosts)}
        return {"network": "public"}

    async def stop(self, delete: bool) -> None:
        if self._sandbox is not None:
            sandbox, self._sandbox = self._sandbox, None
            await sandbox.close()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        parent, _, name = str(target_path).rpartition("/")
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / name
            copy.write_bytes(Path(source_path).read_bytes())
            copy.chmod(Path(source_path).stat().st_mode & 0o777)
            await self._open_sandbox.upload(copy, parent or "/", owner_of_files())

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._open_sandbox.upload(Path(source_dir), str(target_dir), owner_of_files())

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            await self._open_sandbox.download(str(source_path), Path(scratch), MAX_BYTES)
            found = Path(scratch) / str(source_path).rpartition("/")[2]
            if not found.is_file():
                raise NotFoundError(f"{source_path} is not a file")
            Path(target_path).write_bytes(found.read_bytes())

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._open_sandbox.download(str(source_dir), Path(target_dir), MAX_BYTES)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        image, wanted = self._image, self._resolve_user(user)
        folder = cwd or self.task_env_config.workdir or (image.workdir if image is not None else None) or "/"
        order = Command(
            ("/bin/bash", "-c", f"cd {shlex.quote(folder)} && {{ {command}\n}}"),
            env=self._merge_env(env) or {},
            timeout_s=timeout_sec,
            user=None if wanted is None or owner_of_files() is None else str(wanted),
        )
        # As in a container, root may write files of other users: Harbor's own commands and most verifiers do.
        outcome = await self._open_sandbox.build(order)
        if outcome.reason is OutcomeReason.TIMEOUT:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=outcome.stdout.text(), stderr=outcome.stderr.text(), return_code=outcome.status)

    @property
    def _open_sandbox(self) -> NamespaceSandbox:
        if self._sandbox is None:
            raise RuntimeError("the environment is not started")
        return self._sandbox
