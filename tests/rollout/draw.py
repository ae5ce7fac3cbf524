"""Random networks and traffic for the engine, and the plain computations that it must equal."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from m2forge.model.build import build
from m2forge.model.config import AttentionConfig, ModelConfig, WindowConfig
from m2forge.model.plan import Attend, visible
from m2forge.model.transformer import Transformer
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, IntArray, PolicyVersion, Sampling
from m2forge.rollout.config import OldCache, OnLoad, RolloutConfig
from m2forge.rollout.core import Core
from m2forge.rollout.request import Request
from m2forge.rollout.sampler import uniforms
from tests.model.draw import model_configs

SAMPLINGS = (
    Sampling(0.0),
    Sampling(),
    Sampling(0.7, top_p=0.8),
    Sampling(1.3, top_k=4),
    Sampling(0.9, min_p=0.2, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.3),
    Sampling(0.0, repetition_penalty=1.5),
)


Probabilities = npt.NDArray[np.float64]

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
    return model


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


@st.composite
def prompts(draw: st.DrawFn, vocab_size: int, samplings: Sequence[Sampling]) -> Prompt:
    """Alike where they begin, so that they meet in the cache."""
    shared = [token % vocab_size for token in range(draw(st.integers(0, 9)))]
    own = draw(st.lists(st.integers(0, min(vocab_size, 5) - 1), min_size=1, max_size=7))
    return Prompt(
        np.array(shared + own, np.int32),
        max_tokens=draw(st.integers(1, 7)),
        sampling=draw(st.sampled_from(samplings)),
        stop_ids=tuple(draw(st.sets(st.integers(0, vocab_size - 1), max_size=2))),
        seed=draw(st.integers(0, 2**64 - 1)),
        num_samples=draw(st.integers(1, 3)),
        priority=draw(st.integers(0, 2)),
        returns_experts=draw(st.booleans()),
    )


@st.composite
def traffics(
    draw: st.DrawFn,
    samplings: Sequence[Sampling] = SAMPLINGS,
    on_load: OnLoad = "continue",
    old_cache: OldCache = "drop",
    max_loads: int = 0,
) -> Traffic:
    model = draw(model_configs())
    block_tokens = draw(st.integers(1, 5))
    # The longest prompt takes 22 places; few more, so that there is pressure.
    num_blocks = -(-22 // block_tokens) + draw(st.integers(0, 8))
    max_running = draw(st.integers(1, 6))
    config = RolloutConfig(
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        max_running=max_running,
        step_tokens=max_running + draw(st.integers(0, 12)),
        on_load=on_load,
        old_cache=old_cache,
    )
    steps = st.integers(0, 15)
    arrivals = draw(
        st.lists(
            st.builds(Arrival, steps, prompts(model.vocab_size, samplings), st.none() | st.none() | steps),
            min_size=1,
            max_size=6,
        )
    )
    loads = draw(st.lists(steps, min_size=min(1, max_loads), max_size=max_loads))
    return Traffic(model, config, tuple(arrivals), tuple(sorted(loads)))


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


@dataclass
class Served:
    core: Core
    completions: Completions
    weights: list[Transformer]
    """By version."""
    computed_by: dict[tuple[str, int], list[tuple[tuple[int, int], ...]]]
    """For each token drawn: (first token, version) of what was in the cache."""


def serve(traffic: Traffic) -> Served:
    """Let the traffic happen, with all accounting checked after every step."""
    weights = [network(traffic.model, seed) for seed in range(len(traffic.load_steps) + 1)]
    core = Core(network(traffic.model, 0), traffic.config, version(0))
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
        if request.num_left == 0:
            runs = tuple((first, by.step) for first, by in request.computed_by)
            drawn = served.computed_by[request.id, request.sample]
            del drawn[request.num_sampled :]  # those before a restart
            drawn.append(runs)

    core._scheduler.advance = watched  # type: ignore[method-assign]


def tiny(clock: list[float] | None = None, decode: object = None, **changes: object) -> Core:
    config = RolloutConfig.model_validate(
        {"block_tokens": 4, "num_blocks": 16, "max_running": 8, "step_tokens": 16} | changes
    )
    return Core(network(TINY), config, version(0), decode, (lambda: clock[0]) if clock else (lambda: 0.0))  # type: ignore[arg-type]


def finish(core: Core) -> Completions:
    completions: Completions = {}
    while not core.is_idle:
        collect(completions, core.step())
        core.audit()
    return completions


# -- what must come out -----------------------------------------------------------------------------------------------


class Behind:
    """Tokens behind others whose keys and values are given: the plainest cache there is."""

    def __init__(self, start: int, num_tokens: int, past: list[tuple[Tensor, Tensor]]) -> None:
        self.start, self.past, self.present = start, past, list[tuple[Tensor, Tensor]]()
        self.position_N = torch.arange(start, start + num_tokens)
        self.count_N: Tensor | None = None

    def bind(self, window: WindowConfig | None) -> Attend:
        end = self.start + len(self.position_N)
        mask = visible(end, window, self.start)
        seen = torch.ones(end, end).tril()[self.start :] > 0 if mask is None else mask

        def attend(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            if self.past:
                k_NGK, v_NGK = (
                    torch.cat(pair) for pair in zip(self.past[len(self.present)], (k_NGK, v_NGK), strict=True)
                )
            self.present.append((k_NGK, v_NGK))
            q, k, v = (x.transpose(0, 1) for x in (q_NHK, k_NGK, v_NGK))
            repeats = q.shape[0] // k.shape[0]
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)

        return attend

    def to_parent(self, x_ND: Tensor) -> Tensor:
        raise NotImplementedError


@torch.no_grad()
def all_logits(model: Transformer, ids: Sequence[int]) -> Tensor:
    """Behind each token, by one forward pass of the network as it is trained."""
    return model.logits(model(torch.tensor([ids]), with_mtp=False).hidden_ND)


@torch.no_grad()
def next_logits(weights: Sequence[Transformer], ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> Tensor:
    """Logits behind `ids` where each part of them was computed by the weights that `runs` names."""
    past: list[tuple[Tensor, Tensor]] = []
    ends = [*(first for first, _ in runs[1:]), len(ids)]
    for (first, by), end in zip(runs, ends, strict=True):
        plan = Behind(first, end - first, past)
        hidden_ND = weights[by](torch.tensor(ids[first:end]), plan, with_mtp=False).hidden_ND
        past = plan.present
    return weights[runs[-1][1]].logits(hidden_ND[-1:])[0]


def plain_distribution(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]
) -> Probabilities:
    """Probabilities by the rules, one at a time, in numpy."""
    x: Probabilities = logits.double().numpy().copy()
    for token in {*prompt, *sampled}:
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token in set(sampled):
        x[token] -= sampling.frequency_penalty * list(sampled).count(token) + sampling.presence_penalty
    if sampling.temperature == 0:
        greedy: Probabilities = np.eye(len(x))[int(x.argmax())]
        return greedy
    p: Probabilities = np.exp((x - x.max()) / sampling.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    order = [token for token in order if p[token] >= sampling.min_p * p.max()]
    order = order[: sampling.top_k or None]
    total, reached = sum(p[token] for token in order), 0.0
    kept: list[int] = []
    for token in order:
        if kept and reached >= sampling.top_p * total:
            break
        kept.append(token)
        reached += p[token]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    cut /= cut.sum()
    return cut


def plain_pick(p: Probabilities, seed: int, sample: int, place: int) -> int:
    (u,) = uniforms([seed], [sample], [place])
    return next(token for token, reached in enumerate(np.cumsum(p)) if reached > u * p.sum())


def check_completion(served: Served, key: tuple[str, int], prompt: Prompt) -> None:
    """Every token is the one that the plain computation draws, with its log-probabilities."""
    completion, ids = served.completions[key], prompt.ids.tolist()
    assert prompt.seed is not None
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
        assert token == plain_pick(p, prompt.seed, key[1], place)
        check_close(completion.logprobs[place], float(np.log(p[token])))
        check_close(completion.raw_logprobs[place], float(logits.log_softmax(-1)[token]))


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
