"""What training on many GPUs rests on, part by part.

`--part weights`: bytes and seconds of a policy version published as the elements that changed, beside a whole copy and
beside changes with 32-bit indices. Float32 masters move by ±lr, as Adam's first steps do, and are rounded to bfloat16,
so the share of changed elements is that of a run at this learning rate. Replicas that apply the changes to the version
before must hold the bits of the whole copy. Then whole versions go to one and four processes (scale_weights.py), and
on a GPU to a sampler that decodes (scale_weights_gpu.py).

`--part walk`: see scale_walk.py.

`--part checkpoints`: memory, time and bytes of checkpoints that two ranks write (scale_checkpoint.py).

`--part mesh`: a step of two processes on each axis of the mesh, beside its limit (scale_mesh.py).

`--part plan`: what `m2forge plan` predicts of time and memory, beside real training steps (scale_plan.py).

`--part pool`: one pool that many processes write, beside a loop and a trainer (scale_pool.py).

`--part ring`: RL rings over the real pool, beside their simulation (scale_ring.py); without `--quick` also runs of
`m2forge rl` (scale_ring_run.py).

`--part agents`: thousands of concurrent attempts on two agent hosts and two gateways (scale_agents.py).

    python benchmarks/scale.py [--part NAME] [--json] [--quick]
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from report import Bar, arguments, finish, print_table
from scale_agents import agents
from scale_checkpoint import checkpoints
from scale_mesh import mesh
from scale_plan import plan
from scale_pool import pool
from scale_ring import ring
from scale_walk import walk
from scale_weights import publish_to_replicas
from scale_weights_gpu import updates_on_gpu

from m2forge.model.build import build
from m2forge.model.checkpoint import fill, load_model, open_source
from m2forge.model.delta import DELTA_FILE
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.weights.store import WeightStore

T = TypeVar("T")
LEARNING_RATES = (2e-7, 5e-7, 1e-6)
NUM_REPLICAS = 2
INDEX_BYTES = 4
"""A 32-bit index, by which such changes are usually stored."""


class Masters:
    """Float32 masters of a bfloat16 network."""

    def __init__(self, model: Transformer) -> None:
        self._weights = [weight for weight in model.parameters() if weight.dtype == torch.bfloat16]
        generator = torch.Generator().manual_seed(0)
        self._masters = [
            weight.detach().float() * (1 + torch.rand(weight.shape, generator=generator) / 256)
            for weight in self._weights
        ]
        self._generator = generator
        self._round()

    def move(self, lr: float) -> float:
        """One step; returns the share of bfloat16 elements that changed."""
        before = [weight.detach().clone() for weight in self._weights]
        for master in self._masters:
            master += lr * (2 * torch.randint(0, 2, master.shape, generator=self._generator) - 1)
        self._round()
        num_changed = sum(int((old != new).sum()) for old, new in zip(before, self._weights, strict=True))
        return num_changed / sum(old.numel() for old in before)

    @torch.no_grad()
    def _round(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.copy_(master)


def same_bits(one: Transformer, other: Transformer) -> bool:
    theirs = other.state_dict()
    return all(
        torch.equal(mine.view(torch.uint8), theirs[name].view(torch.uint8)) for name, mine in one.state_dict().items()
    )


def weights(quick: bool) -> list[Bar]:
    torch.manual_seed(0)
    config = preset("m2-mini").with_layers(1 if quick else 4).model_copy(update={"vocab_size": 8192})
    model = build(config, torch.device("cpu"), torch.bfloat16)
    masters, rows, bars = Masters(model), [], []
    with tempfile.TemporaryDirectory() as scratch:
        store = WeightStore(Path(scratch), "run", anchor_every=2 * len(LEARNING_RATES))
        whole_s, newest = timed(partial(store.publish, model, 0))
        num_bytes = sum(path.stat().st_size for path in newest.glob("*.safetensors"))
        replicas = [load_model(newest) for _ in range(NUM_REPLICAS)]
        fill_s, _ = timed(partial(fill, replicas[0], open_source(newest)))
        rows.append(("whole", "100%", f"{num_bytes / 1e6:.1f}", "", f"{whole_s:.2f}", f"{fill_s:.2f}"))
        num_different = 0
        for step, lr in enumerate(LEARNING_RATES, 1):
            share, before = masters.move(lr), newest
            publish_s, newest = timed(partial(store.publish, model, step))
            size = (newest / DELTA_FILE).stat().st_size
            per_element = size / (share * sum(weight.numel() for weight in model.parameters()))
            applied_s = 0.0
            for replica in replicas:
                applied_s, _ = timed(partial(fill, replica, open_source(newest), before))
                num_different += not same_bits(replica, model)
            rows.append(
                (
                    f"changes, lr {lr:.0e}",
                    f"{100 * share:.1f}%",
                    f"{size / 1e6:.1f}",
                    f"{per_element:.2f} ({INDEX_BYTES + 2} with 32-bit indices)",
                    f"{publish_s:.2f}",
                    f"{applied_s:.2f}",
                )
            )
            bars.append(Bar.at_most(f"bytes per changed element, lr {lr:.0e}", per_element, 3.5))
    columns = ("version", "elements changed", "MB", "bytes per changed element", "publish s", "apply s")
    num_parameters = sum(weight.numel() for weight in model.parameters())
    print_table(f"Policy versions of {num_parameters / 1e6:.0f}M parameters", columns, rows)
    bars += [Bar.at_most("replicas that differ in a bit", num_different, 0), *publish_to_replicas(model)]
    return [*bars, *updates_on_gpu()] if torch.cuda.is_available() and not quick else bars


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds of a call, and its result."""
    started_s = time.perf_counter()
    result = call()
    return time.perf_counter() - started_s, result


PARTS = {
    "weights": weights,
    "walk": walk,
    "plan": plan,
    "checkpoints": checkpoints,
    "mesh": mesh,
    "pool": pool,
    "ring": ring,
    "agents": agents,
}
QUICK_PARTS = ["weights", "checkpoints"]
"""Those that together take a minute on two cores."""


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--part", choices=PARTS, help="one part; by default all, with --quick those of a minute")
    options = parser.parse_args()
    names = [options.part] if options.part else QUICK_PARTS if options.quick else list(PARTS)
    if options.quick and not options.part:
        print(f"parts {', '.join(names)}; name another with --part: {', '.join(PARTS.keys() - {*names})}")
    finish([bar for name in names for bar in PARTS[name](options.quick)], options.json)


if __name__ == "__main__":
    main()
