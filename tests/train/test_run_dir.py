"""Which changes a run that is started again may bring, and who may train into its directory."""

import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from m2forge.config import Config, dump, load, load_resolved
from m2forge.errors import ConfigError, ExistsError
from m2forge.train.config import MachineConfig, MeshConfig, PhaseConfig, PolicyConfig, TrainConfig
from m2forge.train.position import Position
from m2forge.train.run_dir import FAILURE_FILE, hold_run, open_run


class Run(Config):
    seed: int = 0
    note: str | None = None
    policy: PolicyConfig = PolicyConfig()
    train: TrainConfig = TrainConfig()
    phases: tuple[PhaseConfig, ...]


def make_run(num_phases: int = 3, **changes: object) -> Run:
    phase = {"steps": 4, "context": 8, "pack_tokens": 8, "lr": {"start": 1e-3}}
    phases = tuple(PhaseConfig.model_validate(phase | {"name": f"p{index}"}) for index in range(num_phases))
    return Run.model_validate({"phases": phases} | changes)


def longer(run: Run, index: int) -> Run:
    """The same run with another number of steps in one phase."""
    phases = list(run.phases)
    phases[index] = phases[index].model_copy(update={"steps": 5})
    return run.model_copy(update={"phases": tuple(phases)})


def test_phases_that_have_not_begun_may_change(tmp_path: Path) -> None:
    open_run(tmp_path, make_run(), None)
    open_run(tmp_path, longer(make_run(), 2), 1)
    open_run(tmp_path, make_run(num_phases=2), 1)
    open_run(tmp_path, make_run(num_phases=4), 1)


@pytest.mark.parametrize("index", [0, 1])
def test_phases_that_have_begun_may_not(tmp_path: Path, index: int) -> None:
    open_run(tmp_path, make_run(), None)
    with pytest.raises(ConfigError, match=rf"started with phases\.{index}\.steps = 4, now it is 5"):
        open_run(tmp_path, longer(make_run(), index), 1)
    with pytest.raises(ConfigError, match=r"started with phases\.1\."):
        open_run(tmp_path, make_run(num_phases=1), 1)


def test_machine_and_checkpoint_settings_alone_may_change(tmp_path: Path) -> None:
    open_run(tmp_path, make_run(), None)
    open_run(tmp_path, make_run(train=TrainConfig.model_validate({"machine": {"num_threads": 3}})), 0)
    open_run(tmp_path, make_run(train=TrainConfig.model_validate({"checkpoint": {"keep": 5}})), 0)
    with pytest.raises(ConfigError, match=r"train\.optimizer\.betas\.1 = 0\.95, now it is 0\.9"):
        open_run(tmp_path, make_run(train=TrainConfig.model_validate({"optimizer": {"betas": (0.9, 0.9)}})), 0)
    with pytest.raises(ConfigError, match="note = None, now it is 'x'"):
        open_run(tmp_path, make_run(note="x"), 0)


@pytest.mark.parametrize(
    ("old", "router_bias"),
    [
        ('[policy]\nrouter_bias = "frozen"\n', "frozen"),
        ('[policy]\nrouter_bias = "balanced"\n', "balanced"),
        ("", "balanced"),
    ],
)
def test_runs_from_before_router_bias_had_its_place_go_on(tmp_path: Path, old: str, router_bias: str) -> None:
    run, other = (
        make_run(train=TrainConfig.model_validate({"router_bias": kind}))
        for kind in (router_bias, "frozen" if router_bias == "balanced" else "balanced")
    )
    lines = [line for line in dump(run).splitlines() if not line.startswith("router_bias")]
    (tmp_path / "config.toml").write_text("\n".join(lines).replace("[policy]\n", old or "[policy]\n"))
    with pytest.raises(ConfigError, match=rf"started with train\.router_bias = '{router_bias}', now it is"):
        open_run(tmp_path, other, 0)
    open_run(tmp_path, run, 0)


class Renamed(Config):
    """`Run` after `seed` became `start`, `policy` became `objective`, and keys were added."""

    renamed_keys: ClassVar[Mapping[str, str]] = {"seed": "start", "policy": "objective"}

    start: int = 0
    note: str | None = None
    added: Literal["none", "some"] = "none"
    table: PolicyConfig | None = None
    objective: PolicyConfig = PolicyConfig()
    train: TrainConfig = TrainConfig()
    phases: tuple[PhaseConfig, ...]


def test_a_run_written_under_former_keys_resumes(tmp_path: Path) -> None:
    open_run(tmp_path, make_run(seed=3), None)
    phases = make_run().phases
    with pytest.raises(ConfigError, match="started with start = 3, now it is 0"):
        open_run(tmp_path, Renamed(phases=phases), 0)
    open_run(tmp_path, Renamed(start=3, phases=phases), 0)
    written = (tmp_path / "config.toml").read_text()
    assert "start = 3" in written
    assert "seed = 3" not in written
    assert load(Renamed, tmp_path / "config.toml") == Renamed(start=3, phases=phases)


@pytest.mark.parametrize(("former", "mesh"), [("none", {}), ("data", {"replicate": 2}), ("fsdp", {"shard": 2})])
def test_a_run_with_the_former_parallel_key_resumes(tmp_path: Path, former: str, mesh: dict[str, int]) -> None:
    run = make_run()
    machine = MachineConfig(mesh=MeshConfig.model_validate(mesh))
    open_run(tmp_path, run, None)
    # As the version before the mesh wrote it.
    written, count = re.subn(r"\[train\.machine\.mesh\]\n(\w+ = \S+\n)+", "", (tmp_path / "config.toml").read_text())
    assert count == 1
    old = written.replace("[train.machine]\n", f'[train.machine]\nparallel = "{former}"\n')
    (tmp_path / "config.toml").write_text(old)
    expected = {"none": MeshConfig(), "data": MeshConfig(replicate="auto"), "fsdp": MeshConfig(shard="auto")}[former]
    assert load_resolved(Run, tmp_path / "config.toml").train.machine.mesh == expected
    with pytest.raises(ConfigError, match=r"train\.machine\.parallel: unknown key.*is now 'train\.machine\.mesh'"):
        load(Run, tmp_path / "config.toml")
    open_run(tmp_path, run.model_copy(update={"train": run.train.model_copy(update={"machine": machine})}), 0)


def test_a_key_added_since_has_its_default_in_an_old_run(tmp_path: Path) -> None:
    open_run(tmp_path, make_run(seed=3), None)
    renamed = Renamed(start=3, phases=make_run().phases)
    with pytest.raises(ConfigError, match="started with added = 'none', now it is 'some'"):
        open_run(tmp_path, renamed.model_copy(update={"added": "some"}), 0)
    # A table whose values are all defaults is not the same as none.
    with pytest.raises(ConfigError, match=r"started with table\..* = None"):
        open_run(tmp_path, renamed.model_copy(update={"table": PolicyConfig()}), 0)


def test_a_refused_configuration_is_not_written(tmp_path: Path) -> None:
    open_run(tmp_path, make_run(), None)
    before = (tmp_path / "config.toml").read_text()
    with pytest.raises(ConfigError, match="seed"):
        open_run(tmp_path, make_run(seed=1), 0)
    assert (tmp_path / "config.toml").read_text() == before


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (Position(), None),
        (Position(phase=0, step_in_phase=3, step=3), 0),
        (Position(phase=1, step_in_phase=0, step=4), 0),
        (Position(phase=1, step_in_phase=1, step=5), 1),
    ],
)
def test_between_two_phases_the_second_has_not_begun(position: Position, expected: int | None) -> None:
    assert position.last_begun == expected


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        hold_run(tmp_path / "run"),
        pytest.raises(ExistsError, match="being used by another process"),
        hold_run(tmp_path / "run"),
    ):
        pass
    with hold_run(tmp_path / "run"):
        pass


def test_an_error_is_recorded_until_the_run_goes_on(tmp_path: Path) -> None:
    failure = tmp_path / FAILURE_FILE
    with pytest.raises(ZeroDivisionError), hold_run(tmp_path):
        1 / 0  # noqa: B018
    assert failure.read_text() == "ZeroDivisionError: division by zero\n"
    with pytest.raises(KeyboardInterrupt), hold_run(tmp_path):
        assert not failure.exists()
        raise KeyboardInterrupt
    assert not failure.exists(), "an interrupted run has not failed"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_the_directory_is_its_owners_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_run(tmp_path / "runs" / "a", make_run(), None)
    with hold_run(tmp_path / "runs" / "b"):
        pass
    assert mode_of(tmp_path / "runs" / "a") == mode_of(tmp_path / "runs" / "b") == 0o700
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_open_to_others_is_closed_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    with caplog.at_level(logging.WARNING), hold_run(run_dir):
        assert mode_of(run_dir) == 0o700
    assert f"{run_dir} was accessible to other users (mode 0{mode:o})" in caplog.text
