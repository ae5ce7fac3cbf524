"""Turns units of the pool into the token trees of a training step: one per group, with an advantage on every call."""

from collections.abc import Sequence

from m2forge.errors import RecordError
from m2forge.pool.stored import StoredEpisode, StoredUnit
from m2forge.reward.advantage import assign_advantages
from m2forge.reward.config import AdvantageConfig
from m2forge.reward.judge import Judged
from m2forge.tree.token_tree import TokenTree


def make_trees(units: Sequence[StoredUnit], config: AdvantageConfig, vocab_size: int) -> list[TokenTree]:
    """One tree per group, with the advantage of each call. `units` is the whole batch of a step."""
    groups: dict[str, list[tuple[Judged, TokenTree]]] = {}
    for unit in units:
        groups.setdefault(unit.group, []).extend(_judged(episode) for episode in unit.episodes)
    episodes = [judged.episode for group in groups.values() for judged, _ in group]
    advantages = iter(assign_advantages([[judged for judged, _ in group] for group in groups.values()], config))
    trees: list[TokenTree] = []
    for group in groups.values():
        tree = TokenTree(vocab_size)
        for judged, episode_tree in group:
            for index, call in enumerate(judged.episode.calls):
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


def _judged(stored: StoredEpisode) -> tuple[Judged, TokenTree]:
    """The episode with its rewards, and the tree of its calls."""
    if stored.reward is None or stored.step_rewards is None:
        raise RecordError(f"episode {stored.name}: expected a reward for it and for each of its steps")
    tree = stored.tree()
    return Judged(stored.episode(tree), stored.step_rewards), tree
