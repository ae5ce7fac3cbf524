"""Where the cgroups of sandboxes are created, by the folders that a machine has."""

from pathlib import Path

import pytest

from m2forge.errors import ConfigError
from m2forge.sandbox import cgroup
from m2forge.sandbox.config import SandboxConfig

V2 = "30 24 0:26 / {root} rw,relatime - cgroup2 cgroup2 rw"


def make_group(folder: Path, enabled: str | None) -> Path:
    """A group of version 2. Without `enabled` it has processes, so its controllers cannot be passed to children."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
    (folder / "cgroup.procs").touch()
    if enabled is None:
        (folder / "cgroup.subtree_control").mkdir()  # It cannot be written.
    else:
        (folder / "cgroup.subtree_control").write_text(enabled)
    return folder


def test_a_group_without_processes_gets_children(tmp_path: Path) -> None:
    own = make_group(tmp_path / "service", "memory\n")
    found = cgroup.find_parents("0::/service\n", V2.format(root=tmp_path))
    assert found == dict.fromkeys(("memory", "pids", "cpu"), own)
    assert (own / "cgroup.subtree_control").read_text() == "+pids +cpu"


def test_a_group_with_processes_gets_siblings(tmp_path: Path) -> None:
    make_group(tmp_path, "memory pids\n")
    make_group(tmp_path / "service", None)
    found = cgroup.find_parents("0::/service\n", V2.format(root=tmp_path))
    assert found == dict.fromkeys(("memory", "pids"), tmp_path)


def test_nothing_above_the_mount_is_used(tmp_path: Path) -> None:
    make_group(tmp_path, "memory pids\n")
    root = make_group(tmp_path / "mounted", None)
    assert cgroup.find_parents("0::/\n", V2.format(root=root)) == {}


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    for name in ("memory", "cpu,cpuacct"):
        (tmp_path / name / "job").mkdir(parents=True)
    mounts = "\n".join(
        f"3{index} 24 0:2{index} / {tmp_path}/{name} rw - cgroup cgroup rw,{name}"
        for index, name in enumerate(("memory", "cpu,cpuacct", "pids"))
    )
    found = cgroup.find_parents("3:pids:/job\n2:cpu,cpuacct:/job\n1:memory:/job\n0::/\n", mounts)
    assert found == {"memory": tmp_path / "memory" / "job", "cpu": tmp_path / "cpu,cpuacct" / "job"}


def test_a_share_of_cpus_needs_a_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroup, "parents", lambda: {"cpu": make_group(tmp_path, "cpu")})
    config = SandboxConfig(backend="namespace", max_cpus=0.5)
    plan = cgroup.plan(config)
    assert [(Path(path).name, value) for path, value in plan.writes] == [("cpu.max", "50000 100000")]
    assert not plan.has_memory
    monkeypatch.setattr(cgroup, "parents", dict)
    with pytest.raises(ConfigError, match=r"max_cpus: 0\.5 needs a writable cgroup"):
        cgroup.plan(config)
