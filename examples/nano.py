"""Train `m2-nano` for a minute on the sources of Python's standard library, save it, load it back and let it write.

    python examples/nano.py --seconds 60 --run-dir runs/nano

A token is a byte; token 256 stands between files. The budget is time, so learning rate and loss weights follow the
fraction of it that has passed.
"""

import argparse
import math
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor

from m2forge.kernels.cross_entropy import linear_cross_entropy
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.generate import generate
from m2forge.model.preset import preset
from m2forge.model.router import max_violation
from m2forge.model.transformer import Transformer
from m2forge.observe.metrics import MetricsWriter
from m2forge.observe.progress import progress

BOUNDARY = 256
ROWS, LENGTH = 4, 128
PEAK_RATE, WARM_UP = 6e-3, 0.05
MTP_WEIGHTS = 0.3, 0.1
HELD_OUT_EVERY = 40
PROMPT = "import os\nimport sys\n\n\ndef "


def read_sources() -> tuple[Tensor, Tensor]:
    """(tokens to train on, held-out tokens): whole files, so that nothing held out is trained on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    files = [torch.tensor([BOUNDARY, *path.read_bytes()], dtype=torch.int16) for path in paths]
    return torch.cat([file for i, file in enumerate(files) if i % HELD_OUT_EVERY]), torch.cat(files[::HELD_OUT_EVERY])


def draw_rows(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Rows that start anywhere, one token longer than the network sees: the last is only a target."""
    start = torch.randint(0, tokens.shape[0] - LENGTH, (ROWS, 1), generator=generator)
    return tokens[start + torch.arange(LENGTH + 1)].long()


def next_token_losses(model: Transformer, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the main model's loss, its multi-token prediction module's, rows per expert)."""
    output, target = model(rows[:, :-1]), rows[:, 1:].flatten()
    main, _ = linear_cross_entropy(output.hidden_ND, model.head_weight, target)
    mtp, _ = linear_cross_entropy(output.mtp_hidden_ND[0], model.head_weight, target)
    assert output.load_LE is not None
    return main, mtp, output.load_LE


@torch.no_grad()
def held_out_bits(model: Transformer, tokens: Tensor, num_batches: int = 24) -> float:
    """Bits per byte on text the model has not seen; a byte carries 8."""
    generator = torch.Generator().manual_seed(1)
    losses = [next_token_losses(model, draw_rows(tokens, generator))[0].item() for _ in range(num_batches)]
    return sum(losses) / num_batches / math.log(2)


def learning_rate(done: float) -> float:
    if done < WARM_UP:
        return PEAK_RATE * (0.01 + 0.99 * done / WARM_UP)
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def train(model: Transformer, tokens: Tensor, seconds: float, run_dir: Path) -> tuple[int, Tensor]:
    """(number of steps, rows per expert in the last one)."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(0)
    step, done, shown_s, started_s = 0, 0.0, 0, time.monotonic()
    with MetricsWriter(run_dir) as writer, progress(round(seconds), "training, seconds") as bar:
        while done < 1:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(done)
            mtp_weight = MTP_WEIGHTS[0] + (MTP_WEIGHTS[1] - MTP_WEIGHTS[0]) * done
            loss, mtp_loss, load_LE = next_token_losses(model, draw_rows(tokens, generator))
            optimizer.zero_grad()
            (loss + mtp_weight * mtp_loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.update_router_biases(load_LE)

            step, passed_s = step + 1, time.monotonic() - started_s
            done = passed_s / seconds
            rate = step * ROWS * LENGTH / passed_s
            max_vio = max_violation(load_LE).mean().item()
            metrics = {"loss": loss.item(), "mtp_loss": mtp_loss.item(), "max_vio": max_vio, "tokens_per_s": rate}
            writer.write(step, metrics)
            bar.advance(min(int(passed_s), round(seconds)) - shown_s, {"loss": loss.item(), "tokens/s": f"{rate:,.0f}"})
            shown_s = min(int(passed_s), round(seconds))
    return step, load_LE


def replace_model(model: Transformer, folder: Path) -> None:
    """An earlier run's model stays until this one is whole."""
    fresh = folder.with_name("model.fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    save_model(model, fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train m2-nano on the sources of Python's standard library.")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time (default: 60)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/nano"), help="default: runs/nano")
    args = parser.parse_args()
    if not 1 <= args.seconds < math.inf:
        parser.error(f"--seconds {args.seconds}: give a finite time of at least 1")

    tokens, held_out = read_sources()
    model = build(preset("m2-nano"), seed=0)
    before = held_out_bits(model, held_out)
    num_steps, load_LE = train(model, tokens, args.seconds, args.run_dir)
    after = held_out_bits(model, held_out)

    folder = args.run_dir / "model"
    replace_model(model, folder)
    model = load_model(folder)
    new = generate(model, [BOUNDARY, *PROMPT.encode()], max_new_tokens=300, temperature=0.7, stop_ids=(BOUNDARY,))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    text = PROMPT + bytes(token for token in new if token < BOUNDARY).decode(errors="replace")

    print(f"{text}\n\n{'-' * 80}")
    print(f"trained       m2-nano of {len(model.blocks)} layers, {num_parameters / 1e6:.1f}M parameters, from nothing")
    print(f"on            {len(tokens) / 1e6:.1f} MB of the standard library; {len(held_out) / 1e3:.0f} kB held out")
    print(f"for           {num_steps} steps of {ROWS * LENGTH} bytes, {args.seconds:.0f} s")
    print(f"before        {before:.2f} bits per byte, held out")
    print(f"after         {after:.2f} bits per byte, held out")
    print(f"balance       MaxVio {max_violation(load_LE).mean():.2f} over {load_LE.shape[1]} experts (0 is perfect)")
    print(f"model         {folder}, a Hugging Face folder; the text above was written after loading it")
    print(f"metrics       {args.run_dir / 'metrics.jsonl'}, and TensorBoard events beside it")
    print(f"next          m2forge params {folder}")
    print(f"or            m2forge export {folder} {args.run_dir / 'public'}, which transformers opens")


if __name__ == "__main__":
    main()
