"""The RL loop: agents act through the gateway, the pool orders rollouts, the trainer publishes, the sampler reloads."""
