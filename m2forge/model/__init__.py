"""The network: configuration, attention plans, router, experts, multi-token prediction, checkpoints."""
