"""Agents that attempt tasks: our own loop, whose every context can be rebuilt, and any program that calls an API."""
