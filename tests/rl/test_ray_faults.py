"""Fifty random kills on three Ray nodes, of nodes, ranks, replicas, hosts, loop and database, in a run that learns: as
well learnt as by five seeds that nothing disturbs. Shorter runs than the demo, as in test_faults.py."""

import random
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.demo import Demo
from m2forge.config import build
from m2forge.model.config_file import read_config
from m2forge.observe.metrics import read_last_step
from m2forge.pool.pool import Pool
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from tests.pool.postgres import find_programs, fresh_database, restartable_server
from tests.rl.ray_nodes import ray_nodes
from tests.rl.ring import command_of, started
from tests.rl.test_faults import (
    NO_POSTGRES,
    NUM_FAULTS,
    NUM_SEEDS,
    POLL_S,
    Witness,
    judge,
    make_run,
    run_undisturbed,
    tell,
)
from tests.rl.test_ray import draw_kinds, strike, wait_until_gone

MAX_GAP_S = 4.0


def on_nodes(config: RLConfig, address: str) -> RLConfig:
    """With two of each process, and two ranks."""
    values = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    values["agent"]["kind"] = config.agent.kind
    ray = {"address": address, "cpus": 0.5}
    values["cluster"] = {"launcher": "ray", "agent_hosts": 2, "samplers": 2, "gateways": 2, "ray": ray}
    values["train"]["machine"] |= {"device": "cpu", "mesh": {"replicate": 2}}
    values["engine"]["device"] = "cpu"  # the head has a GPU by name
    return build(RLConfig, values, origin="test")


def wait_for_moment(run_dir: Path, loop: subprocess.Popen[bytes], due_step: int, gap_s: float) -> bool:
    """`gap_s` after the run has come to `due_step`; false where it has ended before."""
    until_s = None
    while loop.poll() is None and (until_s is None or time.monotonic() < until_s):
        time.sleep(POLL_S)
        last = read_last_step(run_dir / "metrics.jsonl")
        if until_s is None and (0 if last is None else last.step) >= due_step:
            until_s = time.monotonic() + gap_s
    return loop.poll() is None


@pytest.mark.long
def test_struck_on_three_nodes_a_run_learns_as_much(tmp_path: Path) -> None:
    if find_programs() is None:
        pytest.skip(NO_POSTGRES)
    models = [Demo(tmp_path / f"demo{seed}", seed).make_agent() for seed in range(NUM_SEEDS)]
    with ThreadPoolExecutor(2) as threads:
        runs = threads.map(lambda seed: run_undisturbed(tmp_path / f"seed{seed}", models[seed], seed), range(NUM_SEEDS))
        successes = list(runs)
    middle = successes.index(sorted(successes)[NUM_SEEDS // 2])
    rng, struck, folder = random.Random(0), Counter[str](), tmp_path / "struck"
    kinds = draw_kinds(NUM_FAULTS, rng)
    with (
        ray_nodes() as nodes,
        restartable_server(syncs=False) as database,
        fresh_database(database.url, "ring") as url,
    ):
        config = on_nodes(make_run(folder, models[middle], middle, url), nodes.address)
        command, layout, log = command_of(config, folder), Layout(folder / config.name), folder / "loop.log"
        with Pool(layout.pool(config.pool), read_config(Path(config.model)).vocab_size) as pool:
            witness, status = Witness(pool, folder, config), None
            while status != 0:
                num_struck = struck.total()
                with started(command, log) as loop:
                    while kinds and wait_for_moment(
                        layout.run_dir, loop, struck.total() * config.num_steps // NUM_FAULTS, rng.random() * MAX_GAP_S
                    ):
                        witness.look()
                        if strike(kinds[-1], layout.run_dir, nodes, database, pool, loop, rng):
                            struck[kinds.pop()] += 1
                    status = loop.wait()
                assert status == 0 or struck.total() > num_struck, log.read_text()[-3000:]
            wait_until_gone(layout.run_dir)
            witness.look()
            judge(pool, config)
    assert not kinds, "the run must be long enough to be struck"
    print(", ".join(f"{kind} {num}" for kind, num in sorted(struck.items())))
    success = tell(folder, config)
    assert min(successes) <= success <= max(successes), (successes, success)
