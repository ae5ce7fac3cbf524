"""Which worker runs which files: two compute, and two others run only files whose tests wait for most of their time.

A worker collects only the files that it may run, because importing takes most of the time of collecting.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WAITING = (
    "tests/page/test_browser.py",
    "tests/test_install.py",
    "tests/rl/test_restart.py",
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
    "tests/model/test_lora.py",
    "tests/model/test_bounds.py",
    "tests/train/test_loss.py",
    "tests/test_benchmarks.py",
    "tests/test_gguf_header.py",
    "tests/text/test_chatml.py",
    "tests/text/test_template.py",
    "tests/text/test_tokenizer.py",
)
"""Files whose tests load the networks of transformers or torch's compiler, which takes seconds in every process."""
CLIENTS = (
    "tests/gateway/dialects/test_contract.py",
    "tests/gateway/dialects/test_anthropic_messages.py",
    "tests/gateway/dialects/test_openai_responses.py",
    "tests/gateway/dialects/test_openai_responses_agents.py",
    "tests/gateway/dialects/test_openai_responses_answer.py",
    "tests/gateway/calls/test_context.py",
    "tests/gateway/calls/test_parsed_stream.py",
    "tests/gateway/test_agents_sdk.py",
    "tests/gateway/test_mcp.py",
    "tests/gateway/test_sdk_anthropic.py",
    "tests/inference/test_server.py",
)
"""Files whose tests load the clients of Anthropic, of the Agents SDK or of MCP, thousands of modules."""
OWN = {"gw0": IMPORTING, "gw1": CLIENTS}
"""The files that one worker alone runs, before all others."""
TESTS = Path(__file__).parent


def is_collected(path: Path, arguments: Sequence[str]) -> bool:
    """Whether this process may run the tests of a file. `arguments`: what pytest collects; every worker collects files
    and folders that are named one by one."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or [Path(each).absolute() for each in arguments] != [TESTS] or not path.is_relative_to(TESTS):
        return True
    file = path.relative_to(TESTS.parent).as_posix()
    if worker in WAITERS:
        return file in WAITING
    is_alone = os.environ.get("PYTEST_XDIST_WORKER_COUNT") == "1"
    return is_alone or not any(file in files for owner, files in OWN.items() if owner != worker)


class WaitingApart(LoadFileScheduling):  # type: ignore[misc]
    _collected: dict[WorkerController, list[str]]
    """What each worker has collected."""

    def _check_nodes_have_same_collection(self) -> bool:
        """Each worker has collected a part: those that have collected a file must have the same tests of it."""
        self._collected = dict(self.registered_collections)
        files: dict[str, list[str]] = {}
        for collected in self._collected.values():
            own: dict[str, list[str]] = {}
            for test in collected:
                own.setdefault(self._split_scope(test), []).append(test)
            if any(files.setdefault(file, tests) != tests for file, tests in own.items()):
                return bool(super()._check_nodes_have_same_collection())
        # The first collection is the one that is scheduled: all tests, in the order of the worker that has most.
        most = sorted(self._collected.values(), key=len, reverse=True)
        first = next(iter(self._collected))
        self.registered_collections[first] = list(dict.fromkeys(itertools.chain(*most)))
        return True

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.registered_collections.update(self._collected)
        id, own = node.gateway.id, {self._split_scope(test) for test in self._collected[node]}
        waiting = [file for file in WAITING if file in self.workqueue]
        able = [file for file in self.workqueue if file in own]
        wanted = waiting if id in WAITERS else [file for file in able if file not in waiting] or able
        wanted = [file for file in OWN.get(id, ()) if file in wanted] or wanted
        if not wanted:
            node.shutdown()
            return
        self.workqueue.move_to_end(wanted[0], last=False)
        super()._assign_work_unit(node)
