"""Those who attempt tasks: a loop of our own whose every context can be rebuilt, and any program that asks an API."""
