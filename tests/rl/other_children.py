"""`m2forge rl` whose child processes start from another module than the product's."""

import sys

from m2forge import cli
from m2forge.rl import loop, servers


def run_loop(module: str) -> int:
    """Run the command line as `m2forge` would; returns the exit status."""
    for starts in (loop, servers):
        setattr(starts, "MODULE", module)  # noqa: B010  (it belongs to another module)
    return cli.main(sys.argv[1:])
