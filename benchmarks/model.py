"""Training speed of the network: ours, transformers' and the limit of the hardware, in one process.

On one GPU: `m2-mini` forward + backward with the head against `MiniMaxM2ForCausalLM`, the same weights and tokens, the
same attention backend, and the better of two ways to compile it, whole and layer by layer; and four layers of the real
M2 against the rate of an 8192³ bfloat16 matrix product. On a CPU: `m2-tiny` against transformers.

    python benchmarks/model.py [--json] [--quick]
"""

import gc
import logging
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from peer import peer
from report import Bar, arguments, finish, median_s, print_table, times_s
from torch import Tensor
from transformers import MiniMaxM2ForCausalLM

from m2forge.kernels.head_loss import linear_cross_entropy
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.count import count
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer, fastest_attention

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Measured:
    seconds: float
    memory_gib: float
    loss: float


def our_step(model: Transformer, tokens_BL: Tensor) -> Step:
    length = tokens_BL.shape[1]
    position = torch.arange(tokens_BL.numel(), device=tokens_BL.device).view(tokens_BL.shape)[:, : length - 1].flatten()
    target = tokens_BL[:, 1:].flatten()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss, _ = linear_cross_entropy(model(tokens_BL).hidden_ND, model.head_weight, target, position_M=position)
        loss.backward()
        return loss.detach()

    return step


def peer_step(model: MiniMaxM2ForCausalLM, tokens_BL: Tensor, *, compiled: bool = False) -> Step:
    """With `compiled`, network and loss are one compiled function. Attention has the backend that ours has."""

    def loss_of(tokens_BL: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens_BL, labels=tokens_BL, use_cache=False).loss
        return loss

    function = torch.compile(loss_of) if compiled else loss_of

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with fastest_attention(tokens_BL.device):
            loss = function(tokens_BL)
        loss.backward()
        return loss.detach()

    return step


def measure(step: Step, repeats: int) -> Measured:
    loss = step().item()
    torch.cuda.reset_peak_memory_stats()
    seconds = median_s(step, repeats)
    return Measured(seconds, torch.cuda.max_memory_allocated() / 2**30, loss)


def free() -> None:
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()


def matrix_rate() -> float:
    """FLOP/s of an 8192³ bfloat16 product on random data, the median of 30 by the device's own clock."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times_ms = []
    for _ in range(35):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end))
    return float(2 * 8192**3 / (statistics.median(times_ms[5:]) / 1e3))


def flops_per_token(config: ModelConfig, length: int, *, head: bool) -> float:
    """Forward + backward: 6 per active weight, and causal attention."""
    weights = count(config).active_in_layers + (config.vocab_size * config.hidden_size if head else 0)
    return 6 * weights + 3 * config.num_layers * 4 * config.attention.q_width * length / 2


def mini(rate: float) -> list[Bar]:
    config = preset("m2-mini")
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (8, 4096), device="cuda")
    work = tokens.numel() * flops_per_token(config, tokens.shape[1], head=True)
    ours = build(config, "cuda", torch.bfloat16)
    results: dict[str, Measured] = {}
    for name in ("transformers, compiled whole", "transformers, compiled by layer"):
        model, at_once = peer(config, ours, "grouped_mm"), name.endswith("whole")
        if not at_once:
            for layer in model.model.layers:
                layer.compile()
        ours.to("cpu")  # each is measured with only its own weights on the device
        step = peer_step(model, tokens, compiled=at_once)
        results[name] = measure(step, 8)
        del model, step
        free()
        ours.to("cuda")
    ours.compile_blocks()
    mine = measure(our_step(ours, tokens), 8)
    del ours
    free()
    print_table(
        f"m2-mini, 8 x 4096 tokens, bfloat16, forward + backward with the head; limit {rate / 1e12:.0f} TFLOP/s",
        ("", "tokens/s", "TFLOP/s", "of the limit", "GiB", "loss", "ours is"),
        [
            (
                name,
                f"{tokens.numel() / r.seconds:,.0f}",
                f"{work / r.seconds / 1e12:.0f}",
                f"{work / r.seconds / rate:.0%}",
                f"{r.memory_gib:.1f}",
                f"{r.loss:.4f}",
                f"{r.seconds / mine.seconds:.2f}x",
            )
            for name, r in [*results.items(), ("m2forge, blocks compiled", mine)]
        ],
    )
    return mini_bars(mine, results)


def mini_bars(mine: Measured, peers: Mapping[str, Measured]) -> list[Bar]:
    """Each against the peer that is best at it."""
    fastest_s, least_gib = min(r.seconds for r in peers.values()), min(r.memory_gib for r in peers.values())
    difference = max(abs(mine.loss - r.loss) for r in peers.values())
    return [
        Bar.at_least("m2-mini: tokens/s over transformers compiled", fastest_s / mine.seconds, 1.5),
        Bar.at_most("m2-mini: memory over transformers compiled", mine.memory_gib / least_gib, 1.0),
        Bar.at_most("m2-mini: loss difference", difference, 0.01),
    ]


def slice_of_m2(rate: float) -> list[Bar]:
    config = preset("m2").with_layers(4)
    model = build(config, "cuda", torch.bfloat16)
    model.compile_blocks()
    rows, bars = [], []
    for num_rows, length in ((4, 8192), (1, 32768)):
        tokens = torch.randint(0, config.vocab_size, (num_rows, length), device="cuda")
        hidden = model(tokens).hidden_ND.detach().requires_grad_()
        grad = torch.randn_like(hidden)
        target = tokens.flatten()

        def layers(tokens: Tensor = tokens, grad: Tensor = grad) -> None:
            model.zero_grad(set_to_none=True)
            model(tokens).hidden_ND.backward(grad)

        def head(hidden: Tensor = hidden, target: Tensor = target) -> None:
            model.zero_grad(set_to_none=True)
            linear_cross_entropy(hidden, model.head_weight, target)[0].backward()

        layers_s = median_s(layers, 6)
        head_s = median_s(head, 4)
        work = tokens.numel() * flops_per_token(config, length, head=False)
        head_work = tokens.numel() * 6 * config.vocab_size * config.hidden_size
        share = work / layers_s / rate
        for name, seconds, flops in (("4 layers", layers_s, work), ("head", head_s, head_work)):
            rows.append(
                (
                    f"{num_rows} x {length}, {name}",
                    f"{seconds * 1e3:.1f}",
                    f"{flops / seconds / 1e12:.0f}",
                    f"{flops / seconds / rate:.1%}",
                )
            )
        bars.append(Bar.at_least(f"m2 slice {num_rows} x {length}: share of the product rate", share, 0.70))
        del tokens, hidden, grad, target
    memory_gib = torch.cuda.max_memory_allocated() / 2**30
    print_table(
        f"Four layers of M2, bfloat16, forward + backward, peak {memory_gib:.0f} GiB; limit {rate / 1e12:.0f} TFLOP/s",
        ("", "ms", "TFLOP/s", "of the limit"),
        rows,
    )
    return bars


def tiny(repeats: int) -> list[Bar]:
    config = preset("m2-tiny").model_copy(update={"num_mtp": 0})
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (4, 256))
    ours = build(config)
    names = ["m2forge", "transformers, grouped_mm", "transformers, eager"]
    steps = [our_step(ours, tokens)]
    steps += [peer_step(peer(config, ours, experts), tokens) for experts in ("grouped_mm", "eager")]
    seconds = [sorted(times)[len(times) // 2] for times in times_s(steps, repeats)]
    work = tokens.numel() * flops_per_token(config, tokens.shape[1], head=True)
    a = torch.randn(2048, 2048)
    rate = 2 * 2048**3 / median_s(lambda: a @ a, 5)
    print_table(
        f"m2-tiny, 4 x 256 tokens, float32, forward + backward; 2048³ product {rate / 1e9:.0f} GFLOP/s",
        ("", "tokens/s", "of the limit", "loss", "ours is"),
        [
            (
                name,
                f"{tokens.numel() / s:,.0f}",
                f"{work / s / rate:.0%}",
                f"{step().item():.4f}",
                f"{s / seconds[0]:.2f}x",
            )
            for name, s, step in zip(names, seconds, steps, strict=True)
        ],
    )
    return [Bar.at_least("m2-tiny on CPU: tokens/s over transformers", min(seconds[1:]) / seconds[0], 2.0)]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if torch.cuda.is_available() and not options.quick:
        rate = matrix_rate()
        bars = [*mini(rate), *slice_of_m2(rate)]
    else:
        bars = tiny(repeats=5 if options.quick else 15)
    finish(bars, options.json)


if __name__ == "__main__":
    main()
