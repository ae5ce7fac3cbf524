"""A run with agent hosts whose policy is scripted and whose trainer only takes batches, so that it needs no torch.

    python -m tests.rl.hosts_run rl CONFIG …             as `m2forge rl CONFIG …`

The trainer claims, commits and publishes as the product's does; each version is a copy of the model's folder. Gateway
and hosts are the product's own.
"""

import shutil
import sys
import time
from pathlib import Path

import m2forge.rl.child_main as own
from m2forge.config import load_resolved
from m2forge.model.config_file import CONFIG_FILE as WEIGHTS_CONFIG
from m2forge.model.config_file import read_config
from m2forge.observe.log import set_up_logging
from m2forge.pool.pool import Pool
from m2forge.records import PolicyVersion
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.train.run_dir import CONFIG_FILE
from tests.rl.scripted_run import run_sampler

MODULE = "tests.rl.hosts_run"
POLL_S = 0.05


def run_trainer(run_dir: Path) -> None:
    config, layout = load_resolved(RLConfig, run_dir / CONFIG_FILE), Layout(run_dir)
    model, weights = Path(config.model), layout.weight_store(config)

    def publish(step: int) -> None:
        folder = weights.folder / f"step-{step:08d}-aa"
        if not folder.exists():
            shutil.copytree(model, folder, ignore=shutil.ignore_patterns(WEIGHTS_CONFIG))
            shutil.copy(model / WEIGHTS_CONFIG, folder)

    newest = weights.newest()
    step = 0 if newest is None else newest[0].step
    publish(step)
    with Pool(layout.pool(config.pool), read_config(model).vocab_size) as pool:
        pool.restore(PolicyVersion(config.name, step))
        while step < config.num_steps:
            claimed = pool.claim(config.batch_units, PolicyVersion(config.name, step))
            if claimed is None:
                time.sleep(POLL_S)
                continue
            pool.fetch(claimed)
            step += 1
            pool.commit(claimed, PolicyVersion(config.name, step))
            publish(step)
            pool.mark_durable(PolicyVersion(config.name, step))
    layout.model.mkdir(exist_ok=True)


def main() -> int:
    kind, *arguments = sys.argv[1:]
    if kind == "rl":
        from tests.rl.other_children import run_loop

        return run_loop(MODULE)
    set_up_logging()
    processes = own.PROCESSES | {"sampler": run_sampler, "trainer": run_trainer}
    processes[kind](Path(arguments[0]), *arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
