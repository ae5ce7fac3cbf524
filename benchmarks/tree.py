"""Training over token trees against training over rows: speed, memory and FLOPs on the same completion calls.

On one GPU `m2-mini` in bfloat16, forward + backward with a weighted log-probability at each loss edge, compiled blocks,
no recomputation, packs of at most 204,800 tokens. The baselines run the same network: one row per call under a document
mask, and linear rows, in which calls that continue one another are one row, with each of the fastest attentions there
are for them. On a CPU: `m2-tiny` in float32 on the agent workload scaled down. Then, on any machine, how fast trees are
built, beside AReaL's trie where that is installed (tree_peer.py says how), and how well they are cut.

    python benchmarks/tree.py [--json] [--quick] [--workload NAME] [--part pass|build|cut] [--baseline NAME]
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from report import Bar, arguments, finish, print_table
from tree_build import building, cutting
from tree_pass import (
    Measured,
    Pass,
    PlanOf,
    Work,
    as_rows,
    cudnn_rows,
    documents,
    flash_rows,
    forget,
    lengths_within,
    measure,
    measure_in_turns,
    row_passes,
    tree_pass,
)
from tree_workload import SMALL_AGENT, WORKLOADS, Row, Workload, build_tree, call_rows, linear_rows, pack_rows

from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.preset import preset
from m2forge.tree.flat import flatten
from m2forge.tree.pack import pack_trees


class Kind(StrEnum):
    """What a workload is run as."""

    TREE = "tree"
    CALLS = "calls"
    """Rows, one per call."""
    LINEAR = "linear"
    """Rows in which calls that continue one another are one."""
    MEMORY = "memory"
    """As many tokens as the tree, taken for rows: what memory is compared with."""


@dataclass(frozen=True)
class Machine:
    """What is run where."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    budget: int
    """Tokens of a pack, at most."""
    multiple: int
    """Trees are padded to multiples of it."""
    share: float
    """What part of the FLOP ratio over rows per call the speed has to reach."""
    mask: str
    """How rows under a document mask are attended to."""
    linear: Mapping[str, PlanOf]
    """Attentions for linear rows."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def gpu() -> Machine:
    return Machine(
        preset("m2-mini"),
        torch.device("cuda"),
        torch.bfloat16,
        budget=204_800,
        multiple=1024,
        share=0.85,
        mask="FlexAttention",
        linear={"cuDNN": cudnn_rows, "FlexAttention": documents, "variable-length flash": flash_rows},
    )


def cpu() -> Machine:
    return Machine(
        preset("m2-tiny").model_copy(update={"num_mtp": 0}),
        torch.device("cpu"),
        torch.float32,
        budget=4096,
        multiple=1,
        share=0.7,
        mask="our kernel",
        linear={"our kernel": documents},
    )


@dataclass(frozen=True)
class Job:
    kind: Kind
    name: str
    passes: Sequence[Pass]
    work: Work
    """The work of all calls."""
    scale: float = 1.0
    """All FLOPs over those of the passes."""

    @property
    def is_comparable(self) -> bool:
        """Whether its loss is that of all calls."""
        return self.scale == 1.0 and self.kind != Kind.MEMORY


@dataclass(frozen=True)
class Result:
    job: Job
    measured: Measured

    @property
    def seconds(self) -> float:
        """Scaled to all calls."""
        return self.measured.seconds * self.job.scale


def compare(workload: Workload, machine: Machine, kinds: Collection[Kind]) -> list[Bar]:
    """Time a workload as a tree and as rows."""
    title = f"{workload.name}: {workload.text}"
    print(title, flush=True)
    results = run_jobs(machine, [job for job in make_jobs(workload, machine) if job.kind in kinds])
    print_results(title, machine, results)
    return bars_of(workload.name, machine, results)


def make_jobs(workload: Workload, machine: Machine) -> Iterator[Job]:
    """The tree first."""
    config = machine.config
    tree = build_tree(workload.calls(config.vocab_size), config.vocab_size)
    flats = pack_trees([tree], machine.budget)
    # Advantages of both signs, in a token mean.
    advantage_S = np.random.default_rng(1).standard_normal(len(tree.samples))
    weight_S = (advantage_S / sum(flat.num_edges for flat in flats)).astype(np.float32)
    passes = [tree_pass(flat, weight_S, machine.device, machine.multiple) for flat in flats]
    yield Job(Kind.TREE, "token tree", passes, Work.sum([Work.of_tree(config, flat) for flat in flats]))

    def over_rows(kind: Kind, name: str, plan_of: PlanOf, rows: Sequence[Row], every: int = 1) -> Job:
        chosen = sorted(rows, key=lambda row: row.num_tokens)[every // 2 :: every]
        work, part = (Work.of_rows(config, some) for some in (rows, chosen))
        packs = pack_rows(chosen, machine.budget)
        name += f", every {every}th by length" if every > 1 else ""
        return Job(kind, name, row_passes(packs, weight_S, machine.device, plan_of), work, work.flops / part.flops)

    yield over_rows(Kind.CALLS, f"rows, one per call, {machine.mask}", documents, call_rows(tree), workload.every)
    linear = linear_rows(tree, flatten(tree))
    for name, plan_of in machine.linear.items():
        yield over_rows(Kind.LINEAR, f"linear rows, {name}", plan_of, linear)
    if not machine.is_gpu:
        return
    lengths = lengths_within(linear, passes[0].tokens_N.shape[0])
    work = Work.of_lengths(config, lengths, flats[0].num_edges)
    yield Job(Kind.MEMORY, "as many tokens in rows", [as_rows(passes[0], lengths)], work)


def run_jobs(machine: Machine, jobs: Sequence[Job]) -> list[Result]:
    """Attentions that this torch does not have are left out; whatever else fails ends the benchmark."""
    model = build(machine.config, machine.device, machine.dtype)
    if not machine.is_gpu:
        measured = measure_in_turns(model, [job.passes for job in jobs])
        results = [Result(job, each) for job, each in zip(jobs, measured, strict=True)]
        check_losses(results)
        return results
    model.compile_blocks()
    results = []
    for job in jobs:
        forget(model)
        try:
            result = Result(job, measure(model, job.passes))
        except ImportError as error:
            print(f"  {job.name}: not measured: {error}", flush=True)
            continue
        results.append(result)
        print(f"  {job.name}: {result.seconds:.3f} s, {result.measured.memory_gib:.1f} GiB", flush=True)
    check_losses(results)
    return results


def check_losses(results: Sequence[Result]) -> None:
    """What was timed is one computation, however it was laid out."""
    losses = {result.job.name: result.measured.loss for result in results if result.job.is_comparable}
    if max(losses.values()) - min(losses.values()) > 1e-3 * max(map(abs, losses.values())):
        raise AssertionError(f"the losses differ: {losses}")


def bars_of(name: str, machine: Machine, results: Sequence[Result]) -> list[Bar]:
    ours, bars = results[0], []
    for result in results:
        speed, share = _over(ours, result)
        if result.job.kind == Kind.CALLS:
            bars.append(Bar.at_least(f"{name}: share of the FLOP ratio over rows per call", share, machine.share))
            if name == "deep":
                bars.append(Bar.at_least(f"{name}: speed over rows per call", speed, 60.0))
        elif result.job.kind == Kind.MEMORY:
            ratio = ours.measured.memory_gib / result.measured.memory_gib
            bars.append(Bar.at_most(f"{name}: memory over as many tokens in rows", ratio, 1.05))
    linear = [result for result in results if result.job.kind == Kind.LINEAR]
    if linear and machine.is_gpu:
        fastest = min(linear, key=lambda result: result.seconds)
        title = f"{name}: speed over the fastest of {len(linear)} {fastest.job.name}"
        bars.append(Bar.at_least(title, _over(ours, fastest)[0], 1.0))
    if machine.is_gpu and name == "agent":
        bars.append(Bar.at_most(f"{name}: seconds of a step", ours.seconds, 0.52))
    return bars


def _over(ours: Result, other: Result) -> tuple[float, float]:
    """How many times as fast as the other, and what part of the FLOP ratio that is."""
    speed = other.seconds / ours.seconds
    return speed, speed / (other.job.work.flops / ours.job.work.flops)


def print_results(title: str, machine: Machine, results: Sequence[Result]) -> None:
    ours, *others = results
    where = "bfloat16, compiled blocks" if machine.is_gpu else "float32"
    print_table(
        f"{title}; {where}, at most {machine.budget:,} tokens a pack",
        ("", "tokens", "layers", "attention", "head", "TFLOP", "s", "TFLOP/s", "GiB", "loss"),
        [
            (
                result.job.name,
                f"{result.job.work.num_tokens:,}",
                *(f"{part / 1e12:.4g}" for part in result.job.work.terms),
                f"{result.job.work.flops / 1e12:.4g}",
                f"{result.seconds:.3f}",
                f"{result.job.work.flops / 1e12 / result.seconds:.4g}",
                f"{result.measured.memory_gib:.1f}" if machine.is_gpu else "",
                f"{result.measured.loss:.5f}" if result.job.is_comparable else "",
            )
            for result in results
        ],
    )
    print_table(
        "The token tree over",
        ("", "token ratio", "FLOP ratio", "speed ratio", "of the FLOP ratio"),
        [
            (
                other.job.name,
                f"{other.job.work.num_tokens / ours.job.work.num_tokens:.2f}",
                f"{other.job.work.flops / ours.job.work.flops:.2f}",
                f"{_over(ours, other)[0]:.2f}",
                f"{_over(ours, other)[1]:.0%}",
            )
            for other in others
        ],
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workload", choices=list(WORKLOADS), help="only this one")
    parser.add_argument("--part", choices=["pass", "build", "cut"], help="only the passes, the building, the cutting")
    parser.add_argument("--baseline", choices=[kind.value for kind in Kind], help="only this one beside the tree")
    options = parser.parse_args()
    kinds = [Kind.TREE, Kind(options.baseline)] if options.baseline else list(Kind)
    names = [options.workload] if options.workload else list(WORKLOADS)
    bars: list[Bar] = []
    if options.part in (None, "pass"):
        if torch.cuda.is_available() and not options.quick:
            for name in names:
                bars += compare(WORKLOADS[name], gpu(), kinds)
        elif "agent" in names:
            bars += compare(SMALL_AGENT, cpu(), kinds)
    if options.part in (None, "build"):
        bars += building([WORKLOADS[name] for name in names], with_peer=not options.quick)
    if options.part in (None, "cut"):
        bars += cutting(num_trees=20 if options.quick else 100)
    finish(bars, options.json)


if __name__ == "__main__":
    main()
