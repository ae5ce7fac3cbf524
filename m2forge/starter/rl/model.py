"""Makes a model folder from nothing: a tokenizer, a network with random weights, and demonstrations for `m2forge sft`.

    python model.py

The demonstrations pay amounts that are in no task. They pay exactly, but often with a smaller coin than would fit: what
a model that has seen the world, but not your verifier, might do. A folder with your own model replaces all of this.
"""

import json
import random
from pathlib import Path

from m2forge.files import write_atomic
from m2forge.model.build import build
from m2forge.model.checkpoint import save_model
from m2forge.model.preset import resolve_config
from m2forge.text.format import MINIMAX_M2_SPECIALS
from m2forge.text.tokenizer import train_tokenizer

RUNS = Path("runs")
NUM_DEMONSTRATIONS = 2400
SHAPE = [
    "hidden_size=96", "init_std=0.1", "num_mtp=0", "max_context=512",
    "attention.num_heads=6", "attention.head_dim=16", "attention.rotary_dim=16", "attention.rope_theta=100.0",
    "moe.top_k=4", "moe.intermediate_size=32",
]  # fmt: skip


def demonstrate(amount: int, coins: list[int], rng: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": f"Pay {amount}."}]
    while amount:
        fitting = [coin for coin in coins if coin <= amount]
        coin = fitting[0] if rng.random() < 0.6 else rng.choice(fitting[:3])
        amount -= coin
        messages += [{"role": "assistant", "content": str(coin)}, {"role": "user", "content": f"{amount} left."}]
    return messages[:-1]


def main() -> None:
    rng = random.Random(0)
    tasks = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]
    coins = sorted({int(coin) for task in tasks for coin in task["reference"].split()}, reverse=True)
    amounts = sorted({*range(1, 1000)} - {int(task["id"]) for task in tasks})
    demonstrations = [{"messages": demonstrate(rng.choice(amounts), coins, rng)} for _ in range(NUM_DEMONSTRATIONS)]
    write_atomic(RUNS / "demonstrations.jsonl", "".join(f"{json.dumps(item)}\n" for item in demonstrations))
    # Trained on words alone, so that a number is a token per digit.
    words = ["Pay . left . You are a helpful assistant . system\nuser\nai\n"] * 2
    tokenizer = train_tokenizer(words, 400, MINIMAX_M2_SPECIALS)
    network = build(resolve_config("m2-nano", overrides=[*SHAPE, f"vocab_size={tokenizer.vocab_size}"]))
    save_model(network, RUNS / "random")
    tokenizer.save(RUNS / "random")
    print(f"wrote {RUNS / 'random'} and {RUNS / 'demonstrations.jsonl'}; next: m2forge sft sft.toml")


if __name__ == "__main__":
    main()
