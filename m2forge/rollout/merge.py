"""Merges chunks of one completion."""

from collections.abc import Sequence

import numpy as np

from m2forge.protocols import Chunk


def merge_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of one completion as one."""
    experts = [chunk.experts for chunk in chunks if chunk.experts is not None]
    return Chunk(
        sample=chunks[0].sample,
        ids=np.concatenate([chunk.ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        raw_logprobs=np.concatenate([chunk.raw_logprobs for chunk in chunks]),
        versions=np.concatenate([chunk.versions for chunk in chunks]),
        num_cached=max(chunk.num_cached for chunk in chunks),
        experts=np.concatenate(experts) if experts else None,
        finish_reason=chunks[-1].finish_reason,
    )


def merge_by_sample(chunks: Sequence[Chunk]) -> list[Chunk]:
    """One chunk per completion that has any, in the order of their first chunks."""
    found: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault(chunk.sample, []).append(chunk)
    return [parts[0] if len(parts) == 1 else merge_chunks(parts) for parts in found.values()]
