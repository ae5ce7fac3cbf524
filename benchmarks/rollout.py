"""The rollout engine: ours, its peers and the limit of the machine.

cpu: SmolLM2-135M on two threads against vLLM and transformers. gpu: decode steps of `m2-mini` and of a slice of M2
against the memory floor, and against transformers' continuous batching. agent: tokens computed over unique tokens in an
agent workload. speculation: against plain decoding, with modules trained here. The files rollout_*.py say how each is
measured. By default all parts that this machine can measure run, with --quick those that have bars on a CPU; --tiny
runs the gpu part small, on any machine.

    python benchmarks/rollout.py [--json] [--quick] [--part cpu|gpu|agent|speculation] [--tiny]
        [--keep FOLDER] [--train-only] [--depths] [--batches B …]
"""

import logging
from pathlib import Path

import torch
from report import Bar, arguments, finish
from rollout_agent import agent
from rollout_cpu import cpu
from rollout_gpu import gpu
from rollout_speculation import speculation

PARTS = ("cpu", "gpu", "agent", "speculation")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--tiny", action="store_true", help="the gpu part with a small network, to see that it runs")
    parser.add_argument("--keep", type=Path, help="where speculation keeps its trained model, or finds it")
    parser.add_argument("--train-only", action="store_true", help="speculation trains what it will measure, for --keep")
    parser.add_argument("--depths", action="store_true", help="speculation at every fixed depth beside the chosen one")
    parser.add_argument("--batches", type=int, nargs="+", default=[], help="of speculation, instead of all")
    options = parser.parse_args()
    if options.train_only and options.keep is None:
        parser.error("--train-only: nothing would be left of it; give --keep FOLDER")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    bars: list[Bar] = []
    for part in [options.part] if options.part else PARTS:
        print(part, flush=True)
        if part == "cpu" and (options.part or not has_gpu):
            bars += cpu(options.quick)
        elif part == "gpu" and (has_gpu or options.tiny):
            bars += gpu(device, is_tiny=options.tiny)
        elif part == "agent":
            bars += agent(device, is_quick=options.quick)
        elif part == "speculation" and (options.part or not options.quick):
            bars += speculation(
                device,
                is_quick=options.quick,
                keep=options.keep,
                only_trains=options.train_only,
                batches=options.batches,
                has_depths=options.depths,
            )
        else:
            print("  not measured on this machine")
    finish(bars, options.json)


if __name__ == "__main__":
    main()
