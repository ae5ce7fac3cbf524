"""Random networks and traffic for the engine, and what must become of it."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from m2forge.model.build import build
from m2forge.model.config import AttentionConfig, ModelConfig
from m2forge.model.transformer import MTPModule, Transformer
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, IntArray, PolicyVersion, Sampling
from m2forge.rollout.config import OnWeightUpdate, RolloutConfig, StaleCache
from m2forge.rollout.core import Core
from m2forge.rollout.execution.model_runner import MTPSequence
from m2forge.rollout.request import Request
from m2forge.rollout.speculation.adaptive_depth import FixedDepth, Moment
from tests.model.bias import set_biases
from tests.model.draw import model_configs
from tests.rollout.plain import all_logits, next_logits, plain_distribution, plain_pick

SAMPLINGS = (
    Sampling(0.0),
    Sampling(),
    Sampling(0.7, top_p=0.8),
    Sampling(1.3, top_k=4),
    Sampling(0.9, min_p=0.2, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.3),
    Sampling(0.0, repetition_penalty=1.5),
)

TINY = ModelConfig(
    family="llama",
    vocab_size=20,
    hidden_size=16,
    num_layers=2,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, rotary_dim=8),
    intermediate_size=16,
    max_context=64,
)
GREEDY = Sampling(0.0)


def version(step: int) -> PolicyVersion:
    return PolicyVersion("test", step)


def network(config: ModelConfig, seed: int = 0) -> Transformer:
    """In float64, with weights large enough that what a token sees changes what follows."""
    model = build(config, dtype=torch.float64, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
        set_biases(model, std=0.1, seed=seed)
        if model.mtp:
            _make_foreseeable(model)
    return model


def _make_foreseeable(model: Transformer) -> None:
    """Let the last token alone decide about half of what comes, and the modules know that half."""
    hidden_size = model.config.hidden_size
    model.embedding.weight.mul_(5)
    for module in model.mtp:
        assert isinstance(module, MTPModule)
        module.projection.weight.mul_(0.2)[:, hidden_size:].add_(torch.eye(hidden_size, dtype=torch.float64))
        module.block.load_state_dict(model.blocks[-1].state_dict())
        module.norm.load_state_dict(model.norm.state_dict())


# -- traffic ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: Prompt
    abort_step: int | None


@dataclass(frozen=True)
class Traffic:
    model: ModelConfig
    config: RolloutConfig
    arrivals: tuple[Arrival, ...]
    load_steps: tuple[int, ...]
    depths: tuple[int, ...] = (0,)
    """Of speculation, step by step, over and over."""
    multi_step: bool = False


Seeds = st.SearchStrategy[int] | st.SearchStrategy[int | None]


@st.composite
def prompts(draw: st.DrawFn, vocab_size: int, samplings: Sequence[Sampling], seeds: Seeds, max_new: int) -> Prompt:
    """Alike where they begin, so that they meet in the cache."""
    shared = [token % vocab_size for token in range(draw(st.integers(0, 9)))]
    own = draw(st.lists(st.integers(0, min(vocab_size, 5) - 1), min_size=1, max_size=7))
    return Prompt(
        np.array(shared + own, np.int32),
        max_tokens=draw(st.integers(1, max_new)),
        sampling=draw(st.sampled_from(samplings)),
        stop_ids=tuple(draw(st.sets(st.integers(0, vocab_size - 1), max_size=2))),
        seed=draw(seeds),
        num_samples=draw(st.integers(1, 3)),
        priority=draw(st.integers(0, 2)),
        returns_experts=draw(st.booleans()),
    )


@st.composite
def traffics(
    draw: st.DrawFn,
    samplings: Sequence[Sampling] = SAMPLINGS,
    on_weight_update: OnWeightUpdate = "continue",
    stale_cache: StaleCache = "drop",
    max_loads: int = 0,
    max_depth: int = 0,
) -> Traffic:
    """`max_depth`: of speculation; where it is not 0, steps may have depths of their own, and prompts no seed."""
    seeds: Seeds = st.integers(0, 2**64 - 1)
    if max_depth:
        seeds = seeds | st.none()
    speculation = draw(st.integers(1, max_depth)) if max_depth else 0
    model = draw(model_configs(num_mtp=speculation))
    block_tokens = draw(st.integers(1, 5))
    # What the longest prompt takes; few more, so that there is pressure.
    max_new = 14 if max_depth else 7
    num_blocks = -(-(15 + max_new) // block_tokens) + draw(st.integers(0, 8))
    max_running = draw(st.integers(1, 6))
    config = RolloutConfig(
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        max_running=max_running,
        step_tokens=max_running + draw(st.integers(0, 12 + 8 * speculation)),
        on_weight_update=on_weight_update,
        stale_cache=stale_cache,
        speculation=speculation,
        steps_per_sync=draw(st.integers(1, 4)),
        prefill="mixed" if speculation else draw(st.sampled_from(["mixed", "separate"])),
    )
    depths = draw(st.lists(st.integers(0, speculation), min_size=1, max_size=8)) if draw(st.booleans()) else ()
    steps = st.integers(0, 15)
    arrivals = draw(
        st.lists(
            st.builds(
                Arrival, steps, prompts(model.vocab_size, samplings, seeds, max_new), st.none() | st.none() | steps
            ),
            min_size=1,
            max_size=6,
        )
    )
    loads = draw(st.lists(steps, min_size=min(1, max_loads), max_size=max_loads))
    is_whole = draw(st.booleans())
    return Traffic(model, config, tuple(arrivals), tuple(sorted(loads)), tuple(depths) or (speculation,), is_whole)


@dataclass
class Completion:
    """All chunks of one sample together."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[npt.NDArray[np.int16]] = field(default_factory=list)
    num_chunks: int = 0
    finish_reason: FinishReason | None = None

    def add(self, chunk: Chunk) -> None:
        assert self.finish_reason is None, "answered twice"
        for name in ("ids", "logprobs", "raw_logprobs", "versions"):
            getattr(self, name).extend(getattr(chunk, name).tolist())
        if chunk.experts is not None:
            self.experts.append(chunk.experts)
        self.num_chunks += 1
        self.finish_reason = chunk.finish_reason


Completions = dict[tuple[str, int], Completion]


def collect(completions: Completions, chunks: Sequence[tuple[str, Chunk]]) -> None:
    for id, chunk in chunks:
        completions.setdefault((id, chunk.sample), Completion()).add(chunk)


class TurningDepth(FixedDepth):
    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__(0)
        self.depths = itertools.cycle(depths)

    def choose(self, moment: Moment) -> int:
        return next(self.depths)


@dataclass
class Served:
    core: Core
    completions: Completions
    weights: list[Transformer]
    """By version."""
    computed_by: dict[tuple[str, int], list[tuple[tuple[int, int], ...]]]
    """For each token drawn: (first token, version) of what was in the cache."""
    drafts: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """All that were made, and the tokens before them."""


def serve(traffic: Traffic) -> Served:
    """Let the traffic happen, with all accounting checked after every step."""
    weights = [network(traffic.model, seed) for seed in range(len(traffic.load_steps) + 1)]
    depth = TurningDepth(traffic.depths)
    model = network(traffic.model, 0)
    core = Core(model, traffic.config, version(0), depth=depth, multi_step=traffic.multi_step)
    served = Served(core, {}, weights, defaultdict(list))
    _watch(core, served)
    loads = list(enumerate(traffic.load_steps, 1))
    step = 0
    while step <= 15 or not core.is_idle:
        for place, arrival in enumerate(traffic.arrivals):
            if arrival.step == step:
                core.add(str(place), arrival.prompt)
            if arrival.abort_step == step:
                core.abort(str(place))
        while loads and loads[0][1] == step:
            number = loads.pop(0)[0]
            core.load(weights[number].state_dict(), version(number))
        collect(served.completions, core.step())
        core.audit()
        step += 1
        assert step < 2000, "no end"
    return served


def _watch(core: Core, served: Served) -> None:
    advance = core._scheduler.advance

    def watched(request: Request, num_tokens: int, version: PolicyVersion) -> None:
        advance(request, num_tokens, version)
        runs = tuple((first, by.step) for first, by in request.computed_by)
        drawn = served.computed_by[request.id, request.sample]
        drawn += [runs] * (request.num_sampled - len(drawn))

    run_mtp = core._runner.run_mtp

    def run_mtp_watched(sequences: Sequence[MTPSequence], depth: int) -> list[list[int]]:
        drafts = run_mtp(sequences, depth)
        served.drafts += zip([list(sequence.ids) for sequence in sequences], drafts, strict=True)
        return drafts

    decode_whole = core._run_multi_step

    def decode_whole_watched(batch: Mapping[Request, int], depth: int) -> int:
        num_steps = decode_whole(batch, depth)
        served.drafts += [(request.ids.copy(), request.drafts) for request in batch if request.drafts]
        return num_steps

    take = core._advance

    def take_watched(request: Request, *arguments: Any) -> bool:
        del served.computed_by[request.id, request.sample][request.num_sampled :]  # those before a restart
        return take(request, *arguments)

    core._run_multi_step = decode_whole_watched  # type: ignore[method-assign]
    core._advance = take_watched  # type: ignore[method-assign,assignment]
    core._scheduler.advance = watched  # type: ignore[method-assign]
    core._runner.run_mtp = run_mtp_watched  # type: ignore[method-assign]


def tiny(clock: list[float] | None = None, decode: object = None, **changes: object) -> Core:
    config = RolloutConfig.model_validate(
        {"block_tokens": 4, "num_blocks": 16, "max_running": 8, "step_tokens": 16} | changes
    )
    model = network(TINY.model_copy(update={"num_mtp": config.speculation}))
    ticks = (lambda: clock[0]) if clock else (lambda: 0.0)
    return Core(model, config, version(0), decode, ticks, FixedDepth(config.speculation))  # type: ignore[arg-type]


def finish(core: Core) -> Completions:
    completions: Completions = {}
    while not core.is_idle:
        collect(completions, core.step())
        core.audit()
    return completions


# -- what must come out -----------------------------------------------------------------------------------------------


def check_completion(served: Served, key: tuple[str, int], prompt: Prompt) -> None:
    """Every token is the one that the plain computation draws, or, without a seed, may draw, with its
    log-probabilities."""
    completion, ids = served.completions[key], prompt.ids.tolist()
    fresh: dict[int, Tensor] = {}
    for place, token in enumerate(completion.ids):
        runs = served.computed_by[key][place]
        by = runs[-1][1]
        assert completion.versions[place] == by
        if len(runs) > 1:
            logits = next_logits(served.weights, ids + completion.ids[:place], runs)
        else:
            if by not in fresh:
                fresh[by] = all_logits(served.weights[by], ids + completion.ids)
            logits = fresh[by][len(ids) + place - 1]
        p = plain_distribution(logits, prompt.sampling, ids, completion.ids[:place])
        assert prompt.seed is None or token == plain_pick(p, prompt.seed, key[1], place)
        check_close(completion.logprobs[place], float(np.log(p[token])))
        check_close(completion.raw_logprobs[place], float(logits.log_softmax(-1)[token]))


def check_served(traffic: Traffic) -> Served:
    """All ended as they had to, with the tokens they had to get, and nothing stays behind."""
    served = serve(traffic)
    for place, arrival in enumerate(traffic.arrivals):
        for sample in range(arrival.prompt.num_samples):
            key = str(place), sample
            check_end(served.completions[key], arrival.prompt, arrival.abort_step is not None)
            check_completion(served, key, arrival.prompt)
    assert len(served.completions) == sum(arrival.prompt.num_samples for arrival in traffic.arrivals)
    assert served.core.num_running == served.core.num_waiting == served.core.metrics()["num_held_blocks"] == 0
    served.core._scheduler.preempt_all()
    served.core._scheduler.pool.clear()
    assert len(served.core._scheduler.pool._free) == traffic.config.num_blocks
    return served


def check_close(handed_out: float, exact: float) -> None:
    """1e-9, besides the rounding of what is handed out to float32."""
    assert abs(handed_out - exact) <= 1e-9 + abs(exact) * 2**-24


def check_end(completion: Completion, prompt: Prompt, was_aborted: bool) -> None:
    """It ended where it had to, and for the right reason."""
    assert completion.finish_reason is not None, "lost"
    stopped = bool(completion.ids) and completion.ids[-1] in prompt.stop_ids
    assert not any(token in prompt.stop_ids for token in completion.ids[:-1])
    if completion.finish_reason is FinishReason.ABORT:
        assert was_aborted
        assert not stopped
        assert len(completion.ids) < prompt.max_tokens
    elif completion.finish_reason is FinishReason.STOP:
        assert stopped
    else:
        assert not stopped
        assert len(completion.ids) == prompt.max_tokens


def ids_of(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)
