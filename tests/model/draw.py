"""Random small networks of all families, for hypothesis."""

from hypothesis import strategies as st

from m2forge.model.architecture import QK_NORM
from m2forge.model.config import AttentionConfig, FamilyName, ModelConfig, MoEConfig, RopeScaling, WindowConfig

FAMILIES: tuple[FamilyName, ...] = ("minimax_m2", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")

SMALL = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    num_layers=4,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, rotary_dim=16, rope_theta=1e5, qk_norm="flat"),
    moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=128),
    max_context=1024,
    num_mtp=1,
)
"""A native network for tests that need one and care little which; no preset, so that presets may change."""


SCALINGS = (
    RopeScaling(kind="linear", factor=2.0),
    RopeScaling(kind="llama3", factor=8.0, original_context=16),
    RopeScaling(kind="yarn", factor=4.0, original_context=1024),
    RopeScaling(kind="yarn", factor=16.0, original_context=32, beta_fast=2.0, beta_slow=0.25, truncate=False),
    RopeScaling(kind="yarn", factor=2.0, original_context=512, attention_factor=0.7),
)


@st.composite
def attentions(draw: st.DrawFn, family: FamilyName, num_layers: int) -> AttentionConfig:
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from((8, 16)))
    partial = family == "minimax_m2" and draw(st.booleans())
    scaling = draw(st.sampled_from((None, *SCALINGS)))
    window = None
    if family in ("mistral", "qwen2", "qwen3", "qwen3_moe") and draw(st.booleans()):
        some = st.sets(st.integers(0, num_layers - 1), min_size=1)
        layers = set(range(num_layers)) if family in ("mistral", "qwen3_moe") else draw(some)
        window = WindowConfig(size=draw(st.integers(1, 12)), layers=tuple(sorted(layers)))
    return AttentionConfig(
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim // 2 if partial else head_dim,
        rope_theta=draw(st.sampled_from((1e4, 5e6))),
        rope_scaling=scaling,
        qkv_bias=family == "qwen2",
        qk_norm=QK_NORM[family],
        window=window,
    )


@st.composite
def moes(draw: st.DrawFn, family: FamilyName, num_layers: int) -> MoEConfig:
    num_experts = draw(st.integers(2, 9))
    native = family == "minimax_m2"
    dense = set() if native else draw(st.sets(st.integers(0, num_layers - 1), max_size=num_layers - 1))
    return MoEConfig(
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(4, num_experts))),
        intermediate_size=draw(st.sampled_from((6, 16, 24))),
        scoring="sigmoid" if native else "softmax",
        normalize=native or draw(st.booleans()),
        selection_bias=native,
        bias_update="sign" if native else "none",
        dense_layers=tuple(sorted(dense)),
    )


@st.composite
def model_configs(draw: st.DrawFn, of: FamilyName | None = None, num_mtp: int = 0) -> ModelConfig:
    """Odd sizes on purpose: some break the alignment that the fast grouped product needs."""
    family: FamilyName = draw(st.sampled_from(FAMILIES)) if of is None else of
    num_layers = draw(st.integers(1, 3))
    moe = draw(moes(family, num_layers)) if family in ("minimax_m2", "qwen3_moe") else None
    return ModelConfig(
        family=family,
        vocab_size=draw(st.integers(11, 70)),
        # transformers' llama wants a multiple of the number of heads.
        hidden_size=36 if family == "llama" else draw(st.sampled_from((16, 24, 30))),
        num_layers=num_layers,
        attention=draw(attentions(family, num_layers)),
        moe=moe,
        intermediate_size=None if family == "minimax_m2" else draw(st.sampled_from((20, 32))),
        norm_eps=draw(st.sampled_from((1e-6, 1e-5))),
        tied_head=family != "minimax_m2" and draw(st.booleans()),
        num_mtp=num_mtp,
    )
