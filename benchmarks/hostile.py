"""What hostile input costs: answers that a policy may write to a verifier, and clients that attack a gateway.

    python benchmarks/hostile.py [--json] [--quick] [--part verdicts|attack]

Each part is a file of its own, `hostile_PART.py`, whose `measure(is_quick)` prints its tables and gives its bars.
"""

import importlib
from collections.abc import Callable, Sequence

from report import Bar, arguments, finish

PARTS = ("verdicts", "attack")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--part", choices=PARTS, action="append", help="one part alone; may be given again")
    args = parser.parse_args()
    bars: list[Bar] = []
    for part in args.part or PARTS:
        measure: Callable[[bool], Sequence[Bar]] = importlib.import_module(f"hostile_{part}").measure
        bars += measure(args.quick)
    finish(bars, args.json)


if __name__ == "__main__":
    main()
