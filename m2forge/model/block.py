"""One Transformer layer: x + attention(norm x), then x + ffn(norm x)."""

from torch import Tensor, nn

from m2forge.model.attention import Attention
from m2forge.model.config import ModelConfig
from m2forge.model.ffn import Balance, build_ffn
from m2forge.model.norm import RMSNorm
from m2forge.model.plan import Attend
from m2forge.model.rope import Rotation


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = build_ffn(config, layer)

    def forward(
        self,
        x_ND: Tensor,
        rotation: Rotation,
        attend: Attend,
        count_N: Tensor | None = None,
        recorded_NK: Tensor | None = None,
    ) -> tuple[Tensor, Balance | None]:
        """`count_N` and `recorded_NK` are passed to the router."""
        x_ND = x_ND + self.attention(self.attention_norm(x_ND), rotation, attend)
        out_ND, balance = self.ffn(self.ffn_norm(x_ND), count_N, recorded_NK)
        return x_ND + out_ND, balance
