"""What the loop teaches beside success: to be fast where that pays, and modules that still foresee the policy.

speed: the same policy trained with β = 0 and with β > 0, wall clock per success on held-out tasks. mtp: acceptance of
drafts before training, after it, and after it without training the module. Both are small networks on two cores; the
files learning_*.py say how each is measured.

    python benchmarks/learning.py [--json] [--part speed|mtp] [--seed 0] [--folder DIR]
    python benchmarks/learning.py --quick                  that it runs: a few steps of everything
"""

import argparse
import tempfile
from pathlib import Path

import torch
from learning_mtp import measure_mtp
from learning_speed import measure_speed
from report import Bar, arguments, finish

PARTS = {"speed": measure_speed, "mtp": measure_mtp}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where models and runs go; kept, and what is complete is taken")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the configurations say of the other processes
    bars: list[Bar] = []
    for part in [options.part] if options.part else PARTS:
        print(part, flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder = (options.folder or Path(name)) / part
            bars += PARTS[part](folder, options.seed, is_quick=options.quick)
    finish(bars, options.json)


if __name__ == "__main__":
    main()
