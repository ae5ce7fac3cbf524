"""Decode steps on one GPU against the memory they have to read, and against transformers' continuous batching.

Random weights in bfloat16. The floor of a decode step over B requests, with C tokens of context in the mean, is what
must pass through memory at least once, over the rate at which this run copies memory:

    weights of the layers, of the experts those that the step's tokens were sent to
    + head + B rows of the embedding
    + keys and values: layers · 2 · kv_width · (B · C read + B written)

A step's time is the wall clock's, host, sampling and all, over the steps in which every request decodes and none reads
its prompt. Layers and head apart: the same network is run again with half of its layers, which tells the time of one
layer; what is left of a step is head, sampling and host. The head's product is also timed alone.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peer import peer
from report import Bar, print_table
from rollout_serve import drain, last_chunks, make_core, random_prompts, serve
from torch import nn

from m2forge.model.build import build, skeleton
from m2forge.model.config import ModelConfig
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.protocols import Prompt
from m2forge.records import Sampling

GREEDY = Sampling(temperature=0.0)
EXPERT_STEPS = 4
"""New tokens of the run that counts the experts of its last step."""


@dataclass(frozen=True)
class Load:
    config: ModelConfig
    num_requests: int
    num_prompt: int
    num_new: int
    repeats: int = 3

    @property
    def context(self) -> int:
        return self.num_prompt + self.num_new


@dataclass(frozen=True)
class Decoded:
    """Measurements of decode steps: the median of the repeats."""

    step_s: float
    mean_context: float
    """Mean context length of a request."""


@dataclass(frozen=True)
class Bytes:
    """That a decode step must move."""

    experts: float
    other_layers: float
    head: float
    cache: float

    @property
    def layers(self) -> float:
        return self.experts + self.other_layers + self.cache

    @property
    def total(self) -> float:
        return self.layers + self.head


def gpu(device: torch.device, *, is_tiny: bool) -> list[Bar]:
    """`is_tiny`: the same with a small network and few tokens, to see that it runs; no bars."""
    bandwidth = copy_bandwidth(device, 1 << (22 if is_tiny else 30))
    print(f"copies move {bandwidth / 1e12:.3g} TB/s", flush=True)
    small = preset("m2-nano").model_copy(update={"num_mtp": 0})
    mini = Load(small, 8, 32, 12, repeats=1) if is_tiny else Load(preset("m2-mini"), 256, 512, 128)
    wide = Load(small, 1, 32, 12, repeats=1) if is_tiny else Load(preset("m2").with_layers(8), 1, 512, 128)
    bars = crowd(mini, device, bandwidth)
    free(device)
    bars += slice_of_m2(wide, device, bandwidth)
    return [] if is_tiny else bars


def crowd(load: Load, device: torch.device, bandwidth: float) -> list[Bar]:
    model = build(load.config, device, torch.bfloat16)
    ours, num_experts = decode(model, load), touched_experts(model, load)
    size = step_bytes(model, load.num_requests, ours.mean_context, num_experts)
    floor_s = size.total / bandwidth
    rate = load.num_requests / ours.step_s
    print(f"  m2forge: {ours.step_s * 1e3:.3g} ms a step, {rate:,.0f} tokens/s", flush=True)
    theirs = transformers_rate(load, model)
    print_table(
        f"{load.num_requests} requests, prompts of {load.num_prompt}, {load.num_new} new, mean context "
        f"{ours.mean_context:.0f}, {num_experts:.1f} experts a layer; {size.total / 1e9:.3g} GB a step, of which "
        f"experts {size.experts / 1e9:.3g}, cache {size.cache / 1e9:.3g}, head {size.head / 1e9:.3g}",
        ("decode steps only", "ms a step", "tokens/s", "of the floor", "ours is"),
        [
            ("memory floor", f"{floor_s * 1e3:.3g}", f"{load.num_requests / floor_s:,.0f}", "100%", ""),
            ("m2forge", f"{ours.step_s * 1e3:.3g}", f"{rate:,.0f}", f"{floor_s / ours.step_s:.1%}", ""),
            (
                "transformers, generate_batch",
                f"{load.num_requests / theirs * 1e3:.3g}",
                f"{theirs:,.0f}",
                f"{floor_s * theirs / load.num_requests:.2%}",
                f"{rate / theirs:.1f}x",
            ),
        ],
    )
    return [
        Bar.at_least(f"m2-mini, {load.num_requests} requests: share of the memory floor", floor_s / ours.step_s, 0.25),
        Bar.at_least(f"m2-mini, {load.num_requests} requests: decode over transformers", rate / theirs, 20.0),
    ]


def slice_of_m2(load: Load, device: torch.device, bandwidth: float) -> list[Bar]:
    config = load.config
    model = build(config, device, torch.bfloat16)
    whole, half = decode(model, load), decode(with_layers(model, config.num_layers // 2), load)
    layers_s = (whole.step_s - half.step_s) / (config.num_layers - config.num_layers // 2) * config.num_layers
    hidden_BD = torch.randn(load.num_requests, config.hidden_size, device=device, dtype=torch.bfloat16)
    head_s = device_s(lambda: model.logits(hidden_BD), device)
    size = step_bytes(model, load.num_requests, whole.mean_context, touched_experts(model, load))
    rows = [
        ("whole step", whole.step_s, size.total),
        (f"{config.num_layers} layers", layers_s, size.layers),
        ("head, sampling, host", whole.step_s - layers_s, size.head),
        ("the head's product alone", head_s, size.head),
    ]
    print_table(
        f"{config.num_layers} layers of M2, {load.num_requests} stream, prompt {load.num_prompt}, {load.num_new} new",
        ("decode steps only", "ms", "GB", "floor, ms", "of the floor"),
        [
            (name, f"{s * 1e3:.3f}", f"{b / 1e9:.3g}", f"{b / bandwidth * 1e3:.3f}", f"{b / bandwidth / s:.1%}")
            for name, s, b in rows
        ],
    )
    share = size.total / bandwidth / whole.step_s
    return [Bar.at_least(f"M2, {config.num_layers} layers, one stream: share of the memory floor", share, 0.5)]


def decode(model: Transformer, load: Load) -> Decoded:
    core = make_core(model, load.num_requests, load.context)
    steps_s, contexts = [], []
    for repeat in range(load.repeats + 1):  # the first warms up
        prompts = random_prompts(load.num_requests, load.num_prompt, model.config.vocab_size, seed=repeat)
        timed = serve(core, [Prompt(ids, load.num_new, GREEDY) for ids in prompts])
        # A token of each request is a step, however many of them run before the host looks.
        steps_s.append(load.num_requests / timed.decode_rate)
        contexts.append(load.num_prompt + timed.decode_mean)
    return Decoded(statistics.median(steps_s[1:]), statistics.mean(contexts[1:]))


def touched_experts(model: Transformer, load: Load) -> float:
    """Experts that one decode step sends tokens to, the mean over its layers."""
    core = make_core(model, load.num_requests, load.num_prompt + EXPERT_STEPS)
    prompts = random_prompts(load.num_requests, load.num_prompt, model.config.vocab_size, seed=100)
    chunks = last_chunks(core, [Prompt(ids, EXPERT_STEPS, GREEDY, returns_experts=True) for ids in prompts])
    experts_BLK = np.stack([chunk.experts[-1] for chunk in chunks if chunk.experts is not None])
    return float(np.mean([np.unique(experts_BLK[:, layer]).size for layer in range(experts_BLK.shape[1])]))


def step_bytes(model: Transformer, num_requests: int, mean_context: float, num_experts: float) -> Bytes:
    config = model.config
    assert config.moe is not None
    experts = other = 0.0
    for name, weight in model.blocks.named_parameters():
        if ".ffn.w" in name:
            experts += weight.nbytes * num_experts / config.moe.num_experts
        else:
            other += weight.nbytes
    row_bytes = config.hidden_size * model.embedding.weight.element_size()
    token_bytes = config.num_layers * 2 * config.attention.kv_width * model.embedding.weight.element_size()
    return Bytes(
        experts,
        other + num_requests * row_bytes,
        model.head_weight.nbytes,
        token_bytes * num_requests * (mean_context + 1),
    )


def with_layers(model: Transformer, num_layers: int) -> Transformer:
    """The first layers of the same weights."""
    part = skeleton(model.config.with_layers(num_layers))
    part.embedding, part.norm, part.head = model.embedding, model.norm, model.head
    part.blocks = nn.ModuleList(list(model.blocks)[:num_layers])
    return part


def transformers_rate(load: Load, ours: Transformer) -> float:
    """Tokens per second of continuous batching on the same weights, while all requests decode. Where requests end
    before the last one's prompt is read there is no such time, and all of the time behind prompts counts."""
    from transformers import GenerationConfig

    model: Any = peer(load.config, ours, "grouped_mm")
    model.eval()
    options = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=load.num_new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = random_prompts(load.num_requests, load.num_prompt, load.config.vocab_size, seed=1)
    with torch.no_grad():
        outputs = model.generate_batch([ids.tolist() for ids in prompts], options, record_timestamps=True)
    times_s = [np.array(output.timestamps) for output in outputs.values()]
    if len(times_s) != load.num_requests or any(len(times) != load.num_new for times in times_s):
        raise AssertionError(f"transformers drew {[len(times) for times in times_s]} tokens, not {load.num_new} each")
    first_s, end_s = max(times[0] for times in times_s), min(times[-1] for times in times_s)
    if end_s <= first_s:
        first_s, end_s = min(times[0] for times in times_s), max(times[-1] for times in times_s)
    drawn = sum(int(((times > first_s) & (times <= end_s)).sum()) for times in times_s)
    return float(drawn / (end_s - first_s))


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written in a second by copies of `num_bytes`."""
    source = torch.randint(0, 127, (num_bytes,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    return 2 * num_bytes / device_s(lambda: target.copy_(source), device)


def device_s(run: Callable[[], object], device: torch.device, calls: int = 10, repeats: int = 9) -> float:
    """Median seconds of one of several calls in a row."""
    times_s = []
    for _ in range(repeats):
        drain(device)
        start_s = time.perf_counter()
        for _ in range(calls):
            run()
        drain(device)
        times_s.append((time.perf_counter() - start_s) / calls)
    return statistics.median(times_s[1:])


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
