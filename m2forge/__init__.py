"""Train M2-style mixture-of-experts models, from pre-training to reinforcement learning of agents."""

__version__ = "0.1.0"
