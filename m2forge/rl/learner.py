"""Turns units of the pool into the token trees of a training step: one per group, with an advantage on every call."""

from collections.abc import Sequence
from dataclasses import replace

from m2forge.errors import RecordError
from m2forge.pool.stored import StoredEpisode, StoredUnit, read_roles
from m2forge.reward.advantage import assign_advantages, select_rewards, trained_calls
from m2forge.reward.config import AdvantageConfig
from m2forge.reward.judge import Judged
from m2forge.tree.token_tree import TokenTree


def make_trees(units: Sequence[StoredUnit], config: AdvantageConfig, vocab_size: int) -> list[TokenTree]:
    """One tree per group, with the advantage of each trained call. `units` is the whole batch of a step."""
    groups: dict[str, list[tuple[Judged, TokenTree, list[int]]]] = {}
    for unit in units:
        groups.setdefault(unit.group, []).extend(_judged(episode, config) for episode in unit.episodes)
    episodes = [judged.episode for group in groups.values() for judged, _, _ in group]
    advantages = iter(assign_advantages([[judged for judged, _, _ in group] for group in groups.values()], config))
    trees: list[TokenTree] = []
    for group in groups.values():
        tree = TokenTree(vocab_size)
        for judged, episode_tree, indices in group:
            for index, call in zip(indices, judged.episode.calls, strict=True):
                advantage = next(advantages)
                assert episodes[advantage.episode] is judged.episode, "advantages come in another order than episodes"
                tree.add(
                    call,
                    f"{judged.episode.id}/{index}",
                    episode=judged.episode.id,
                    advantage=advantage.value,
                    weight=advantage.weight,
                    experts=episode_tree.routing(index),
                )
        trees.append(tree)
    return trees


def _judged(stored: StoredEpisode, config: AdvantageConfig) -> tuple[Judged, TokenTree, list[int]]:
    """The episode's trained calls with their rewards, the tree of all calls, and the indices of the trained ones."""
    if stored.reward is None or stored.step_rewards is None:
        raise RecordError(f"episode {stored.name}: expected a reward for it and for each of its steps")
    tree = stored.tree()
    episode = stored.episode(tree)
    calls = trained_calls(read_roles(stored.artifacts), len(episode.calls), config)
    trained = replace(episode, calls=tuple(episode.calls[index] for index in calls))
    return Judged(trained, tuple(select_rewards(stored.step_rewards, calls))), tree, calls
