"""The bare loop of examples/rl_loop.py does what the library does: the same advantages, the same weights, the same
rewards step by step."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import rl_loop
from examples.rl_loop import OPTIMIZER, POLICY, Attempt, learn, make_tree, rollout, train
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.records import Call, Domain, Episode, FinishReason, PolicyVersion, Submission, Task
from m2forge.reward.advantage import assign_advantages
from m2forge.reward.config import AdvantageConfig
from m2forge.reward.judge import Judged
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.tasks.catalog import find_family
from m2forge.tasks.family import Family, Verdict, make_task
from m2forge.text.format import make_format
from m2forge.text.message import Message
from m2forge.text.tokenizer import load_tokenizer, train_tokenizer
from m2forge.train.engine import TrainEngine
from m2forge.train.optimizer import Optimizer
from m2forge.tree.token_tree import TokenTree
from tests.gateway.dialogue import TEMPLATE
from tests.rl.scene import make_call, make_model
from tests.text.draw import CHATML_SPECIALS, with_chat_template

VOCAB_SIZE = 256


@dataclass(frozen=True, slots=True)
class Vowels(Family):
    """The more of the answer's letters are vowels, the better: even a random policy has something to start from."""

    name: str = "vowels"
    domain: Domain = Domain.GENERAL
    levels: range = range(1, 2)

    def draw(self, difficulty: int, seed: int) -> Task:
        return make_task(self, difficulty, f"Write {seed % 100}.", {})

    def verify(self, task: Task, submission: Submission) -> Verdict:
        answer = submission.answer
        return Verdict(sum(letter in "aeiou" for letter in answer) / max(1, len(answer)))

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return [Message("user", task.instruction), Message("assistant", "aeiou")]


@pytest.fixture
def groups() -> list[list[Attempt]]:
    """Three groups of four attempts of one to three calls, with a prompt that all calls of a group share."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(3):
        task = find_family("chain").draw(1, number)
        prompt = rng.integers(0, VOCAB_SIZE, 6).tolist()
        group = [Attempt(task, [], [], reward=float(rng.random())) for _ in range(4)]
        for attempt in group:
            attempt.calls += [make_call(rng, VOCAB_SIZE, prompt) for _ in range(int(rng.integers(1, 4)))]
        groups.append(group)
    return groups


def test_advantages_are_the_library_s(groups: list[list[Attempt]]) -> None:
    judged = [
        [
            Judged(Episode(f"{number}", attempt.task, tuple(attempt.calls)), _paid_at_the_end(attempt))
            for number, attempt in enumerate(group)
        ]
        for group in groups
    ]
    expected = assign_advantages(judged, AdvantageConfig())
    samples = [sample for group in groups for sample in make_tree(group, VOCAB_SIZE).samples]
    assert [sample.advantage for sample in samples] == pytest.approx([item.value for item in expected], abs=1e-12)
    num_sampled = sum(sample.logprobs.size for sample in samples)
    assert [sample.weight / num_sampled for sample in samples] == pytest.approx([item.weight for item in expected])


def _paid_at_the_end(attempt: Attempt) -> tuple[float, ...]:
    return (*[0.0] * (len(attempt.calls) - 1), attempt.reward)


@pytest.mark.parametrize("pack_tokens", [4096, 24], ids=["one pack", "several packs"])
def test_the_same_trees_make_the_same_weights(
    groups: list[list[Attempt]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack_tokens: int
) -> None:
    """Bitwise, over two steps, the second of which has moments."""
    policy = POLICY.model_copy(update={"pack_tokens": pack_tokens})
    monkeypatch.setattr(rl_loop, "POLICY", policy)
    folder = make_model(tmp_path)
    ours, theirs = load_model(folder), TrainEngine(load_model(folder), OPTIMIZER, policy=policy)
    trees = [make_tree(group, VOCAB_SIZE) for group in groups]
    optimizer = Optimizer(ours, OPTIMIZER)
    before = {name: weight.clone() for name, weight in ours.state_dict().items()}
    for _ in range(2):
        learn(ours, optimizer, trees, 1e-3)
        assert not theirs.step(trees, lr=1e-3).problems
    state = theirs.model.state_dict()
    assert [name for name, weight in ours.state_dict().items() if not torch.equal(weight, state[name])] == []
    assert not torch.equal(before["embedding.weight"], state["embedding.weight"])


def test_tools_are_called_and_the_answer_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy says what a demonstration says; the tokens of the attempt are those of the whole conversation."""
    folder, family = make_model(tmp_path), find_family("chain")
    chat, task = make_format("auto", load_tokenizer(folder)), family.draw(3, 0)
    messages = family.demonstrate(task, random.Random(0))
    whole = chat.render(messages, family.tools(task)).ids

    def sample(core: Core, prompts: Sequence[list[int]], stop_ids: tuple[int, ...]) -> list[Call]:
        calls = []
        for prompt in prompts:
            assert whole[: len(prompt)] == prompt
            end = next(place for place in range(len(prompt), len(whole)) if whole[place] in stop_ids) + 1
            response, zeros = np.array(whole[len(prompt) : end]), np.zeros(end - len(prompt), np.float32)
            calls.append(Call(np.array(prompt), response, zeros, zeros.astype(int), FinishReason.STOP, 0.0, 0.0))
        return calls

    monkeypatch.setattr(rl_loop, "sample", sample)
    monkeypatch.setattr(rl_loop, "MAX_TOKENS", 1)
    core = Core(load_model(folder), RolloutConfig(), PolicyVersion("test", 0))
    first, second = rollout(core, chat, family, [task, task])
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert len(first.calls) == sum(message.role == "assistant" for message in messages) > 1
    tree = make_tree([first, second], load_tokenizer(folder).vocab_size)
    assert [sample.advantage for sample in tree.samples] == [0.0] * len(tree.samples)


@pytest.fixture
def writer(tmp_path: Path) -> Path:
    """A network with random weights that writes without thinking first."""
    tokenizer = train_tokenizer([f"Write {number}." for number in range(100)], 300, CHATML_SPECIALS)
    with_chat_template(tokenizer, TEMPLATE).save(tmp_path / "tokenizer")
    config = preset("m2-nano").with_layers(1).model_copy(update={"vocab_size": tokenizer.vocab_size, "num_mtp": 0})
    save_model(build(config, seed=0), tmp_path / "model", companions=tuple((tmp_path / "tokenizer").iterdir()))
    return tmp_path / "model"


def test_it_learns_as_the_library_does(writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_loop, "MAX_TOKENS", 8)
    rewards = list(itertools.islice(train(writer, Vowels(), (1, 1), 3e-3, 0), 24))
    assert sum(rewards[-4:]) / 4 > 5 * sum(rewards[:4]) / 4, rewards
    assert rewards[-1] > 0.5

    def step(model: Transformer, optimizer: Optimizer, trees: Sequence[TokenTree], lr: float) -> None:
        engine = TrainEngine(model, OPTIMIZER, policy=POLICY)
        engine.optimizer = optimizer
        engine.step(trees, lr=lr)

    monkeypatch.setattr(rl_loop, "learn", step)
    assert list(itertools.islice(train(writer, Vowels(), (1, 1), 3e-3, 0), 8)) == rewards[:8]
