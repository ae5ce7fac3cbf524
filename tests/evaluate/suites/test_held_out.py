"""Held-out loss against the plain computation."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from m2forge.evaluate.predictor import held_out_loss
from m2forge.model.build import build
from m2forge.model.plan import Documents
from m2forge.records import NO_TARGET, Pack
from tests.model.draw import SMALL

MODEL = build(SMALL.model_copy(update={"num_mtp": 2, "num_layers": 2}))


class Packs:
    """Three packs of documents of three domains, of which the last never occurs."""

    domains = ("code", "prose", "none")

    def __init__(self) -> None:
        rng, self.packs = np.random.default_rng(0), []
        for _ in range(3):
            lengths = [1, 2, 9, 20]
            tokens = rng.integers(0, SMALL.vocab_size, sum(lengths)).astype(np.int32)
            targets = np.append(tokens[1:], NO_TARGET)
            targets[np.cumsum(lengths) - 1] = NO_TARGET
            self.packs.append(Pack(tokens, targets, np.array(lengths), np.array([0, 1, 0, 1])))


@torch.no_grad()
def plain(packs: list[Pack], domain: int | None, depth: int) -> tuple[float, int, float]:
    """(mean loss, targets, share of agreement) of the documents of a domain, document by document."""
    losses, agreed = [], []
    for pack in packs:
        ends = np.cumsum(pack.lengths)
        for end, length, tag in zip(ends, pack.lengths, pack.tags, strict=True):
            if domain is not None and tag != domain:
                continue
            tokens = torch.tensor(pack.tokens[end - length : end], dtype=torch.int64)
            output = MODEL(tokens, Documents([int(length)]))
            main = MODEL.logits(output.hidden_ND)
            logits = MODEL.logits((output.hidden_ND, *output.mtp_hidden_ND)[depth])
            for position in range(depth, length - 1):
                losses.append(float(F.cross_entropy(logits[position], tokens[position + 1])))
                agreed.append(bool(logits[position].argmax() == main[position].argmax()))
    return float(np.mean(losses)), len(losses), float(np.mean(agreed))


def test_losses_are_those_of_each_document_alone() -> None:
    source = Packs()
    losses = held_out_loss(MODEL, source.packs, source.domains)
    assert [loss.domain for loss in losses] == ["all", "code", "prose"]
    for loss, domain in zip(losses, (None, 0, 1), strict=True):
        mean, num_tokens, _ = plain(source.packs, domain, 0)
        assert loss.num_tokens == num_tokens
        assert loss.nats_per_token == pytest.approx(mean, rel=1e-5)  # float32 sums in another order
        assert loss.bits_per_byte is None
        for module in loss.modules:
            mean, _, agreement = plain(source.packs, domain, module.depth)
            assert module.nats_per_token == pytest.approx(mean, rel=1e-5)
            assert module.agreement == pytest.approx(agreement)
        assert [module.depth for module in loss.modules] == [1, 2]


def test_bits_per_byte_count_the_bytes_of_the_targets() -> None:
    bytes_of_id = np.arange(SMALL.vocab_size, dtype=np.int32) % 5
    source = Packs()
    everything = held_out_loss(MODEL, source.packs, source.domains, bytes_of_id=bytes_of_id)[0]
    targets = np.concatenate([pack.targets for pack in source.packs])
    num_bytes = bytes_of_id[targets[targets != NO_TARGET]].sum()
    expected = everything.nats_per_token * everything.num_tokens / math.log(2) / num_bytes
    assert everything.bits_per_byte == pytest.approx(expected)


def test_progress_is_told() -> None:
    done: list[int] = []
    held_out_loss(MODEL, Packs().packs[:2], Packs.domains, advance=done.append)
    assert done == [32, 32]
