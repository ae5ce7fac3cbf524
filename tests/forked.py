"""Processes forked from a server that has imported torch: a fresh interpreter would spend seconds on it each time.

The server itself computes nothing, so that its children start without threads or locks of another's.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess

PRELOADED = (
    "m2forge.model.sharded_folder",
    "m2forge.pretrain.stage",
    "m2forge.rl.trainer",
    "m2forge.train.parallel",
    "tests.gateway.gateway_process",
    "tests.pool.worker",
    "torch._dynamo",
    "torch.distributed.fsdp",
)


def forked_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def start_command(*arguments: str) -> ForkServerProcess:
    """`m2forge ARGUMENTS` without output; the process ends with its exit status."""
    return start(_run_command, arguments)


def start(work: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """`work`: a function of a module, so that the process finds it."""
    process = forked_context().Process(target=work, args=arguments)
    process.start()
    return process


def _run_command(arguments: tuple[str, ...]) -> None:
    from m2forge import cli

    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    sys.exit(cli.main(list(arguments)))
