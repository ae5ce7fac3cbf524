"""Loss on held-out documents: packs in, one record per domain out, MTP modules included.

    nats per token = Σ −ln p(target) / number of targets
    bits per byte  = Σ −ln p(target) / ln 2 / bytes of the targets       (special tokens count as 0 bytes)

The MTP module at depth i predicts the same targets as the main model from a main hidden state that is i tokens old; its
loss and its agreement with the main model are measured where that state exists, so not on a document's first i tokens.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m2forge.evaluate.report import DomainLoss, ModuleLoss, readable_bytes
from m2forge.kernels.logit_chunk import chunk_rows
from m2forge.model.plan import Documents
from m2forge.model.transformer import Transformer
from m2forge.records import NO_TARGET, IntArray, Pack
from m2forge.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Sum:
    """Sums of one domain and one head; head 0 is the main model, head i the MTP module at depth i."""

    nats: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0
    num_agreed: int = 0

    def add(self, other: "_Sum") -> None:
        self.nats += other.nats
        self.num_tokens += other.num_tokens
        self.num_bytes += other.num_bytes
        self.num_agreed += other.num_agreed


def held_out_loss(
    model: Transformer,
    packs: Iterable[Pack],
    domains: Sequence[str],
    *,
    bytes_of_id: IntArray | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[DomainLoss]:
    """The loss over all domains first, then of each domain that occurred. `domains`: names that the packs' tags index
    into. `advance` is called with the tokens of each finished pack."""
    sums = [[_Sum() for _ in range(1 + len(model.mtp))] for _ in domains]
    for pack in packs:
        _add_pack(model, pack, bytes_of_id, sums)
        advance(pack.tokens.size)
    everything = [_Sum() for _ in range(1 + len(model.mtp))]
    for by_head in sums:
        for total, part in zip(everything, by_head, strict=True):
            total.add(part)
    rows = [("all", everything), *zip(domains, sums, strict=True)]
    return [_record(domain, by_head, bytes_of_id is not None) for domain, by_head in rows if by_head[0].num_tokens]


def byte_lengths(tokenizer: Tokenizer, vocab_size: int) -> IntArray:
    """Bytes of text per id; 0 for special tokens and ids that the tokenizer does not have."""
    lengths, specials = np.zeros(vocab_size, np.int32), set(tokenizer.special_ids.values())
    for token in range(min(vocab_size, tokenizer.vocab_size)):
        if token not in specials:
            lengths[token] = len(readable_bytes(tokenizer, [token], unknown=b""))
    return lengths


@torch.no_grad()
def _add_pack(model: Transformer, pack: Pack, bytes_of_id: IntArray | None, sums: list[list[_Sum]]) -> None:
    device = model.embedding.weight.device
    plan = Documents(pack.lengths.tolist(), device)
    output = model(torch.tensor(pack.tokens, dtype=torch.int64, device=device), plan)
    position = np.flatnonzero(pack.targets != NO_TARGET).astype(np.int32)
    target = pack.targets[position]
    tag = np.repeat(pack.tags, pack.lengths)[position]
    age = plan.position_N.cpu().numpy()[position]
    main_choice: IntArray | None = None
    for depth, hidden_ND in enumerate((output.hidden_ND, *output.mtp_hidden_ND)):
        nll, choice = _nll_and_choice(model, hidden_ND, position, target)
        main_choice = choice if main_choice is None else main_choice
        for domain, by_head in enumerate(sums):
            mine = (tag == domain) & (age >= depth)
            num_bytes = 0 if bytes_of_id is None else int(bytes_of_id[target[mine]].sum())
            agreed = int((choice[mine] == main_choice[mine]).sum())
            by_head[depth].add(_Sum(float(nll[mine].sum()), int(mine.sum()), num_bytes, agreed))


def _nll_and_choice(
    model: Transformer, hidden_ND: Tensor, position: IntArray, target: IntArray
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], IntArray]:
    """Loss and argmax token at each position, computed over chunks of logits."""
    nll, choice = np.empty(len(position), np.float64), np.empty(len(position), np.int32)
    # The float32 copy of the logits exists beside the original.
    rows = max(1, chunk_rows(model.config.vocab_size, hidden_ND.element_size(), hidden_ND.device.type) // 4)
    for start in range(0, len(position), rows):
        chunk = slice(start, start + rows)
        index_C = torch.as_tensor(position[chunk], dtype=torch.int64).to(hidden_ND.device)
        target_C1 = torch.as_tensor(target[chunk], dtype=torch.int64).to(hidden_ND.device)[:, None]
        logits_CV = model.logits(hidden_ND[index_C])
        choice[chunk] = logits_CV.argmax(-1).cpu().numpy()
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        nll_C = logits_CV.logsumexp(-1) - logits_CV.gather(1, target_C1)[:, 0]
        nll[chunk] = nll_C.double().cpu().numpy()
    return nll, choice


def _record(domain: str, by_head: Sequence[_Sum], has_bytes: bool) -> DomainLoss:
    main, modules = by_head[0], by_head[1:]
    return DomainLoss(
        domain=domain,
        num_tokens=main.num_tokens,
        nats_per_token=main.nats / main.num_tokens,
        bits_per_byte=main.nats / math.log(2) / main.num_bytes if has_bytes and main.num_bytes else None,
        modules=tuple(
            ModuleLoss(
                depth=depth, nats_per_token=part.nats / part.num_tokens, agreement=part.num_agreed / part.num_tokens
            )
            for depth, part in enumerate(modules, start=1)
            if part.num_tokens
        ),
    )
