"""Grouped-query attention: projection, QK norm and rotary embedding; the plan supplies the mask."""

from torch import Tensor, nn

from m2forge.kernels.rotary import rotate
from m2forge.model.config import ModelConfig
from m2forge.model.linear import Linear
from m2forge.model.norm import RMSNorm
from m2forge.model.plan import Attend
from m2forge.model.rope import Rotation


class Attention(nn.Module):
    """q, k and v are stacked in one matrix in this order: one product forward, one backward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config.attention
        width, kv_width = self.config.q_width, self.config.kv_width
        self.qkv = Linear(config.hidden_size, width + 2 * kv_width)
        self.out = Linear(width, config.hidden_size)
        if self.config.qk_norm != "none":
            flat = self.config.qk_norm == "flat"
            self.q_norm = RMSNorm(width if flat else self.config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(kv_width if flat else self.config.head_dim, config.norm_eps)

    def forward(self, x_ND: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        c = self.config
        q, k, v = self.qkv(x_ND).split((c.q_width, c.kv_width, c.kv_width), dim=-1)
        if c.qk_norm == "flat":
            q, k = self.q_norm(q), self.k_norm(k)
        q_NHK, k_NGK, v_NGK = (x.unflatten(-1, (-1, c.head_dim)) for x in (q, k, v))
        if c.qk_norm == "head":
            q_NHK, k_NGK = self.q_norm(q_NHK), self.k_norm(k_NGK)
        mixed_NHK = attend(rotate(q_NHK, *rotation), rotate(k_NGK, *rotation), v_NGK)
        out: Tensor = self.out(mixed_NHK.flatten(1))
        return out
