"""Attention of a few subtrees over the path above them: each token sees the whole path, its own ancestors and itself.

    out[n] = Σ_m softmax_m( q[n]·k[m] / √K ) v[m]      over m < P and, with i = m − P, over i ≤ n < exit[i]

The first P keys are those of the path; the others belong to the N tokens themselves, in depth-first order. A CPU takes
the plain form below; CUDA takes FlexAttention with the block mask of kernels/flex.py.

Shapes: N queries, P tokens of the path, M = P + N keys, H query heads, G key/value heads, K head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def path_mask(exit_N: Tensor, position_N: Tensor, num_above: int, size: int | None, num_sinks: int) -> Tensor:
    """(N, M): the keys that each query sees. `position_N`: depth of each token in its tree. `size`: the window in
    tokens, None for no limit; all queries see the path's first `num_sinks`."""
    token_N = torch.arange(exit_N.shape[0], device=exit_N.device)
    own_NN = (token_N[None, :] <= token_N[:, None]) & (token_N[:, None] < exit_N[None, :])
    mask_NM = F.pad(own_NN, (num_above, 0), value=True)
    if size is None:
        return mask_NM
    position_M = torch.cat((torch.arange(num_above, device=exit_N.device), position_N))
    return mask_NM & ((position_N[:, None] - position_M[None, :] < size) | (position_M < num_sinks)[None, :])


def path_attention_plain(q_NHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, mask_NM: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_MGK, v_MGK))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_NM, enable_gqa=gqa)[0].transpose(0, 1)
