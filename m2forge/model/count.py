"""Model size and cost: parameters by component, memory, FLOPs per token.

Computed from the config alone, without torch; a test compares every component with built networks. With c the context
length, per token:

    active    = all parameters of the layers, but only top_k experts
    forward   = 2 · (active + head) + Σ over layers 4 · q_width · (keys a query sees, on average c/2)
    training  = 3 · forward, MTP modules included
    cache     = 2 · kv_width · 2 bytes in every layer that sees the whole context
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from m2forge.model.config import ModelConfig
from m2forge.model.preset import PRESETS

CONTEXTS = (4096, 32_768, 196_608)
BYTES_PER_WEIGHT = 2
"""Size of a bfloat16 weight."""
COMPONENTS = ("embedding", "attention", "router", "experts", "dense ffn", "norms", "head", "mtp")
LAYERS = ("attention", "router", "experts", "dense ffn", "norms")

PUBLISHED_TOTAL = 229.9e9
PUBLISHED_ACTIVE = 9.8e9
"""Parameter counts in M2's technical report."""


@dataclass(frozen=True)
class Component:
    name: str
    total: int
    active: int
    """Parameters used for one token at inference."""


@dataclass(frozen=True)
class Cost:
    """Cost at one context length."""

    context: int
    forward_flops: int
    training_flops: int
    cache_bytes: int
    """KV cache of a whole sequence."""


@dataclass(frozen=True)
class Published:
    """The technical report's figures, and the sum that gives its total."""

    total: int
    active: int
    embedding_and_head_twice: int
    """Our total, counting embedding and LM head once more."""


@dataclass(frozen=True)
class Report:
    family: str
    num_layers: int
    components: tuple[Component, ...]
    total: int
    """Total without MTP modules."""
    total_with_mtp: int
    active_in_layers: int
    active: int
    """Active parameters including embedding and LM head."""
    weight_bytes: int
    """Size of all weights in bfloat16."""
    cache_bytes_per_token: int
    """KV cache growth per token in bfloat16; excludes sliding-window layers, which stop growing."""
    costs: tuple[Cost, ...]
    published: Published | None
    """Set only for the released M2."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def count(config: ModelConfig, contexts: tuple[int, ...] = CONTEXTS) -> Report:
    """The report on `config`; includes costs for those of `contexts` that the network supports."""
    components = _components(config)
    by_name = {component.name: component for component in components}
    total_with_mtp = sum(component.total for component in components)
    total = total_with_mtp - by_name["mtp"].total
    in_layers = sum(by_name[name].active for name in LAYERS)
    ends = by_name["embedding"].total + by_name["head"].total
    full_layers = sum(not config.is_windowed(layer) for layer in range(config.num_layers))
    fitting = tuple(context for context in contexts if context <= config.max_context) or (config.max_context,)
    return Report(
        family=config.family,
        num_layers=config.num_layers,
        components=components,
        total=total,
        total_with_mtp=total_with_mtp,
        active_in_layers=in_layers,
        active=in_layers + ends,
        weight_bytes=total_with_mtp * BYTES_PER_WEIGHT,
        cache_bytes_per_token=full_layers * _cache_bytes(config),
        costs=tuple(_cost(config, by_name, context) for context in fitting),
        published=Published(int(PUBLISHED_TOTAL), int(PUBLISHED_ACTIVE), total + ends) if _is_m2(config) else None,
    )


def _components(config: ModelConfig) -> tuple[Component, ...]:
    size, ends = config.hidden_size, config.vocab_size * config.hidden_size
    totals = dict.fromkeys(COMPONENTS, 0) | {"embedding": ends, "head": 0 if config.tied_head else ends, "norms": size}
    for layer in range(config.num_layers):
        for name, number in block_parameters(config, layer).items():
            totals[name] += number
    # A module has its own projection and three norms, and a block shaped as the last layer.
    module = 2 * size * size + 3 * size + sum(block_parameters(config, config.num_layers - 1).values())
    totals["mtp"] = config.num_mtp * module
    active = dict(totals)
    if config.moe is not None:
        active["experts"] = totals["experts"] // config.moe.num_experts * config.moe.top_k
    active["mtp"] = 0
    return tuple(Component(name, totals[name], active[name]) for name in COMPONENTS)


def block_parameters(config: ModelConfig, layer: int) -> dict[str, int]:
    """Parameters of one layer by component; the selection bias counts as one, whether or not it has a gradient."""
    size, attention, moe = config.hidden_size, config.attention, config.moe
    q, kv = attention.q_width, attention.kv_width
    qk_norms = {"none": 0, "flat": q + kv, "head": 2 * attention.head_dim}[attention.qk_norm]
    block = {"attention": 2 * size * (q + kv) + qkv_biases(config), "norms": 2 * size + qk_norms}
    if moe is None or not config.is_sparse(layer):
        return block | {"dense ffn": 3 * size * (config.intermediate_size or 0)}
    router = moe.num_experts * (size + moe.selection_bias)
    return block | {"router": router, "experts": moe.num_experts * 3 * size * moe.intermediate_size}


def qkv_biases(config: ModelConfig) -> int:
    """Biases of one layer's projections to q, k and v."""
    return config.attention.q_width + 2 * config.attention.kv_width if config.attention.qkv_bias else 0


def _is_m2(config: ModelConfig) -> bool:
    return config == PRESETS["m2"].model_copy(update={"num_mtp": config.num_mtp})


# -- costs ------------------------------------------------------------------------------------------------------------


def _cost(config: ModelConfig, components: Mapping[str, Component], context: int) -> Cost:
    # An embedding lookup costs no FLOPs; a tied head multiplies by the embedding.
    head = config.vocab_size * config.hidden_size
    attention = [_attention_flops(config, layer, context) for layer in range(config.num_layers)]
    forward = 2 * (sum(components[name].active for name in LAYERS) + head) + sum(attention)
    modules = (
        2 * (_active_mtp(config, components["mtp"].total) + config.num_mtp * head) + config.num_mtp * attention[-1]
    )
    cache = sum(_cached_keys(config, layer, context) for layer in range(config.num_layers)) * _cache_bytes(config)
    return Cost(context, forward, 3 * (forward + modules), cache)


def _active_mtp(config: ModelConfig, total: int) -> int:
    """Active parameters of the MTP modules; a module's block is shaped as the last layer, so only top_k of its experts
    run."""
    if config.moe is None or not config.is_sparse(config.num_layers - 1):
        return total
    per_expert = 3 * config.hidden_size * config.moe.intermediate_size
    return total - config.num_mtp * (config.moe.num_experts - config.moe.top_k) * per_expert


def _attention_flops(config: ModelConfig, layer: int, context: int) -> int:
    """Scores and mixing, each 2 · q_width for every key a query sees, averaged over the queries of a sequence."""
    keys = _cached_keys(config, layer, context)
    seen = keys - keys * keys / (2 * context)
    return round(4 * config.attention.q_width * seen)


def _cached_keys(config: ModelConfig, layer: int, context: int) -> int:
    window = config.attention.window
    if window is None or not config.is_windowed(layer):
        return context
    return min(context, window.size + window.num_sinks)


def _cache_bytes(config: ModelConfig) -> int:
    """KV cache bytes of one token in one layer."""
    return 2 * config.attention.kv_width * BYTES_PER_WEIGHT


# -- text -------------------------------------------------------------------------------------------------------------


def render(report: Report) -> str:
    """The report as a text table."""
    rows = [(part.name, short(part.total), short(part.active)) for part in report.components if part.total]
    in_layers = sum(part.total for part in report.components if part.name in LAYERS)
    lines = [
        f"{report.family}, {report.num_layers} layers",
        "",
        _row("parameters", "total", "active"),
        *(_row(*row) for row in rows),
        "-" * 46,
        _row("in layers", short(in_layers), short(report.active_in_layers)),
        _row("with embedding, head", short(report.total), short(report.active)),
    ]
    if report.total_with_mtp != report.total:
        lines.append(_row("with mtp", short(report.total_with_mtp), ""))
    lines += [
        "",
        _row("weights", f"{short(report.weight_bytes, 'KMGT')}B", "bfloat16"),
        _row("cache per token", f"{short(report.cache_bytes_per_token, 'KMGT')}B", "bfloat16"),
        "",
        _row("FLOPs per token", "forward", "training", "cache"),
    ]
    for cost in report.costs:
        flops = short(cost.forward_flops, "KMGT"), short(cost.training_flops, "KMGT")
        lines.append(_row(f"  context {cost.context:,}", *flops, f"{short(cost.cache_bytes, 'KMGT')}B"))
    lines.append("attention counted as its causal half; training as forward and backward; cache of a whole context")
    return "\n".join(lines + _render_published(report))


def _render_published(report: Report) -> list[str]:
    published = report.published
    if published is None:
        return []
    total = f"{published.total / 1e9:.1f}B"
    lines = [
        "",
        _row("beside the report", "counted", "report"),
        _row("total", short(report.total), total),
        _row("active in layers", short(report.active_in_layers), f"{published.active / 1e9:.1f}B"),
    ]
    twice = published.embedding_and_head_twice
    if f"{twice / 1e9:.1f}B" == total:
        ends = short(twice - report.total)
        lines.append(f"embedding and head are {ends}; with these counted twice the total is {short(report.total)} +")
        lines.append(f"{ends} = {short(twice)}, the report's {total}: it appears to count them twice")
    return lines


def _row(name: str, *cells: str) -> str:
    return f"{name:<22}" + "".join(f"{cell:>12}" for cell in cells)


def short(number: int, units: str = "KMBT") -> str:
    """A number with three or more digits as `1.23M`."""
    for power, unit in reversed(list(enumerate(units, 1))):
        if number >= 1000**power:
            return f"{number / 1000**power:.2f}{unit}"
    return str(number)
