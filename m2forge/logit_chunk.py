"""How many positions' logits exist at once, by device; without torch, because memory estimates need it too."""

CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}


def chunk_rows(vocab_size: int, item_bytes: int, device: str, chunk_bytes: int | None = None) -> int:
    """Rows per chunk, counted in the network's dtype; logits raised to float32 take twice the bytes of bfloat16
    ones."""
    budget = chunk_bytes or CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"])
    return max(1, budget // (vocab_size * item_bytes))
