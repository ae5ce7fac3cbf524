"""The data pool: queues groups of episodes, records their calls, orders them by a window, trains on each once."""
