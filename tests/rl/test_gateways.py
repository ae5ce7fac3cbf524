"""Several gateways and samplers share the attempts; some are killed, and a resumed run has fewer gateways."""

import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from m2forge.cluster.config import ClusterConfig
from m2forge.cluster.process_record import ProcessRecord
from m2forge.errors import ConfigError
from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.pool.lifecycle import EpisodeState
from m2forge.pool.stored import read_units
from m2forge.records import PolicyVersion
from m2forge.rl.gateway_admin import home_of
from m2forge.rl.host import server_starts
from m2forge.rl.layout import Layout, sampler_names
from m2forge.testing.scripted import ScriptedPolicy
from tests.pool.test_processes import check
from tests.rl.ring import command_of, started, wait_until_gone
from tests.rl.scene import make_config
from tests.rl.test_faults import judge
from tests.rl.test_hosts import HOSTS, LIMIT_S, Scene, check_rewards, make_scene, pids_of, wait_for_attempts


@pytest.mark.parametrize("num_gateways", [2, 3])
def test_attempts_take_turns_at_the_gateways(num_gateways: int) -> None:
    for group_size in (1, 3, 8):
        names = [f"g{group}-{index}-1" for group in range(1, 61) for index in range(group_size)]
        share = Counter(home_of(name, num_gateways) for name in names)
        assert [*share.values()] == [60 * group_size / num_gateways] * num_gateways
    assert home_of("g7-1-1", num_gateways) != home_of("g7-1-2", num_gateways), "a retry goes elsewhere"


def test_a_restarted_gateway_interrupts_its_own_attempts_alone(tmp_path: Path) -> None:
    layout, cluster = Layout(tmp_path), ClusterConfig(gateways=2)
    names = ["g1-0-1", "g1-1-1"]
    before = [server_starts(layout, cluster, name) for name in names]
    assert before[0] != before[1], "which of them is up says nothing of the other"
    ProcessRecord(layout.processes, "gateway-1", "here").start()
    after = [server_starts(layout, cluster, name) for name in names]
    assert [home_of(name, 2) for name in names if before[names.index(name)] != after[names.index(name)]] == [1]
    ProcessRecord(layout.processes, "sampler", "here").start()
    assert all(server_starts(layout, cluster, name) != found for name, found in zip(names, after, strict=True))


def test_ports_beyond_the_last_one_are_refused(tmp_path: Path) -> None:
    assert make_config(tmp_path, gateway={"port": 65534}, cluster={"gateways": 2}).gateway_port == 65534
    with pytest.raises(ConfigError, match=r"gateway.port: 3 gateways .* from 65534 on, and the last port is 65535"):
        make_config(tmp_path, gateway={"port": 65534}, cluster={"gateways": 3})


def finished(scene: Scene) -> set[str]:
    """Names of the attempts that ended and count."""
    states = (EpisodeState.FINISHED, EpisodeState.TRAINED)
    return {f"{row.name}-{row.attempt}" for row in scene.rows() if row.state in states}


def in_flight_again(scene: Scene) -> None:
    scene.held.touch()
    scene.wait("other attempts begin", lambda: {*scene.in_flight().values()} == {*HOSTS})


def test_killed_gateways_and_samplers_lose_nothing(tmp_path: Path) -> None:
    """Then the loop is killed, and goes on with one gateway."""
    scene = make_scene(tmp_path, num_steps=6, gateways=2, samplers=2)
    scene.held.touch()
    with scene.pool:
        with started(scene.command, scene.log) as loop:
            wait_for_attempts(scene, loop)
            before = set(scene.in_flight())
            assert {home_of(name, 2) for name in before} == {0, 1}
            for role in ("gateway-1", "sampler-1"):
                os.kill(pids_of(scene.layout.run_dir)[role], signal.SIGKILL)
                scene.wait("it starts again", lambda role=role: scene.history(role).num_starts == 2)  # type: ignore[misc]
            assert before <= scene.pool.running().keys(), "attempts were lost"
            scene.held.unlink()
            scene.wait("the attempts end", lambda: before <= finished(scene))
            in_flight_again(scene)
            # Calls fail, and attempts with them, or are made at the other sampler.
            scene.held.unlink()
            os.kill(pids_of(scene.layout.run_dir)["sampler-0"], signal.SIGKILL)
            step = newest_step(scene)
            scene.wait("training goes on", lambda: newest_step(scene) > step)
            in_flight_again(scene)
            loop.kill()
            loop.wait()
        assert scene.history("gateway-0").num_starts == 1
        cluster = scene.config.cluster.model_copy(update={"gateways": 1})
        scene.config = scene.config.model_copy(update={"cluster": cluster})
        scene.held.unlink()
        with started(command_of(scene.config, tmp_path, "tests.rl.hosts_run"), scene.log) as loop:
            assert loop.wait(LIMIT_S) == 0, scene.log.read_text()[-3000:]
        wait_until_gone(scene.layout.run_dir)
        judge(scene.pool, scene.config)
        check(scene.pool)
        check_rewards(scene, before)
        check_logprobs(scene)
    assert not journal_ids(scene.layout.journal), "what is recorded elsewhere is deleted"
    assert not (scene.layout.journal / "gateway-1").exists(), "no gateway would read it"
    logs = [(scene.layout.log / f"{name}.log").read_text() for name in sampler_names(scene.config.cluster)]
    assert all(f"policy version run, step {scene.config.num_steps}" in " ".join(log.split()) for log in logs)


def newest_step(scene: Scene) -> int:
    newest = scene.layout.weight_store(scene.config).newest()
    return 0 if newest is None else newest[0].step


def check_logprobs(scene: Scene) -> None:
    """Each token has the logprob of the version that is recorded with it, whichever sampler served that."""
    policy, seen = ScriptedPolicy(scene.pool.vocab_size), set()
    with scene.pool.database.read() as connection:
        units = read_units(connection, range(1, 100), scene.pool.vocab_size)
        calls = [call for unit in units for stored in unit.episodes for call in stored.episode().calls]
    for call in calls:
        ids = call.response_ids.tolist()
        for index, (id, step) in enumerate(zip(ids, call.versions.tolist(), strict=True)):
            version = PolicyVersion("run", step, "aa")
            drawn = policy.draw(call.prompt_ids.tolist(), ids[:index], version, call.sampling, 0.0, id)
            assert call.logprobs[index] == np.float32(drawn.logprob)
            seen.add(step)
    assert len(seen) > 1, "several versions were sampled from"
