"""Which worker runs which files: two compute, and a third runs only files whose tests wait for most of their time."""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WAITING = (
    "tests/page/test_browser.py",
    "tests/test_install.py",
    "tests/rl/test_faults.py",
    "tests/rl/test_attempts.py",
    "tests/agents/test_worker_pool.py",
    "tests/page/test_browser_runs.py",
    "tests/rl/test_loop.py",
    "tests/train/test_parallel.py",
    "tests/pool/test_processes.py",
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
)
"""Files whose tests wait for browsers, timeouts and databases, those that take longest first."""
WAITER = "gw2"
"""The worker that runs these files, if there is one of this name, and then ends: a third that computed would slow the
other two down. They run what it has not begun when they have nothing else left."""


class WaitingApart(LoadFileScheduling):  # type: ignore[misc]
    def _assign_work_unit(self, node: WorkerController) -> None:
        is_waiter = node.gateway.id == WAITER
        waiting = [file for file in WAITING if file in self.workqueue]
        wanted = waiting if is_waiter else [file for file in self.workqueue if file not in waiting]
        if wanted:
            self.workqueue.move_to_end(wanted[0], last=False)
        elif is_waiter:
            node.shutdown()
            return
        super()._assign_work_unit(node)
