"""The RL loop in one file: no gateway, no pool, no processes. `m2forge/rl` is the same loop for agents of any kind.

    python examples/rl_loop.py runs/demo/sft/model [--family replies] [--levels 1 3] [--steps 32]

    tasks → groups of rollouts → rewards → advantages → CISPO over token trees → optimizer step → weight update

For attempt i of a group, with reward r_i from the verifier, and every token that it sampled:

    A_i  = r_i − mean of r_j over the other attempts j of the group
    term = − sg( min(π / π_old, max_ratio) ) · A_i · log π        the loss is the mean over all sampled tokens of a step

Attempts of a group share their prompt and often more. A token tree computes what they share once; the loss is that of
the separate rows. `m2forge rl` adds: unmodified agent programs behind HTTP APIs, sampling in parallel with training,
process and speed rewards, training of the MTP modules, held-out tasks, and resume after a kill at any moment.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from m2forge.model.checkpoint import load_model
from m2forge.model.transformer import Transformer
from m2forge.protocols import Chunk, Prompt
from m2forge.records import Call, FinishReason, PolicyVersion, Submission, Task
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.tasks.catalog import find_family
from m2forge.tasks.family import Family
from m2forge.tasks.task_set import TaskSet
from m2forge.text.format import ChatFormat, make_format
from m2forge.text.message import Message
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train.batch import make_tree_batch
from m2forge.train.config import OptimizerConfig, PolicyConfig
from m2forge.train.loss.policy import policy_loss
from m2forge.train.optimizer import Optimizer
from m2forge.tree.pack import pack_trees
from m2forge.tree.token_tree import TokenTree

POLICY = PolicyConfig(loss="cispo", max_ratio=5.0, mtp_weight=0.0, pack_tokens=4096)
OPTIMIZER = OptimizerConfig(eps=1e-8, weight_decay=0.0)
NUM_GROUPS, GROUP_SIZE, WARMUP_STEPS, MAX_TURNS, MAX_TOKENS = 8, 8, 3, 5, 128


@dataclass
class Attempt:
    task: Task
    messages: list[Message]
    ids: list[int]
    """The conversation as tokens; sampled tokens as they were sampled."""
    calls: list[Call] = field(default_factory=list)
    reward: float = 0.0
    is_done: bool = False


def sample(core: Core, prompts: Sequence[list[int]], stop_ids: tuple[int, ...]) -> list[Call]:
    """One completion per prompt, decoded in one batch; prompts with a common prefix share its prefill."""
    for index, ids in enumerate(prompts):
        core.add(str(index), Prompt(np.array(ids, np.int32), MAX_TOKENS, stop_ids=stop_ids))
    chunks: list[list[Chunk]] = [[] for _ in prompts]
    while not core.is_idle:
        for id, chunk in core.step():
            chunks[int(id)].append(chunk)
    calls = []
    for ids, own in zip(prompts, chunks, strict=True):
        sampled, logprobs = (np.concatenate([getattr(chunk, name) for chunk in own]) for name in ("ids", "logprobs"))
        versions, reason = np.full(sampled.size, core.version.step), own[-1].finish_reason or FinishReason.ABORT
        calls.append(Call(np.array(ids, np.int32), sampled, logprobs, versions, reason, started_s=0.0, finished_s=0.0))
    return calls


def rollout(core: Core, chat: ChatFormat, family: Family, tasks: Sequence[Task]) -> list[Attempt]:
    """Attempt every task: sample, run the tools that were called, sample again, until there is an answer to verify."""
    attempts = []
    for task in tasks:
        messages = [Message("user", task.instruction)]
        attempts.append(Attempt(task, messages, chat.render(messages, family.tools(task), generation=True).ids))
    for _ in range(MAX_TURNS):
        active = [item for item in attempts if not item.is_done and len(item.ids) + MAX_TOKENS <= core.max_context]
        calls = sample(core, [item.ids for item in active], chat.stop_ids)
        for attempt, call in zip(active, calls, strict=True):
            attempt.calls.append(call)
            parser = chat.parser(tools := family.tools(attempt.task))
            parser.feed(chat.tokenizer.decode_bytes(call.response_ids.tolist()))
            completion = parser.finish()
            if not completion.tool_calls or not completion.closed:
                attempt.is_done, attempt.reward = True, family.verify(attempt.task, Submission(completion.content)).perf
                continue
            results = [family.call(attempt.task, made.name, dict(made.arguments)) for made in completion.tool_calls]
            history, new = [*attempt.messages, completion.message()], [Message("tool", text) for text in results]
            attempt.messages = [*history, *new]
            attempt.ids = [*call.path().tolist(), *chat.extend(history, new, tools, generation=True).ids]
    return attempts


def make_tree(group: Sequence[Attempt], vocab_size: int) -> TokenTree:
    """All completions of a group, each with its attempt's advantage."""
    tree, total = TokenTree(vocab_size), sum(attempt.reward for attempt in group)
    for number, attempt in enumerate(group):
        advantage = attempt.reward - (total - attempt.reward) / (len(group) - 1)
        for index, call in enumerate(attempt.calls):
            tree.add(call, f"{number}/{index}", episode=str(number), advantage=advantage)
    return tree


def learn(model: Transformer, optimizer: Optimizer, trees: Sequence[TokenTree], lr: float) -> None:
    """One optimizer step on the mean of the CISPO terms; a pack is a micro-batch of whole trees or parts of them."""
    packs = pack_trees(trees, POLICY.pack_tokens, with_experts=False)
    num_sampled = sum(pack.num_edges for pack in packs)
    optimizer.clear()
    for pack in packs:
        batch = make_tree_batch(pack, torch.device("cpu"), POLICY, total_weight=num_sampled, dtype=torch.float32)
        output = model(batch.tokens_N, batch.plan, with_mtp=False)
        policy_loss(model, output, batch, POLICY).total.backward()
        optimizer.collect()
    optimizer.step(lr)


def train(folder: Path, family: Family, levels: tuple[int, int], lr: float, seed: int) -> Iterator[float]:
    """Yields the mean reward of each step's rollouts, once the policy has learnt from them."""
    model, core = load_model(folder), Core(load_model(folder), RolloutConfig(seed=seed), PolicyVersion("rl_loop", 0))
    optimizer = Optimizer(model, OPTIMIZER)
    chat, tasks = make_format("auto", load_tokenizer(folder)), TaskSet(family, "train", seed)
    for step in itertools.count(1):
        drawn = [tasks.next(*levels) for _ in range(NUM_GROUPS)]
        attempts = rollout(core, chat, family, [task for task in drawn for _ in range(GROUP_SIZE)])
        groups = [attempts[number * GROUP_SIZE :][:GROUP_SIZE] for number in range(NUM_GROUPS)]
        trees = [make_tree(group, model.config.vocab_size) for group in groups]
        learn(model, optimizer, trees, lr * min(1.0, step / WARMUP_STEPS))
        core.load(model.state_dict(), PolicyVersion("rl_loop", step))
        yield sum(attempt.reward for attempt in attempts) / len(attempts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model folder by RL on a family of tasks, in one process.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--family", default="replies")
    parser.add_argument("--levels", type=int, nargs=2, default=(1, 3), help="lowest and highest difficulty")
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)  # For a small network a second thread saves little, and on a busy machine it costs a lot.
    rewards = train(args.model, find_family(args.family), tuple(args.levels), lr=5e-4, seed=0)
    for step, reward in enumerate(itertools.islice(rewards, args.steps), 1):
        print(f"step {step}  reward {reward:.3f}", flush=True)
