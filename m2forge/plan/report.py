"""Plans as text, and as JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from m2forge.plan.gpu import ERRORS, GPU
from m2forge.plan.gpu_split import Split
from m2forge.plan.parallel_layout import Plan, Workload, needs_pipeline

if TYPE_CHECKING:
    # It imports torch, which plans need only to be measured.
    from m2forge.plan.measure import Calibration

MAX_REFUSED = 5
"""Layouts shown of those that do not fit."""
MAX_SPLITS = 5
"""Splits of the GPUs shown."""


def render(workload: Workload, plans: list[Plan], gpu: GPU, num_gpus: int, price: float, top: int) -> str:
    batch, fitting = workload.batch, [plan for plan in plans if plan.fits]
    refused = [plan for plan in plans if not plan.fits]
    trained = f"{workload.optimizer.kind}{'' if workload.lora is None else ', LoRA'}"
    lines = [
        f"{workload.name}: micro-batches of {batch.num_tokens:,} tokens, paths up to {batch.context:,}, {trained}",
        f"{num_gpus} × {gpu.name} at ${price:g} per GPU hour; rates: {gpu.rates.origin}",
        ERRORS.describe(gpu.name, num_gpus),
        "",
    ]
    if fitting:
        width = max(len(str(plan.layout)) for plan in fitting[:top])
        lines.append(_row(width, "layout", "GB per GPU", "step s", "tokens/s", "$/M tokens", "bottleneck"))
        for plan in fitting[:top]:
            cells = (f"{plan.memory.total / 1e9:.1f}", _short(plan.step_s), f"{plan.tokens_per_s:,.0f}")
            cost = f"{plan.dollars_per_million:.3g}"
            lines.append(_row(width, str(plan.layout), *cells, cost, plan.bottleneck))
        if len(fitting) > top:
            lines.append(f"and {len(fitting) - top} more that fit")
        lines += ["", *_details(fitting[0])]
    else:
        lines.append(f"no layout fits on {num_gpus} × {gpu.name}")
    if refused:
        lines += ["", f"{len(refused)} layouts do not fit:"]
        lines += [f"  {plan.layout}: {plan.reason}" for plan in refused[:MAX_REFUSED]]
    if (words := needs_pipeline(plans)) is not None:
        lines += ["", words]
    return "\n".join(lines)


def _details(plan: Plan) -> list[str]:
    lines = [f"{plan.layout}: memory at its peak, {plan.memory.moment}"]
    components = sorted(plan.memory.components.items(), key=lambda item: -item[1])
    lines += [f"  {name:<22}{size / 1e9:>10.2f} GB" for name, size in components]
    lines.append("seconds of a step")
    parts = sorted(plan.parts.items(), key=lambda item: -item[1])
    lines += [f"  {name:<22}{_short(seconds):>10} s" for name, seconds in parts if seconds > 0]
    exchanged = [(axis, size) for axis, size in plan.link_bytes.items() if size]
    if exchanged:
        lines.append("bytes that a GPU receives per step")
        lines += [f"  {axis:<22}{size / 1e9:>10.2f} GB" for axis, size in exchanged]
    return lines


def render_splits(splits: list[Split], num_gpus: int, gpu: GPU, sampling: str) -> str:
    """`sampling`: the given rates, in words."""
    best = splits[0]
    balance, num_training = best.balance, best.plan.layout.num_gpus
    steps = f"simulated over {balance.num_steps} steps"
    lines = [
        "",
        f"{num_gpus} × {gpu.name} split between trainer and samplers, {steps} ({sampling})",
        _wide_row("GPUs train", "samplers", "tokens/s", "steps/s", "trainer waits", "samplers wait", "$/M tokens"),
        *[
            _wide_row(
                str(split.plan.layout.num_gpus),
                str(split.num_samplers),
                f"{split.tokens_per_s:,.0f}",
                f"{split.balance.num_steps / split.balance.seconds:.3g}",
                f"{split.balance.trainer_waits:.0%}",
                f"{split.balance.sampler_waits:.0%}",
                f"{split.dollars_per_million:.3g}",
            )
            for split in splits[:MAX_SPLITS]
        ],
    ]
    idle = f", {best.num_idle} GPUs idle" if best.num_idle else ""
    return "\n".join(
        [
            *lines,
            f"best: {num_training} GPUs train ({best.plan.layout}), cluster.samplers = {best.num_samplers}{idle}",
            f"  {balance.tokens_per_s:,.0f} tokens/s sampled",
            f"  lag of a unit: {balance.mean_lag:.1f} on average, {balance.max_lag} at most",
            f"  {best.verdict}",
        ]
    )


def render_calibration(calibration: "Calibration") -> str:
    whole, share = calibration.rank.network, calibration.timed[0].step
    parts = [f"{share.network.num_layers} of {whole.num_layers} layers"]
    if whole.moe is not None and share.network.moe is not None:
        parts.append(f"{share.network.moe.num_experts} of {whole.moe.num_experts} experts")
    if share.lora is not None:
        parts.append(f"adapters of rank {share.lora.rank}")
    lines = [
        "",
        f"one rank's share, timed: {', '.join(parts)}; predicted with the rates before, and fitted to these steps",
        _wide_row("layers", "tokens", "longest path", "seconds", "before", "fitted"),
    ]
    for one in calibration.timed:
        batch, missed = one.step.batch, [predicted / one.seconds - 1 for predicted in (one.before_s, one.fitted_s)]
        sizes = (str(one.step.network.num_layers), f"{batch.num_tokens:,}", f"{batch.context:,}")
        lines.append(_wide_row(*sizes, _short(one.seconds), *(f"{error:+.1%}" for error in missed)))
    return "\n".join(lines)


def _wide_row(*cells: str) -> str:
    return "".join(f"{cell:>15}" for cell in cells)


def to_json(
    workload: Workload, plans: list[Plan], gpu: GPU, splits: list[Split], calibration: "Calibration | None" = None
) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "gpu": gpu.name,
        "rates": asdict(gpu.rates),
        "errors": asdict(ERRORS),
        "pipeline": needs_pipeline(plans),
        "splits": [
            {
                "training_gpus": split.plan.layout.num_gpus,
                "num_samplers": split.num_samplers,
                "num_idle": split.num_idle,
                "layout": asdict(split.plan.layout),
                "tokens_per_s": split.tokens_per_s,
                "dollars_per_million": split.dollars_per_million,
                "simulation": asdict(split.balance) | {"verdict": split.verdict},
            }
            for split in splits
        ],
        "timed": [
            {
                "num_layers": one.step.network.num_layers,
                "num_experts": 0 if one.step.network.moe is None else one.step.network.moe.num_experts,
                "num_tokens": one.step.batch.num_tokens,
                "context": one.step.batch.context,
                "seconds": one.seconds,
                "before_s": one.before_s,
                "fitted_s": one.fitted_s,
            }
            for one in (() if calibration is None else calibration.timed)
        ],
        "plans": [
            asdict(plan)
            | {"fits": plan.fits, "bottleneck": plan.bottleneck, "reason": None if plan.fits else plan.reason}
            for plan in plans
        ],
    }


def _row(width: int, layout: str, *cells: str) -> str:
    *numbers, last = cells
    return f"{layout:<{width}}" + "".join(f"{cell:>12}" for cell in numbers) + f"  {last}"


def _short(seconds: float) -> str:
    return f"{seconds:.3g}"
