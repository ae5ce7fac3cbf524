"""Part `walk` of scale.py: `recompute = "walk"` beside `recompute = "block"` over one long path with short branches.

Trees are those of agents: turns of `TURN` tokens, whose last quarter is sampled and trained, and branches of `BRANCH`
sampled tokens that leave the path at equal distances. Each step is the engine's whole one, with LoRA 16 on attention:
masters and moments of all weights would take more than one GPU. Activation memory is the most that is allocated during
the step, less what is allocated before it.
"""

import gc
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from report import Bar, print_table

from m2forge.config import load
from m2forge.model.build import build
from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.model.lora import attach
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.records import Call, FinishReason
from m2forge.train.config import OptimizerConfig, PolicyConfig, WalkConfig
from m2forge.train.engine import TrainEngine
from m2forge.tree.token_tree import TokenTree

TURN, BRANCH, NUM_BRANCHES = 8192, 256, 7
LONG, MIDDLE, WARM = 196_608, 65_536, 16_384
"""Lengths of paths: the bars', one where both ways are timed in repetition, and one to compile with."""
SEGMENT, SMALL_SEGMENT = 8192, 2048
WIDE = "walk, four times the branches"
QWEN3 = Path(__file__).parents[1] / "configs" / "model" / "qwen3-30b-a3b.toml"


def qwen3_30b_a3b() -> ModelConfig:
    """The shape of Qwen3-30B-A3B, for paths beyond its context. No balance loss: routers are frozen."""
    return load(ModelConfig, QWEN3).model_copy(update={"max_context": 1 << 18})


def agent_tree(
    vocab_size: int, num_tokens: int, num_branches: int, turn: int = TURN, branch: int = BRANCH
) -> TokenTree:
    rng = np.random.default_rng(0)
    path = rng.integers(0, vocab_size, num_tokens, dtype=np.int32)
    tree = TokenTree(vocab_size)

    def add(prompt: "np.typing.NDArray[np.int32]", response: "np.typing.NDArray[np.int32]", name: str) -> None:
        logprobs = np.full(response.size, -1.0, np.float32)
        call = Call(prompt, response, logprobs, np.zeros_like(response), FinishReason.STOP, 0.0, 1.0)
        tree.add(call, name, advantage=1.0 if len(name) % 2 else -1.0)

    for end in range(turn, num_tokens + 1, turn):
        add(path[: end - turn // 4], path[end - turn // 4 : end], f"turn {end}")
    for index in range(num_branches):
        start = (index + 1) * num_tokens // (num_branches + 1)
        add(path[:start], rng.integers(0, vocab_size, branch, dtype=np.int32), f"branch {index}")
    return tree


@dataclass(frozen=True)
class Measured:
    seconds: float
    activations_gib: float
    loss: float


def adapted(config: ModelConfig) -> Transformer:
    model = build(config, "cuda", torch.bfloat16)
    attach(model, LoRAConfig(rank=16), Path("none"))
    model.compile_blocks()
    return model


def measure(model: Transformer, num_tokens: int, walk: WalkConfig | None, num_branches: int = NUM_BRANCHES) -> Measured:
    model.recompute = "block" if walk is None else walk.recompute
    tree = agent_tree(model.config.vocab_size, num_tokens, num_branches)
    policy = PolicyConfig(mtp_weight=0.0, pack_tokens=tree.num_tokens)
    engine = TrainEngine(model, OptimizerConfig(), policy=policy, walk=walk)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, started_s = torch.cuda.memory_allocated(), time.perf_counter()
    loss = engine.step([tree], lr=0.0).read()["loss"]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started_s
    found = Measured(seconds, (torch.cuda.max_memory_allocated() - before) / 2**30, loss)
    print(f"{num_tokens:,} tokens, {num_branches} branches, {walk}: {found}", flush=True)
    return found


def m2_layers() -> list[Bar]:
    model = adapted(preset("m2").with_layers(4).model_copy(update={"num_mtp": 0}))
    ways = {"block": None, "walk": WalkConfig(segment_tokens=SEGMENT)}
    rows, found = [], {}
    for name, config in ways.items():
        # The first steps compile, for one length and then for any.
        for length in (WARM, MIDDLE, MIDDLE, LONG):
            found[name, length] = measure(model, length, config)
        del found[name, WARM]
    measure(model, MIDDLE, ways["walk"], 4 * NUM_BRANCHES)
    for length in (MIDDLE, LONG):
        found[WIDE, length] = measure(model, length, ways["walk"], 4 * NUM_BRANCHES)
    for (name, length), one in found.items():
        rows.append((name, f"{length:,}", f"{one.seconds:.2f}", f"{one.activations_gib:.1f}", f"{one.loss:.4f}"))
    title = f"Four layers of M2, LoRA 16, segments of {SEGMENT:,} tokens, weights {weights_gib(model):.0f} GiB"
    print_table(title, ("recompute", "tokens of the path", "seconds", "activations GiB", "loss"), rows)
    walk, block, wide = (found[name, LONG] for name in ("walk", "block", WIDE))
    return [
        *(
            Bar.at_most(
                f"walk over block recomputation, time, {length:,} tokens",
                found["walk", length].seconds / found["block", length].seconds,
                1.15,
            )
            for length in (MIDDLE, LONG)
        ),
        Bar.at_most("walk over block recomputation, memory", walk.activations_gib / block.activations_gib, 0.5),
        Bar.at_most("memory with four times the branches", wide.activations_gib / walk.activations_gib, 1.03),
    ]


def qwen3() -> list[Bar]:
    model = adapted(qwen3_30b_a3b())
    walk = WalkConfig(segment_tokens=SMALL_SEGMENT)
    measure(model, WARM, walk)
    found = measure(model, LONG, walk)
    title = f"Shape of Qwen3-30B-A3B, LoRA 16, one step, weights {weights_gib(model):.0f} GiB"
    columns = ("tokens of the path", "seconds", "activations GiB", "most GiB", "loss")
    most_gib = torch.cuda.max_memory_allocated() / 2**30
    row = (f"{LONG:,}", f"{found.seconds:.0f}", f"{found.activations_gib:.1f}", f"{most_gib:.1f}", f"{found.loss:.4f}")
    print_table(title, columns, [row])
    total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return [Bar.at_most("Qwen3-30B-A3B, 196,608 tokens: GiB allocated", most_gib, total_gib)]


def weights_gib(model: Transformer) -> float:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**30


# -- on a CPU ----------------------------------------------------------------------------------------------------------


class Live:
    """Bytes that the autograd graph holds, and the most so far."""

    def __init__(self) -> None:
        self.now = self.most = 0


class Saved:
    def __init__(self, tensor: torch.Tensor, live: Live) -> None:
        self.tensor, self._live, self._size = tensor, live, tensor.numel() * tensor.element_size()
        live.now += self._size
        live.most = max(live.most, live.now)

    def __del__(self) -> None:
        self._live.now -= self._size


def saved_bytes(num_branches: int, walk: WalkConfig | None) -> int:
    model = build(preset("m2-tiny"), seed=0)
    tree = agent_tree(model.config.vocab_size, 1024, num_branches, turn=128, branch=16)
    policy = PolicyConfig(mtp_weight=0.0, pack_tokens=tree.num_tokens)
    engine, live = TrainEngine(model, OptimizerConfig(), policy=policy, walk=walk), Live()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Saved(tensor, live), lambda saved: saved.tensor):
        engine.step([tree], lr=0.0)
    return live.most


def tiny() -> list[Bar]:
    walk = WalkConfig(segment_tokens=128)
    whole, few, many = saved_bytes(7, None), saved_bytes(7, walk), saved_bytes(28, walk)
    rows = [(name, f"{number / 1e6:.1f}") for name, number in (("none", whole), ("walk", few), ("walk, 4x", many))]
    print_table("m2-tiny, a path of 1,024 tokens: saved for the backward pass", ("recompute", "MB"), rows)
    return [Bar.at_most("saved bytes with four times the branches", many / few, 1.03)]


def walk(quick: bool) -> list[Bar]:
    if quick or not torch.cuda.is_available():
        return tiny()
    bars = m2_layers()
    gc.collect()
    torch.cuda.empty_cache()
    return [*bars, *qwen3()]
