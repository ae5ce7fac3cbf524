"""The memory of one micro-batch, computed from the configs alone, without torch: the tensors that its forward pass
saves for the backward pass, and the largest temporaries of both.

Bytes of one block per token, with w bytes per element, D hidden size, Q and V the widths of queries and of keys (and of
values), H heads, E experts of which K run, F the width of an expert or of the dense network:

    norm         D·w  its input           + 4    1 / RMS            qkv        D·w  its input
    attention    (Q + 2V)·w  qkv, + 4 or 4·heads per QK norm; (Q + V)·w  rotated q, k; Q·w + 4·H  output, logsumexp
    residual     D·w  the sum after attention, the FFN norm's input; + 4
    router       D·w  its input, E·4 scores, K·8 experts, K·4 weights (twice and 4 more if normalized)
    experts      2·K·8  the permutation, 2·K·F·w  the pre-activations
    dense FFN    D·w  its input, 2·F·w  pre-activations, F·w  silu, F·w  their product

That is what the native kernels of a CPU save (`native`). Compiled blocks (`compiled`) recompute the silu and the
unnormalized weights. Plain torch below float32 (`plain`) saves a norm's input in float32, and its normalized value too.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from m2forge.logit_chunk import chunk_rows
from m2forge.model.config import ModelConfig
from m2forge.train.config import WalkConfig, head_parts, key_copies

Execution: TypeAlias = Literal["native", "plain", "compiled"]
FLOAT32, INT64 = 4, 8


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass runs over."""

    num_tokens: int
    """With padding."""
    context: int
    """Tokens of its longest path."""
    num_targets: int
    num_mtp: int = 0
    """MTP modules that run."""
    trains_main: bool = True
    """Whether the weights outside the modules, the LM head among them, get a gradient."""
    is_even: bool = True
    """Whether its sequences are equally long and do not branch: torch's own attention serves these alone."""

    freezes_main: bool = False
    """Whether the modules alone are trained: the main model then saves nothing, and none of its weights gets a
    gradient."""

    def cut(self, num_tokens: int) -> "MicroBatch":
        """Its largest piece of at most `num_tokens`."""
        kept = min(num_tokens, self.num_tokens)
        share = self.num_targets * kept / max(1, self.num_tokens)
        return replace(self, num_tokens=kept, num_targets=min(kept, math.ceil(share)))


# -- what a block saves ------------------------------------------------------------------------------------------------


def block_bytes(network: ModelConfig, layer: int, num_tokens: int, item_bytes: int, execution: Execution) -> int:
    """Bytes that a block saves for its backward pass, its input included."""
    size, attention, w = network.hidden_size, network.attention, item_bytes
    q, kv, heads, kv_heads = attention.q_width, attention.kv_width, attention.num_heads, attention.num_kv_heads
    norm = norm_bytes(size, w, execution)
    per_token = norm + size * w
    per_token += (q + 2 * kv) * w + (q + kv) * w + q * w + heads * FLOAT32
    if attention.qk_norm != "none":
        per_token += FLOAT32 * (2 if attention.qk_norm == "flat" else heads + kv_heads)
        if execution == "plain":
            per_token += (q + kv) * _plain_copies(w)
    per_token += norm + size * w
    constant, moe = 0, network.moe
    if moe is not None and network.is_sparse(layer):
        num_weights = 1 if not moe.normalize or execution == "compiled" else 2
        per_token += moe.num_experts * FLOAT32 + moe.top_k * (INT64 + num_weights * FLOAT32)
        per_token += FLOAT32 if moe.normalize else 0
        per_token += moe.top_k * (2 * INT64 + 2 * moe.intermediate_size * w)
        constant += moe.num_experts * FLOAT32
        if moe.aux_loss_weight:
            # The sum of a row of affinities, and the affinities themselves where the bias is a part of them.
            per_token += FLOAT32 + (moe.num_experts * FLOAT32 if moe.bias_update == "gradient" else 0)
    else:
        per_token += (network.intermediate_size or 0) * w * (3 if execution == "compiled" else 4)
    return per_token * num_tokens + constant


def shared_bytes(network: ModelConfig, num_tokens: int, item_bytes: int, num_ranks: int) -> int:
    """Bytes that a block saves in addition on each of the ranks that share a pack: attention's inputs and output before
    and after they travel. `num_tokens`: of the rank."""
    attention = network.attention
    # Of ranks that hold all heads, queries and outputs do not travel.
    outputs = attention.q_width if head_parts(attention, num_ranks) > 1 else 0
    return num_tokens * item_bytes * (outputs + (2 * key_copies(attention, num_ranks) - 1) * attention.kv_width)


def index_bytes(network: ModelConfig, batch: MicroBatch, num_ranks: int) -> int:
    """Bytes of a shared pack's indices: this rank's tokens, of which an MTP module takes the parents, and where ranks
    divide queries the order of all tokens. `batch`: of the rank."""
    own = batch.num_tokens if batch.num_mtp else 0
    every = batch.num_tokens * num_ranks if head_parts(network.attention, num_ranks) < num_ranks else 0
    return INT64 * (own + every)


def norm_bytes(width: int, item_bytes: int, execution: Execution) -> int:
    """Bytes per token that an RMSNorm saves: its input and 1 / RMS."""
    if execution == "plain" and item_bytes < FLOAT32:
        return width * _plain_copies(item_bytes) + FLOAT32
    return width * item_bytes + FLOAT32


def _plain_copies(item_bytes: int) -> int:
    """Bytes per element of an unfused norm below float32: its input in float32 and the normalized value."""
    return FLOAT32 + item_bytes if item_bytes < FLOAT32 else 0


def module_bytes(network: ModelConfig, num_tokens: int, item_bytes: int, execution: Execution) -> int:
    """Bytes that an MTP module saves before its block: its parent's state, both norms' sums, their joined outputs."""
    size, w = network.hidden_size, item_bytes
    per_token = norm_bytes(size, w, execution) + FLOAT32 + 2 * size * w
    if execution == "plain" and w < FLOAT32:
        per_token += size * _plain_copies(w)
    return per_token * num_tokens


def outer_bytes(network: ModelConfig, batch: MicroBatch, item_bytes: int, execution: Execution) -> int:
    """Bytes saved outside blocks and modules: token ids, rotary angles, final norms, and the gradients of hidden states
    and head that the losses compute in the forward pass."""
    size, w, num_losses = network.hidden_size, item_bytes, batch.num_mtp + (not batch.freezes_main)
    rotary = 2 * FLOAT32 * (network.attention.rotary_dim // 2)
    per_token = rotary + num_losses * (norm_bytes(size, w, execution) + size * w)
    # A frozen main model saves no ids, and the modules its embeddings, which its first block saves otherwise.
    per_token += size * w if batch.freezes_main else INT64
    return per_token * batch.num_tokens + head_gradients(network, batch, w)


def head_gradients(network: ModelConfig, batch: MicroBatch, item_bytes: int) -> int:
    """The head's gradients, one of each loss, until the backward pass adds them up."""
    num_losses = 1 + batch.num_mtp
    return num_losses * network.vocab_size * network.hidden_size * item_bytes if batch.trains_main else 0


# -- temporaries -------------------------------------------------------------------------------------------------------


def loss_workspace(network: ModelConfig, batch: MicroBatch, item_bytes: int, device: str) -> int:
    """Temporaries of a loss: a chunk of logits, and the gradients of hidden states and head in float32."""
    size, vocab = network.hidden_size, network.vocab_size
    rows = min(batch.num_targets, chunk_rows(vocab, item_bytes, device))
    logit = item_bytes
    if item_bytes < FLOAT32 and (network.float32_head or device == "cpu"):
        # Logits in float32, and their gradient rounded.
        logit = FLOAT32 + item_bytes
    chunk = rows * (vocab * logit + size * item_bytes)
    head = vocab * size * (FLOAT32 + item_bytes) if batch.trains_main else 0
    return chunk + batch.num_tokens * size * FLOAT32 + head


def block_workspace(network: ModelConfig, layer: int, num_tokens: int, item_bytes: int) -> int:
    """Temporaries of a block's backward pass: gradients of activations that live at the same time."""
    size, attention, moe = network.hidden_size, network.attention, network.moe
    stream = 2 * size
    in_attention = 2 * (attention.q_width + attention.kv_width)
    if moe is not None and network.is_sparse(layer):
        # Rows sorted by expert: the output's gradient, the activation and its gradient, the pre-activations' gradient.
        in_ffn = moe.top_k * (size + 4 * moe.intermediate_size)
    else:
        in_ffn = 4 * (network.intermediate_size or 0)
    return num_tokens * item_bytes * (stream + max(in_attention, in_ffn))


# -- the walk ----------------------------------------------------------------------------------------------------------


def stack_bytes(network: ModelConfig, batch: MicroBatch, walk: WalkConfig, item_bytes: int) -> int:
    """Keys and values of the path above a segment, and their gradients in float32, in every layer; 0 for a pack whose
    documents fit into a segment."""
    if batch.context <= walk.segment_tokens:
        return 0
    # The path above the last segment, and room for one segment.
    segments = -(-batch.context // walk.segment_tokens)
    num_tokens = segments * walk.segment_tokens
    num_layers = network.num_layers + batch.num_mtp
    num_trained = batch.num_mtp if batch.freezes_main else num_layers
    return num_tokens * 2 * network.attention.kv_width * (item_bytes * num_layers + FLOAT32 * num_trained)


def path_workspace(network: ModelConfig, batch: MicroBatch, walk: WalkConfig, item_bytes: int) -> int:
    """Bytes of one layer: gradients of the keys and values of the whole path, and from host memory a copy of these."""
    if batch.context <= walk.segment_tokens:
        return 0
    return batch.context * 2 * network.attention.kv_width * item_bytes * (2 if walk.stack == "host" else 1)
