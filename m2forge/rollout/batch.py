"""Builds the runner's inputs from requests."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from m2forge.rollout.depth import Moment
from m2forge.rollout.request import Request
from m2forge.rollout.runner import Completing
from m2forge.rollout.sampler import Row


def complete_alike(requests: Collection[Request]) -> bool:
    """Whether all requests decode, all greedily or none, with temperature as the only parameter: then a step can run as
    one function, unless MTP modules are behind."""
    is_greedy = next(iter(requests)).prompt.sampling.temperature == 0
    return all(
        request.num_left == 1 and (request.prompt.sampling.temperature == 0) == is_greedy and request.is_bare
        for request in requests
    )


def is_reading(batch: Mapping[Request, int]) -> bool:
    """Whether any request is in prefill: computes more than its last token and drafts."""
    return any(min(num_tokens, request.num_left) > 1 for request, num_tokens in batch.items())


def has_kept_up(requests: Iterable[Request], depth: int) -> bool:
    """Whether the MTP modules that draft have run over all tokens the main model has computed."""
    return not depth or all(request.num_foreseen[depth - 1] == request.num_computed for request in requests)


def moment_of(
    requests: Collection[Request], num_modules: int, num_coming: int, is_apart: bool, most_behind: int
) -> Moment:
    num_behind = [
        sum(request.num_computed - request.num_foreseen[module] for request in requests)
        for module in range(num_modules)
    ]
    num_wanted = sum(request.num_wanted for request in requests) / len(requests)
    return Moment(len(requests), num_coming, is_apart, num_behind, num_wanted, most_behind)


def completing(
    requests: Sequence[Request],
    drafts: Sequence[Sequence[int]],
    rooms: Sequence[int],
    table_BS: npt.NDArray[np.int64],
) -> Completing:
    return Completing(
        tokens=[request.ids[-1] for request in requests],
        starts=[request.num_computed for request in requests],
        drafts=drafts,
        rooms=rooms,
        table_BS=table_BS,
        slots=[request.slot for request in requests],
        temperatures=[request.prompt.sampling.temperature for request in requests],
        seeds=[request.seed for request in requests],
        samples=[request.sample for request in requests],
        is_seeded=[request.prompt.seed is not None for request in requests],
        places=[request.num_sampled for request in requests],
    )


def rows_of(request: Request, num_tokens: int) -> list[Row]:
    """Sampling rows of the next tokens, assuming that the drafts before each are accepted."""
    sampling, is_seeded = request.prompt.sampling, request.prompt.seed is not None
    prompt, sampled = list[int](), list[int]()
    if sampling.is_penalised:
        prompt, sampled = request.ids[: request.num_prompt], request.ids[request.num_prompt :]
    return [
        Row(
            sampling,
            request.seed,
            request.sample,
            request.num_sampled + place,
            prompt,
            sampled + request.drafts[:place] if sampling.is_penalised else sampled,
            is_seeded,
        )
        for place in range(num_tokens)
    ]
