"""Plans as text, and as JSON."""

from dataclasses import asdict
from typing import Any

from m2forge.plan.gpu import GPU
from m2forge.plan.parallel_layout import Plan, Workload, needs_pipeline
from m2forge.plan.simulation import Balance

MAX_REFUSED = 5
"""Layouts shown of those that do not fit."""


def render(workload: Workload, plans: list[Plan], gpu: GPU, num_gpus: int, price: float, top: int) -> str:
    batch, fitting = workload.batch, [plan for plan in plans if plan.fits]
    refused = [plan for plan in plans if not plan.fits]
    trained = f"{workload.optimizer.kind}{'' if workload.lora is None else ', LoRA'}"
    lines = [
        f"{workload.name}: micro-batches of {batch.num_tokens:,} tokens, paths up to {batch.context:,}, {trained}",
        f"{num_gpus} × {gpu.name} at ${price:g} per GPU hour; rates: {gpu.rates.origin}",
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


def render_balance(balance: Balance, assumed: str) -> str:
    return "\n".join(
        [
            "",
            f"trainer and sampler, simulated over {balance.num_steps} steps ({assumed})",
            f"  {balance.tokens_per_s:,.0f} tokens/s sampled, {balance.num_steps / balance.seconds:.3g} steps/s",
            f"  lag of a unit: {balance.mean_lag:.1f} on average, {balance.max_lag} at most",
            f"  {balance.verdict}",
        ]
    )


def to_json(workload: Workload, plans: list[Plan], gpu: GPU, balance: Balance | None) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "gpu": gpu.name,
        "rates": asdict(gpu.rates),
        "pipeline": needs_pipeline(plans),
        "simulation": None if balance is None else asdict(balance) | {"verdict": balance.verdict},
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
