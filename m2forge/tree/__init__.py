"""Token trees: calls merged at common prefixes; flattened for training, cut, packed, and serialized."""
