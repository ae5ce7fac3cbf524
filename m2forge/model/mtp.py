"""Multi-token prediction (MTP): K chained modules, each predicting one token further ahead than the last.

At token n, module i joins the state of module i−1 (or of the main model, for i = 1) at n's parent with n's own
embedding, and predicts the token after n:

    h_i[n] = Block( P · [ RMSNorm(h_{i−1}[parent n]) ; RMSNorm(embedding[token n]) ] )

So every depth predicts the same next tokens as the main model, from a main state that is i tokens old. Indexing by the
child keeps this exact where a token has several children (a tree): a child has one parent. The state before a first
token is zero. Embedding and LM head are the main model's.
"""

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from m2forge.model.block import Block
from m2forge.model.config import ModelConfig
from m2forge.model.ffn import Balance
from m2forge.model.norm import RMSNorm
from m2forge.model.plan import Attend
from m2forge.model.rope import Rotation

MTPSource = Literal["main", "mtp1", "random"]
MTPGradient = Literal["all", "modules"]
"""Parameters that the MTP loss trains: all that it depends on, or the modules only."""


class MTPModule(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.state_norm = RMSNorm(size, eps)
        self.embedding_norm = RMSNorm(size, eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        # Has the last layer's shape, so that it can be initialised from its weights.
        self.block = Block(config, config.num_layers - 1)
        self.norm = RMSNorm(size, eps)

    def forward(
        self,
        parent_ND: Tensor,
        embedding_ND: Tensor,
        rotation: Rotation,
        attend: Attend,
        count_N: Tensor | None = None,
    ) -> tuple[Tensor, Balance | None]:
        joined = torch.cat((self.state_norm(parent_ND), self.embedding_norm(embedding_ND)), dim=-1)
        out: tuple[Tensor, Balance | None] = self.block(self.projection(joined), rotation, attend, count_N)
        return out


def copied_module(first: MTPModule, last_block: Block, final_norm: RMSNorm, source: MTPSource) -> MTPModule:
    """A new module for the chain: projection and input norms copied from module 1; block and final norm from the main
    model (`source="main"`) or from module 1 too (`source="mtp1"`). It is trainable even if its sources are frozen."""
    module = copy.deepcopy(first)
    if source == "main":
        module.block = copy.deepcopy(last_block)
        module.norm = copy.deepcopy(final_norm)
    return module.requires_grad_()
