"""Which worker runs which files: two compute, and two others run only files whose tests wait for most of their time."""

import os
from collections.abc import Sequence
from pathlib import Path

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.cost import Cost, cost_of

WAITING = (
    "tests/page/test_browser.py",
    "tests/test_install.py",
    "tests/rl/test_restart.py",
    "tests/rl/test_hosts.py",
    "tests/rl/test_ray.py",
    "tests/tasks/test_runner.py",
    "tests/rl/test_attempts.py",
    "tests/rl/test_own_tasks.py",
    "tests/agents/test_worker_pool.py",
    "tests/page/test_browser_runs.py",
    "tests/rl/test_loop.py",
    "tests/rl/test_deployed.py",
    "tests/agents/test_examples.py",
    "tests/rl/test_run.py",
    "tests/train/test_parallel.py",
    "tests/pretrain/test_stage.py",
    "tests/inference/test_llm.py",
    "tests/pretrain/test_parallel.py",
    "tests/gateway/test_server.py",
    "tests/sft/test_stage.py",
    "tests/pipelines/test_run.py",
    "tests/pipelines/swe/test_pipeline.py",
    "tests/pipelines/terminal/test_pipeline.py",
    "tests/pipelines/test_questions.py",
    "tests/trials/test_run.py",
    "tests/sandbox/test_namespace.py",
    "tests/sandbox/test_escape.py",
    "tests/sandbox/test_container.py",
    "tests/sandbox/test_contract.py",
    "tests/sandbox/test_image.py",
    "tests/sandbox/test_network.py",
    "tests/pool/test_processes.py",
    "tests/cluster/test_keeper.py",
    "tests/pool/test_pool.py",
    "tests/gateway/http/test_connection.py",
    "tests/rl/test_eval_attempts.py",
    "tests/pool/test_batch.py",
    "tests/sandbox/test_kill.py",
    "tests/sandbox/test_process.py",
    "tests/rl/test_command_attempt.py",
    "tests/tasks/test_survey.py",
    "tests/gateway/calls/test_notices.py",
    "tests/gateway/episodes/test_retry_http.py",
    "tests/gateway/episodes/test_retry_lost.py",
    "tests/agents/test_command.py",
    "tests/test_cli_agent.py",
    "tests/gateway/test_security.py",
    "tests/corpus/test_build.py",
    "tests/kernels/test_arithmetic.py",
    "tests/rl/test_trainer.py",
    "tests/rl/test_loop_kind.py",
    "tests/agents/test_white_box.py",
    "tests/pool/test_sqlite.py",
    "tests/tasks/test_cheat.py",
    "tests/tasks/folders/test_verification.py",
    "tests/pipelines/test_distill.py",
    "tests/gateway/test_shutdown.py",
    "tests/evaluate/test_run.py",
    "tests/page/test_app.py",
    "tests/model/test_hub.py",
)
"""Files whose tests wait for browsers, timeouts, databases and other processes; first those that take longest."""
WAITERS = ("gw2", "gw3")
"""The workers that run these files, if there are any of these names, and then end: others that computed would slow the
first two down. Those run what is not begun when they have nothing else left."""
IMPORTING = (
    "tests/model/test_checkpoint.py",
    "tests/model/test_gguf.py",
    "tests/model/test_transformer.py",
    "tests/model/test_parity.py",
    "tests/model/test_plan.py",
    "tests/model/test_convert.py",
    "tests/model/test_tree_plan.py",
    "tests/model/test_fp8.py",
    "tests/train/test_loss.py",
    "tests/test_benchmarks.py",
)
"""Files whose tests load the networks of transformers or torch's compiler, which takes seconds in every process."""
IMPORTER = "gw0"
"""The worker that runs these files, before all others. Another runs one of them only when it has nothing else left."""
TESTS = Path(__file__).parent
CHECKED = "test_contract.py"
"""The file that `make check` runs."""


def is_whole(arguments: Sequence[str]) -> bool:
    """Whether pytest collects all tests. `arguments`: the files and folders that it is given."""
    return [Path(each).absolute() for each in arguments] == [TESTS]


def is_waiter(arguments: Sequence[str]) -> bool:
    """Whether this process runs files of `WAITING` alone and need not import the others, half of what a worker
    imports. Every worker collects files and folders that are named one by one."""
    return os.environ.get("PYTEST_XDIST_WORKER") in WAITERS and is_whole(arguments)


def is_fast(path: Path) -> bool:
    """Whether `make test-fast` runs a file: it loads no network, starts no process, and `make check` leaves it out."""
    return cost_of(path) == Cost.LIGHT and not is_waiting(path) and path != TESTS / CHECKED


def is_waiting(path: Path) -> bool:
    return path.is_relative_to(TESTS) and path.relative_to(TESTS.parent).as_posix() in WAITING


class WaitingApart(LoadFileScheduling):  # type: ignore[misc]
    def _check_nodes_have_same_collection(self) -> bool:
        collections = self.registered_collections
        parts = {node: tests for node, tests in collections.items() if node.gateway.id in WAITERS}
        others = [tests for node, tests in collections.items() if node not in parts]
        if parts and others:
            # Of the others' tests they collect a part. The first collection is the one that is scheduled.
            for node in parts:
                del collections[node]
            is_same = super()._check_nodes_have_same_collection()
            collections.update(parts)
            waiting = sorted(test for test in others[0] if self._split_scope(test) in WAITING)
            if all(sorted(part) == waiting for part in parts.values()):
                return bool(is_same)
        return bool(super()._check_nodes_have_same_collection())

    def _assign_work_unit(self, node: WorkerController) -> None:
        is_waiter = node.gateway.id in WAITERS
        waiting = [file for file in WAITING if file in self.workqueue]
        wanted = waiting if is_waiter else [file for file in self.workqueue if file not in waiting]
        importing = [file for file in IMPORTING if file in wanted]
        if importing and not is_waiter:
            others = [file for file in wanted if file not in importing]
            wanted = importing + others if node.gateway.id == IMPORTER else others + importing
        if wanted:
            self.workqueue.move_to_end(wanted[0], last=False)
        elif is_waiter:
            node.shutdown()
            return
        super()._assign_work_unit(node)
