"""`benchmarks/scale.py --part plan`: what `m2forge plan` predicts, beside training steps that the train engine runs.

Four configurations calibrate the rates of the GPU, from a guess that knows only its datasheet; thirteen others are
predicted with them. Peak memory is predicted from the configuration alone. Without a GPU, or with --quick, sixteen tiny
configurations run on the CPU, where torch counts no memory and only the ratio of seconds is shown.
"""

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch
from report import Bar, print_table
from scale_walk import qwen3_30b_a3b

from m2forge.model.config import AttentionConfig, ModelConfig
from m2forge.model.preset import preset
from m2forge.plan.gpu import DATASHEETS, REFERENCE, Rates
from m2forge.plan.measure import fit, measure_step
from m2forge.plan.work import step_work
from m2forge.train.activation import MicroBatch
from m2forge.train.config import OptimizerConfig, WalkConfig
from m2forge.train.memory import TrainingStep, rank_memory

NUM_CALIBRATING = 4
LIMIT_S = 320.0
"""No configuration starts after this many seconds; those left out are named."""
CPU_START = Rates(5e10, 3e10, 2e10, 2e10, 5e9, 1e-3, "a guess to start from")


def dense(hidden: int, layers: int, width: int, heads: int, kv_heads: int, vocab: int = 32_000) -> ModelConfig:
    head_dim = hidden // heads
    attention = AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=head_dim)
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        intermediate_size=width,
        attention=attention,
        tied_head=True,
        max_context=1 << 18,
    )


def step(network: ModelConfig, tokens: int, context: int, **changes: object) -> TrainingStep:
    batch = MicroBatch(tokens, context, tokens, network.num_mtp, is_even=tokens % context == 0)
    return replace(TrainingStep(network, OptimizerConfig(), batch), **changes)  # type: ignore[arg-type]


def gpu_steps() -> dict[str, TrainingStep]:
    mini, one = preset("m2-mini").model_copy(update={"max_context": 1 << 18}), dense(2048, 8, 8192, 32, 8)
    small = dense(576, 30, 1536, 9, 3, 49_152)
    return {
        "dense 2048 x 8 layers, 32K, walk": step(one, 32_768, 32_768, walk=WalkConfig()),
        "m2-mini, 8 x 4096": step(mini, 32_768, 4096),
        "m2-mini x 6 layers, 1 x 32768": step(mini.with_layers(6), 32_768, 32_768),
        "SmolLM2-135M, 2 x 2048": step(small, 4096, 2048),
        "dense 2048 x 8 layers, 4 x 4096": step(one, 16_384, 4096),
        "m2-mini, 16 x 2048": step(mini, 32_768, 2048),
        "m2-mini, 1 MTP module, 4 x 4096": step(mini.model_copy(update={"num_mtp": 1}), 16_384, 4096),
        "m2-mini, 8 x 4096, recompute block": step(mini, 32_768, 4096, recompute="block"),
        "m2-mini, 2 packs of 4 x 4096": step(mini, 16_384, 4096, num_batches=2),
        "m2-mini x 6 layers, 64K, walk": step(mini.with_layers(6), 65_536, 65_536, walk=WalkConfig()),
        "m2-mini, uneven documents": step(mini, 32_768, 6000),
        "M2 x 1 layer, 2 x 8192": step(preset("m2").with_layers(1), 16_384, 8192),
        "Qwen3-30B-A3B x 4 layers, 4 x 4096": step(qwen3_30b_a3b().with_layers(4), 16_384, 4096),
        "dense 2048 x 8 layers, 1 x 16384": step(one, 16_384, 16_384),
        "dense 3072 x 6 layers, 8 x 4096": step(dense(3072, 6, 8192, 24, 8), 32_768, 4096),
        "SmolLM2-135M, 8 x 4096": step(small, 32_768, 4096),
        "SmolLM2-360M, 4 x 4096": step(dense(960, 32, 2560, 15, 5, 49_152), 16_384, 4096),
    }


def cpu_steps() -> dict[str, TrainingStep]:
    """Tiny stand-ins, to run the script where there is no GPU."""
    tiny = preset("m2-tiny").model_copy(update={"num_mtp": 0}).with_layers(2)
    small = dense(128, 2, 256, 4, 2, 512)
    on_cpu: dict[str, object] = {"device": "cpu", "item_bytes": 4, "is_compiled": False}
    found: dict[str, TrainingStep] = {}
    for name, network in (("m2-tiny x 2 layers", tiny), ("dense 128 x 2 layers", small)):
        for tokens, context in ((64, 32), (64, 64), (128, 64), (128, 128)):
            found[f"{name}, {tokens // context} x {context}"] = step(network, tokens, context, **on_cpu)
            again = step(network, tokens, context, recompute="block", **on_cpu)
            found[f"{name}, {tokens // context} x {context}, recompute block"] = again
    return found


def plan(quick: bool) -> list[Bar]:
    is_cuda = torch.cuda.is_available() and not quick
    device = torch.device("cuda" if is_cuda else "cpu")
    steps, start = (gpu_steps(), _gpu_guess()) if is_cuda else (cpu_steps(), CPU_START)
    measured, left_out, began_s = {}, [], time.monotonic()
    for name, found in steps.items():
        if time.monotonic() - began_s > LIMIT_S:
            left_out.append(name)
            continue
        measured[name] = measure_step(found, device, num_steps=3 if is_cuda else 1)
        print(f"  {time.monotonic() - began_s:5.0f} s  {name}: {measured[name].seconds * 1e3:.1f} ms", flush=True)
    names = list(measured)
    calibrating = names[:NUM_CALIBRATING]
    rates = fit([(steps[name], measured[name].seconds) for name in calibrating], start, f"scale.py at {_commit()}")
    rows, time_errors, memory_errors = [], [], []
    for name in names:
        seconds, real = step_work(steps[name]).seconds(rates), measured[name]
        error = seconds / real.seconds - 1
        predicted = rank_memory(steps[name])
        row = [name, "calibrates" if name in calibrating else "tried", f"{real.seconds * 1e3:.1f}"]
        row += [f"{seconds * 1e3:.1f}", f"{error:+.1%}"]
        if is_cuda:
            missed = predicted.total / real.peak_bytes - 1
            row += [f"{real.peak_bytes / 2**30:.2f}", f"{predicted.total / 2**30:.2f}", f"{missed:+.1%}"]
            row += [f"{real.reserved_bytes / 2**30:.2f}", f"{real.other_bytes / 2**30:.2f}", predicted.moment]
            memory_errors.append(abs(missed))
        rows.append(tuple(row))
        if name not in calibrating:
            time_errors.append(abs(error))
    columns = ("configuration", "", "ms", "predicted ms", "error")
    more = ("GiB", "predicted GiB", "error", "reserved GiB", "outside torch GiB", "peak at")
    print_table(f"Training steps on {_device_name(device)}", columns + (more if is_cuda else ()), rows)
    print(f"rates: {rates}")
    if left_out:
        print(f"left out after {LIMIT_S:.0f} s: {', '.join(left_out)}")
    bars = [Bar.at_most("configurations left out", len(left_out), 0)]
    if is_cuda:
        bars.append(Bar.at_most("largest error of the step time, tried", max(time_errors, default=1.0), 0.15))
        bars.append(Bar.at_most("largest error of the peak memory", max(memory_errors), 0.08))
    return bars


def _gpu_guess() -> Rates:
    """Shares of the datasheet's peaks, to start from."""
    name = torch.cuda.get_device_name()
    sheet = DATASHEETS[next((short for short in DATASHEETS if short in name), REFERENCE)]
    products, flex = 0.7 * sheet.peak_flops, 0.5 * sheet.peak_flops
    return Rates(products, products, products, flex, 0.5 * sheet.bandwidth, 1e-3, "a guess to start from")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _commit() -> str:
    root = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return found.stdout.strip() or "an unknown commit"
