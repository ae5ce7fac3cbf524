"""What fits, how fast and for how much: layouts of a training run over GPUs, and the balance of trainer and sampler."""
