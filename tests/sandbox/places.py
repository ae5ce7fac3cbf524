"""Sandboxes of every backend for tests that hold for all of them; those that cannot run here skip, and say why."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from m2forge.errors import ConfigError
from m2forge.protocols import Command, Outcome, Sandbox
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import BackendName, SandboxConfig
from m2forge.sandbox.network import Address

T = TypeVar("T")


@functools.cache
def problem(backend: BackendName) -> str | None:
    """Why a backend cannot run on this machine; None if it can."""
    if backend == "process":
        return None
    try:
        use(SandboxConfig(backend=backend), lambda sandbox: sandbox.run(Command(("true",))))
    except ConfigError as error:
        return str(error)
    return None


def require(backend: BackendName) -> None:
    if reason := problem(backend):
        pytest.skip(f"sandbox backend {backend}: {reason}")


def use(
    config: SandboxConfig,
    act: Callable[[Sandbox], Awaitable[T]],
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    gateway: Address | None = None,
) -> T:
    """Open a sandbox, act in it, and close it."""

    async def whole() -> T:
        sandbox = await open_sandbox(config, folder, env, gateway)
        try:
            return await act(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(whole())


def shell(script: str, config: SandboxConfig, folder: Path | None = None, **options: object) -> Outcome:
    command = Command(("sh", "-c", script), **options)  # type: ignore[arg-type]  # options of any field
    return use(config, lambda sandbox: sandbox.run(command), folder)
