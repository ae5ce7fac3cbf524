"""`python -m m2forge` is the `m2forge` command, from a checkout with nothing installed but the dependencies."""

import sys

from m2forge.cli import main

if __name__ == "__main__":
    sys.exit(main())
