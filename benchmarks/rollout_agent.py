"""How many tokens an engine computes for agents, whose every turn sends the whole history again.

Episodes share a prompt. Each turn adds an observation, and the completion that the policy answers with; a turn is sent
as soon as the one before has ended. The limit is the number of unique tokens, those of the token tree of all calls:
each prefix counts once. Tokens computed are counted by the engine, decode steps included. It may stay below the limit:
the last token of an episode is drawn and never computed.

What is computed depends on the cache, not on the network. A cache that does not hold all episodes forgets what the next
turn needs, and so the table goes from one that holds all of them down.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from report import Bar, print_table
from rollout_serve import BLOCK_TOKENS
from tree_workload import TokenCall, build_tree

from m2forge.model.build import build
from m2forge.model.config import AttentionConfig, ModelConfig
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.protocols import Prompt
from m2forge.records import IntArray, PolicyVersion
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core

SHARES = (1.0, 0.9, 0.75, 0.5)
"""Shares of the blocks that hold all tokens of all episodes."""
SMALLEST = ModelConfig(
    family="llama",
    vocab_size=512,
    hidden_size=16,
    num_layers=1,
    attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8, rotary_dim=8),
    intermediate_size=16,
    max_context=16_384,
)
"""For a CPU: tokens are counted, and any network computes as many."""


@dataclass(frozen=True)
class Load:
    num_episodes: int = 16
    num_shared: int = 4096
    num_turns: int = 32
    num_observed: int = 128
    num_new: int = 128

    @property
    def num_blocks(self) -> int:
        """That hold all episodes: of each its own tokens, and a last block that is not full."""
        own = self.num_turns * (self.num_observed + self.num_new)
        return -(-self.num_shared // BLOCK_TOKENS) + self.num_episodes * (-(-own // BLOCK_TOKENS) + 1)


QUICK = Load(num_episodes=8, num_shared=512, num_turns=8, num_observed=32, num_new=32)


@dataclass(frozen=True)
class Played:
    num_blocks: int
    computed: int
    unique: int
    prompted: int
    """Tokens of all prompts: what would be computed for them without a cache."""
    preemptions: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.computed / self.unique


def agent(device: torch.device, *, is_quick: bool) -> list[Bar]:
    load = QUICK if is_quick else Load()
    on_gpu = device.type == "cuda" and not is_quick
    config = preset("m2-mini") if on_gpu else SMALLEST
    model = build(config, device, torch.bfloat16 if on_gpu else torch.float32)
    results = {}
    for share in SHARES[:1] if on_gpu else SHARES:
        results[share] = played = play(model, load, int(load.num_blocks * share))
        print(f"  cache of {share:.0%}: {played.ratio:.3f} in {played.seconds:.0f} s", flush=True)
    print_table(
        f"{load.num_episodes} episodes sharing {load.num_shared:,} tokens, {load.num_turns} turns of "
        f"{load.num_observed}+{load.num_new}; each prompt is the whole history",
        ("cache, of all episodes", "blocks", "prompts, tokens", "computed", "unique", "ratio", "preempted", "s"),
        [
            (
                f"{share:.0%}",
                f"{played.num_blocks:,}",
                f"{played.prompted:,}",
                f"{played.computed:,}",
                f"{played.unique:,}",
                f"{played.ratio:.3f}",
                str(played.preemptions),
                f"{played.seconds:.1f}",
            )
            for share, played in results.items()
        ],
    )
    return [Bar.at_most("agent: tokens computed over unique tokens, cache for all", results[1.0].ratio, 1.05)]


def play(model: Transformer, load: Load, num_blocks: int) -> Played:
    rng = np.random.default_rng(0)
    step_tokens = 8192 if model.embedding.weight.is_cuda else 1024
    config = RolloutConfig(
        block_tokens=BLOCK_TOKENS, num_blocks=num_blocks, step_tokens=step_tokens, max_running=load.num_episodes, seed=0
    )
    core = Core(model, config, PolicyVersion("benchmark", 0))

    def draw(size: int) -> IntArray:
        return rng.integers(0, model.config.vocab_size, size).astype(np.int32)

    shared, calls = draw(load.num_shared), list[TokenCall]()
    history = [shared] * load.num_episodes
    answer: list[list[int]] = [[] for _ in history]
    turns_left = [load.num_turns] * load.num_episodes

    def send(episode: int) -> None:
        history[episode] = np.concatenate([history[episode], draw(load.num_observed)])
        answer[episode] = []
        turns_left[episode] -= 1
        core.add(str(episode), Prompt(history[episode], load.num_new))

    def take(episode: int) -> None:
        response = np.array(answer[episode], np.int32)
        nothing = np.zeros(response.size, np.float32)
        calls.append(TokenCall(history[episode], response, nothing, np.zeros_like(response)))
        history[episode] = np.concatenate([history[episode], response])

    start_s = time.perf_counter()
    for episode in range(load.num_episodes):
        send(episode)
    while not core.is_idle:
        for id, chunk in core.step():
            answer[int(id)] += chunk.ids.tolist()
            if chunk.finish_reason is not None:
                take(int(id))
                if turns_left[int(id)]:
                    send(int(id))
    seconds, metrics = time.perf_counter() - start_s, core.metrics()
    return Played(
        num_blocks,
        int(metrics["total_computed_tokens"]),
        build_tree(calls, model.config.vocab_size).num_tokens,
        sum(call.prompt_ids.size for call in calls),
        int(metrics["total_preemptions"]),
        seconds,
    )
