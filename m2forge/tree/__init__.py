"""Token trees: completion calls merged at their common prefixes, flattened for training, cut and packed, as bytes."""
