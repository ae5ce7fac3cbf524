"""The share of each domain: target weights, upsampling, floors and limits in, shares that sum to 1 out.

The builder resolves a `MixtureConfig` against the available tokens into the manifest's mixture; the reader resolves
that, or its own, into a share for every token set, long samples included.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from m2forge.corpus.config import MixtureConfig
from m2forge.corpus.manifest import Kind, Manifest, Split, TokenSet
from m2forge.errors import ConfigError, suggest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A `MixtureConfig` resolved against the available tokens."""

    shares: dict[str, float]
    epochs: dict[str, float]
    """Epochs over each domain in a training run whose tokens number as many as the corpus's."""


def resolve_mixture(config: MixtureConfig, num_tokens: Mapping[str, int]) -> Resolved:
    """Shares λ·wish, with one λ for all, each clamped between its floor and its limit, that sum to 1.

    A domain's limit is max_epochs times its natural share. If the limits sum to less than 1, because domains have no
    weight, all limits are exceeded by the same factor.
    """
    total = sum(num_tokens.values())
    for domain in {*config.weights, *config.upsample} - set(num_tokens):
        _log.warning("mixture: no document of domain %r survived the filters; its weight goes to the others", domain)
    if config.weights:
        wish = {domain: config.weights.get(domain, 0.0) for domain in num_tokens}
    else:
        wish = {domain: count * config.upsample.get(domain, 1.0) for domain, count in num_tokens.items()}
    wish = {domain: weight for domain, weight in sorted(wish.items()) if weight > 0 and num_tokens[domain] > 0}
    if not wish:
        raise ConfigError(f"mixture: no domain with documents has a weight above 0; there are {sorted(num_tokens)}")
    if config.floor * len(wish) > 1.0:
        raise ConfigError(f"mixture: a floor of {config.floor} for {len(wish)} domains exceeds 1; lower it")
    most = {domain: config.max_epochs * num_tokens[domain] / total for domain in wish}
    least = {domain: min(config.floor, most[domain]) for domain in wish}
    if sum(most.values()) <= 1.0:
        held = most
    else:
        low, high = 0.0, 2.0 * max(most[domain] / wish[domain] for domain in wish)
        for _ in range(200):
            scale = (low + high) / 2
            held = {domain: min(max(scale * wish[domain], least[domain]), most[domain]) for domain in wish}
            low, high = (low, scale) if sum(held.values()) > 1.0 else (scale, high)
    held_sum = sum(held.values())
    shares = {domain: share / held_sum for domain, share in held.items()}
    return Resolved(shares, {domain: share * total / num_tokens[domain] for domain, share in shares.items()})


def set_shares(
    manifest: Manifest, mixture: Mapping[str, float] | None, split: Split, long_share: float
) -> list[tuple[TokenSet, float]]:
    """Every token set of the split that is read, with its share of the tokens.

    Long samples follow the proportions of the mixture among the domains that have some, and count towards their domain:
    the plain sets get the remainder, so the mixture holds overall, unless the long share of a domain exceeds it.
    """
    if not 0.0 <= long_share <= 1.0:
        raise ConfigError(f"long_share must lie in 0 … 1, received {long_share}")
    wished = _wished(manifest, mixture, split)
    sets = {(s.kind, s.domain): s for s in manifest.sets if s.split == split and s.domain in wished}
    long_domains = [domain for domain in wished if (Kind.LONG, domain) in sets] if long_share > 0 else []
    if long_share > 0 and not long_domains:
        raise ConfigError(
            f"long_share is {long_share} and the corpus has no long samples; build one with a table [long], as "
            "configs/corpus/stdlib.toml has, or set long_share to 0"
        )
    long_total = sum(wished[domain] for domain in long_domains)
    long_part = {domain: long_share * wished[domain] / long_total for domain in long_domains}
    rest = {domain: max(0.0, share - long_part.get(domain, 0.0)) for domain, share in wished.items()}
    rest_total = sum(rest.values())
    plain_share = 1.0 - long_share
    shares = {(Kind.LONG, domain): share for domain, share in long_part.items()}
    if plain_share > 0:
        # If long samples use up the whole mixture, plain sets still have a share: they split it by the mixture.
        parts, total = (rest, rest_total) if rest_total > 0 else (wished, 1.0)
        shares |= {(Kind.PLAIN, domain): plain_share * part / total for domain, part in parts.items()}
    return [(sets[key], shares[key]) for key in sorted(shares) if shares[key] > 0]


def _wished(manifest: Manifest, mixture: Mapping[str, float] | None, split: Split) -> dict[str, float]:
    """Target shares of the domains that have documents in the split."""
    present = {s.domain for s in manifest.sets if s.split == split and s.kind is Kind.PLAIN}
    if not present:
        raise ConfigError(f"the corpus has no documents in its split {split!r}; build it with held_out above 0")
    known = {s.domain for s in manifest.sets}
    for domain, weight in (mixture or {}).items():
        if domain not in known:
            raise ConfigError(f"mixture: the corpus has no domain {domain!r}; {suggest(domain, known)}")
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"mixture: {domain}: a weight is a number of at least 0, received {weight}")
    weights = {d: w for d, w in (mixture or manifest.mixture).items() if d in present and w > 0}
    total = sum(weights.values())
    if total <= 0:
        raise ConfigError(f"mixture: no domain of the split {split!r} has a weight above 0; it has {sorted(present)}")
    return {domain: weight / total for domain, weight in sorted(weights.items())}
