"""Completion calls of agents, in the dialects that their SDKs speak, asked of an engine and recorded as tokens."""
