"""Rewards of episodes (process, speed, perf), and the advantage and loss weight of each completion call."""
