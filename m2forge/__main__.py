"""`python -m m2forge` runs the `m2forge` command from a checkout with only the dependencies installed."""

import sys

from m2forge.cli import main

if __name__ == "__main__":
    sys.exit(main())
